"""Show what was found: verdicts in words, figures with bands, and the generated part of the page in docs/results."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reproduce import claims
from reproduce.claim import UNDECIDED, Claim, Interval, Method, Results, verdict_of
from reproduce.points import Store, chosen, complete_seeds, is_tuned, results, seconds_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "results" / "reproductions.md"
FIGURES = PAGE.with_suffix("")
BEGIN, END = "<!-- table: python -m reproduce --page -->", "<!-- end of the table -->"
PARTS = ("Data parallelism", "Model averaging", "Compression", "Full-batch optimization", "Model parallelism")


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(claims.__path__))


@cache
def load(name: str) -> Claim:
    claim = importlib.import_module(f"reproduce.claims.{name}").CLAIM
    assert isinstance(claim, Claim)
    return claim


class Found(NamedTuple):
    """The verdict of a claim, and the numbers it follows from."""

    seeds: int
    verdict: str
    checks: list[tuple[str, str, Interval, str]]  # task, text, interval, verdict
    results: Mapping[str, Results]  # by task


def found(claim: Claim, store: Store) -> Found:
    seeds = complete_seeds(claim, store)
    by_task = {task: results(claim, store, task, seeds) for task in claim.tasks} if seeds else {}
    checks = []
    for task, measured in by_task.items():
        for check in claim.checks:
            interval = check.interval(measured)
            checks.append((task, check.text, interval, check.verdict(interval)))
    verdict = verdict_of([verdict for *_, verdict in checks])
    few = claim.repeated and len(seeds) < 2
    return Found(len(seeds), UNDECIDED if few else verdict, checks, by_task)


def in_words(claim: Claim, it: Found) -> str:
    """Return what the command prints: each check with its interval, and the verdict."""
    units = {check.text: check.unit for check in claim.checks}
    lines = [f"claim    {claim.text} ({claim.paper})"]
    for task, text, interval, verdict in it.checks:
        lines.append(f"{verdict:14} {_at(claim, task)}{text}: {interval} {units[text]}".rstrip())
    return "\n".join([*lines, f"verdict  {it.verdict} ({it.seeds} seeds)"])


def _at(claim: Claim, task: str) -> str:
    return f"{task}: " if len(claim.tasks) > 1 else ""


# ---- the page ----


def page() -> str:
    """Return the generated part: a table of all verdicts, then each claim."""
    stores = {name: Store(RESULTS / f"{name}.jsonl") for name in names()}
    all_found = {name: found(load(name), store) for name, store in stores.items()}
    text = ["| claim | paper | verdict |", "|---|---|---|"]
    for part in PARTS:
        for name in names():
            claim = load(name)
            if claim.part == part:
                it = all_found[name]
                verdict = f"**{it.verdict}**" if it.seeds else "not measured yet"
                text.append(f"| [{claim.text}](#{name}) | {claim.paper} | {verdict} |")
    for part in PARTS:
        inside = [name for name in names() if load(name).part == part]
        text += [f"\n## {part}"] if inside else []
        for name in inside:
            text.append(section(name, load(name), stores[name], all_found[name]))
    return "\n".join(text)


def section(name: str, claim: Claim, store: Store, it: Found) -> str:
    units = {check.text: check.unit for check in claim.checks}
    control = {check.text: " *(control)*" for check in claim.checks if check.control}
    text = [f"\n### {name}\n", f"{claim.paper}: {claim.text}.\n"]
    if not it.seeds:
        return "\n".join([*text, "Not measured yet."])
    text += [
        f"**{it.verdict[0].upper()}{it.verdict[1:]}.** {claim.why}".rstrip() + "\n",
        "| must be so | measured | |",
        "|---|---|---|",
    ]
    for task, check, interval, verdict in it.checks:
        what = f"{_at(claim, task)}{check}{control.get(check, '')}"
        text.append(f"| {what} | {f'{interval} {units[check]}'.strip()} | {verdict} |")
    many = f"{it.seeds} seeds" if claim.repeated else "one run, without randomness"
    text += ["", f"![{name}](reproductions/{name}.png)\n"]
    text.append(f"`{store.run['command']}`, {store.run['date']}, commit {store.run['commit']}: {claim.how}, {many}.")
    text += [_tuning(claim, store)] if any(len(method.grid) > 1 for method in claim.methods) else []
    return "\n".join(text)


def _tuning(claim: Claim, store: Store) -> str:
    """Say what was tuned, and what was chosen; a choice at the end of its grid is marked."""
    said = []
    for method in claim.methods:
        if len(method.grid) == 1:
            continue
        for task in claim.tasks:
            at = claim.x_of(method) if method.tuned_at is None else (method.tuned_at,)
            picked = [chosen(claim, store, method, task, x) for x in at]
            ends = any(one in (method.grid[0], method.grid[-1]) for one in picked)
            what = " / ".join(dict.fromkeys(", ".join(f"{k}={v}" for k, v in one.items()) for one in picked))
            said.append(f"{_at(claim, task)}{method.name}: {what}{' (an end of its grid)' if ends else ''}")
    size = max(len(method.grid) for method in claim.methods)
    return (
        f"Chosen from {size} settings for each method, by the {claim.tuned_by} over {len(claim.tuning_seeds)} other "
        f"seeds: {'; '.join(said)}."
    )


def written() -> str:
    """Return what is written in the generated part of the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def write() -> None:
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{begin}\n\n{page()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


# ---- the figure ----


def draw(name: str, claim: Claim, it: Found, path: Path) -> None:
    """Draw a panel for each task and shown measure: lines with 95 % bands over x, or dots with bars without x."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(task, measure) for task in it.results for measure in claim.shown]
    width = 1.5 + 3.8 * len(panels)
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(width, 3.6), layout="constrained", squeeze=False)
    for axes, (task, measure) in zip(all_axes[0], panels, strict=True):
        for number, method in enumerate(claim.methods):
            _draw_method(axes, claim, method, it.results[task], measure, number)
        axes.set(xlabel=claim.x_label, ylabel=claim.shown[measure], title=_at(claim, task).rstrip(": ") or None)
        if len(claim.x) == 1:
            axes.set_xticks(range(len(claim.methods)), [m.name for m in claim.methods], rotation=20, ha="right")
        elif claim.log_x:  # label the measured values, not powers of ten
            axes.set_xscale("symlog" if min(claim.x) <= 0 else "log")
            axes.set_xticks(claim.x, [f"{value:g}" for value in claim.x])
            axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    if len(claim.x) > 1:
        all_axes[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _draw_method(axes: Any, claim: Claim, method: Method, of: Results, measure: str, number: int) -> None:
    points = [(x, Interval.of(of(method.name, measure, x))) for x in claim.x_of(method)]
    xs, means, halves = [x for x, _ in points], [i.mean for _, i in points], [i.half for _, i in points]
    low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
    if len(claim.x) == 1:
        axes.plot([number] * len(of(method.name, measure)), of(method.name, measure), ".", color="gray", alpha=0.5)
        axes.errorbar([number], means, yerr=halves, marker="o", capsize=4)
    elif len(points) == 1:  # a control that does not depend on x
        (line,) = axes.plot(claim.x, means * len(claim.x), "--", label=method.name)
        axes.fill_between(claim.x, low * len(claim.x), high * len(claim.x), alpha=0.15, color=line.get_color())
    else:
        (line,) = axes.plot(xs, means, marker="o", label=method.name)
        axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())


# ---- the list ----


def listed() -> str:
    """Return a line for each claim: its verdict, its points, and how long they took."""
    lines, total_s = [], 0.0
    for name in names():
        claim, store = load(name), Store(RESULTS / f"{name}.jsonl")
        it, seconds = found(claim, store), seconds_of(claim, store)
        total_s += seconds
        state = it.verdict if it.seeds else ("tuned" if is_tuned(claim, store) and store.values else "not measured")
        lines.append(f"{name:24} {state:14} {it.seeds:3} seeds {duration(seconds):>7}  {claim.text}")
    return "\n".join([*lines, f"{'all':24} {'':14} {'':9} {duration(total_s):>7}  one after the other"])


def duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
