"""`rainband timeline`: draw when each process computed, waited, pushed and pulled; and export it for Chrome."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rainband.cli.options import Run, RunsDirectory
from rainband.cli.report_errors import report_errors
from rainband.model_parallel.drawing.gantt import Bar, Style, draw_bars, figure_of
from rainband.views.formatting import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rainband.views.history import PastRun
    from rainband.views.spans import Span

COLORS = {
    "compute": "#2f6f9f",
    "forward": "#8fb8de",  # of a model in stages, instead of compute
    "backward": "#2f6f9f",
    "wait": "#e3b23c",
    "push": "#b5482a",
    "pull": "#4c9f70",
    "apply": "#6a4c93",
}
LOW, HEIGHT = (0.3, 0.5)
LANES = {"push": (0.16, 0.1), "pull": (0.04, 0.1)}  # lower edge and height; others: LOW, HEIGHT
MAX_SPANS = 50_000  # more cannot be told apart in an image
ROW_INCHES, MAX_INCHES = 0.32, 14.0
COMPUTING = ("compute", "forward", "backward")
MAX_EDGES = 150  # bars of a row that are separated by white edges


class Loss(NamedTuple):
    at_s: float
    samples: int
    loss: float


def command(
    run: Run = "last",
    runs: RunsDirectory = Path("runs"),
    begin: Annotated[float, typer.Option("--from", metavar="SECONDS", help="Start of the excerpt.")] = 0.0,
    end: Annotated[float | None, typer.Option("--to", metavar="SECONDS", help="End of the excerpt.")] = None,
) -> None:
    """Draw timeline.png, and write timeline.json for chrome://tracing or ui.perfetto.dev, into the run's directory."""
    from rainband.views.history import find_run, read_run
    from rainband.views.schedule_chart import draw_schedules, excerpt, predicted_spans
    from rainband.views.spans import read_spans

    with report_errors():
        directory = find_run(runs, run)
        every = read_spans(directory)
        if not every:
            raise ValueError(
                f"{directory.name} has no timeline: simulated runs (--runtime sim) have one, "
                "real runs if they were started with --timeline."
            )
        spans = within(every, begin, end)
        if not spans:
            raise ValueError(f"nothing happened from {begin} s to {end} s: the run took {_length(every):.3f} s.")
    json, image = directory / "timeline.json", directory / "timeline.png"
    found = read_run(directory)
    seen = excerpt(found, spans)
    json.write_bytes(chrome_trace([*spans, *(predicted_spans(seen) if seen else [])]))
    typer.echo(f"{json}: {count(len(spans), 'span')}")
    if draw(spans, image, title_of(found), [] if begin or end is not None else losses_of(found, _length(every))):
        typer.echo(str(image))
        if seen is not None:
            draw_schedules(seen, directory / "schedule.png", title_of(found))
            typer.echo(f"{directory / 'schedule.png'}: some batches, as measured and as predicted")
    else:
        typer.echo("no image: matplotlib is not installed (pip install 'rainband[plots]').", err=True)


def title_of(run: PastRun) -> str:
    started = run.so_far.started
    if started is None:
        return run.name
    return f"{started.task}, {started.strategy}, {count(started.num_workers, 'worker')}"


def losses_of(run: PastRun, length_s: float) -> list[Loss]:
    """Return the reported losses. The last report comes when the workers have ended, and so do their spans."""
    known = [p for p in run.so_far.progress if p.loss is not None and math.isfinite(p.loss)]
    began_s = known[-1].at_s - length_s if known else 0.0
    return [Loss(max(0.0, p.at_s - began_s), p.samples_done, float(p.loss or 0.0)) for p in known]


def within(spans: Sequence[Span], begin: float, end: float | None) -> list[Span]:
    return [span for span in spans if span.to_s >= begin and (end is None or span.from_s <= end)]


def _length(spans: Sequence[Span]) -> float:
    return max(span.to_s for span in spans)


def kind_of(span: Span) -> str:
    """Return the kind of work; for a model in stages, forward or backward."""
    return {"F": "forward", "B": "backward"}.get(span.label[:1], span.what)


def nodes_of(spans: Sequence[Span]) -> list[str]:
    """Return the nodes in the order of the picture: workers by number, then servers."""

    def order(name: str) -> tuple[bool, int, str]:
        number = name.split(" ")[-1].split("'")[0]
        return not name.startswith("worker"), int(number) if number.isdigit() else 0, name

    return sorted({span.node for span in spans}, key=order)


def chrome_trace(spans: Sequence[Span]) -> bytes:
    """Return the spans in the trace event format: per node a process, with threads for work, pushes and pulls."""
    import msgspec

    numbers = {node: number for number, node in enumerate(nodes_of(spans))}
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": node}} for node, number in numbers.items()
    ]
    for span in spans:
        lane = {"push": 1, "pull": 2}.get(span.what, 0)
        times = {"ts": round(span.from_s * 1e6, 3), "dur": round((span.to_s - span.from_s) * 1e6, 3)}
        words = {"name": span.label, "cat": kind_of(span)} if span.label else {"name": span.what}
        named.append({"ph": "X", **words, "pid": numbers[span.node], "tid": lane, **times})
    return msgspec.json.encode({"traceEvents": named, "displayTimeUnit": "ms"})


def draw(spans: Sequence[Span], path: Path, title: str = "", losses: Sequence[Loss] = ()) -> bool:
    """Draw a row per node, and above them the loss; return False if matplotlib is missing."""
    nodes = nodes_of(spans)
    top = [2.2] if len(losses) > 1 else []
    rows = max(1.0, min(ROW_INCHES * len(nodes), MAX_INCHES))
    figure, axes = figure_of(13, 1.4 + sum(top) + rows, [*top, rows])
    if figure is None:
        return False
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if top:
        _draw_loss(axes[0], losses)
    _draw_rows(axes[-1], spans, nodes)
    axes[-1].set_xlim(min(span.from_s for span in spans), _length(spans))
    figure.savefig(path, dpi=130)
    return True


def _draw_rows(axes: Axes, spans: Sequence[Span], nodes: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    numbers = {node: number for number, node in enumerate(nodes)}
    shown = _longest(spans)
    counts = Counter((span.node, kind_of(span)) for span in shown)
    styles = {(node, what): _style(what, many=number >= MAX_EDGES) for (node, what), number in counts.items()}
    for number in range(0, len(nodes), 2):
        axes.axhspan(number, number + 1, color="#f4f4f2", linewidth=0, zorder=0)
    draw_bars(
        axes,
        [Bar(numbers[span.node], span.from_s, span.to_s, styles[span.node, kind_of(span)]) for span in shown],
        nodes,
    )
    axes.set_xlabel("seconds")
    _bare(axes)
    seen = [what for what in COLORS if any(kind_of(span) == what for span in spans)]
    patches = [Patch(color=COLORS[what], label=f"{what} {_share(spans, what)}".strip()) for what in seen]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(seen), frameon=False, fontsize=9)


def _style(what: str, many: bool) -> Style:
    low, height = LANES.get(what, (LOW, HEIGHT))
    color = COLORS[what]
    if what in COMPUTING and not many:
        return Style(color, low, height, edge="white", line_width=0.5)  # separates steps
    return Style(color, low, height, edge=color, line_width=0.7 if what == "apply" else 0.0)  # apply is very short


def _longest(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the longest spans, if there are too many to be visible."""
    if len(spans) <= MAX_SPANS:
        return spans
    return sorted(spans, key=lambda span: span.from_s - span.to_s)[:MAX_SPANS]


def _share(spans: Sequence[Span], what: str) -> str:
    """Return a share of the workers' time, as text."""
    own = {name: sum(s.to_s - s.from_s for s in spans if kind_of(s) == name) for name in (*COMPUTING, "wait")}
    return f"{100 * own[what] / total:.0f} %" if what in own and (total := sum(own.values())) else ""


def _draw_loss(axes: Axes, losses: Sequence[Loss]) -> None:
    import numpy as np
    from matplotlib.ticker import FixedLocator, MaxNLocator

    at_s, samples, loss = (np.array(column, dtype=float) for column in zip(*losses, strict=True))
    axes.plot(at_s, loss, color="#333333", linewidth=1.4)
    axes.set_ylabel("training loss")
    if loss.min() > 0 and loss.max() > 20 * loss.min():
        axes.set_yscale("log")
    axes.tick_params(labelbottom=False)
    _bare(axes)
    at_s, samples, last = np.append(0.0, at_s), np.append(0.0, samples), samples[-1]
    above = axes.secondary_xaxis(
        "top",
        functions=(
            lambda seconds: np.interp(np.asarray(seconds, dtype=float), at_s, samples),
            lambda number: np.interp(np.asarray(number, dtype=float), samples, at_s),
        ),
    )
    above.xaxis.set_major_formatter("{x:,.0f}")
    above.xaxis.set_major_locator(FixedLocator([x for x in MaxNLocator(6).tick_values(0, last) if x <= last]))
    above.set_xlabel("samples")
    above.spines["top"].set_visible(False)


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
    axes.tick_params(length=0)
