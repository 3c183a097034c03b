"""`rainband compare`: train a task with several strategies and seeds, or take existing runs, and judge them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rainband.cli.options import GroupedCommand, Json, with_run_options
from rainband.cli.report_errors import EXIT_CODES, FAILED, report_errors
from rainband.options import OptionError, RunOptions, opt

if TYPE_CHECKING:
    from rainband.coordinator.state import Target
    from rainband.runtimes.config import RunConfig
    from rainband.strategy import Requirements
    from rainband.views.compare.judge import Comparison, Entrant, Tuning
    from rainband.views.compare.measured import RunMeasures

GROUP = "Comparison"
LEFT_OUT = (
    *("target", "workers", "seed", "config", "resume", "force"),
    *("dashboard", "csv", "tensorboard", "listen", "advertise", "min_workers"),
)
EVAL_EVERY_S = {"sim": 0.05}  # unless --eval-every says otherwise: the time to a target is read at evaluations
REAL_EVAL_EVERY_S = 0.5
LR_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the learning rate of the strategy: the grid of --tune
HALVING = (
    (0.25, 5),
    (0.5, 2),
)  # of the epochs, the learning rates that are tried; the best one is then trained in full
TUNE_SEED = 1_000_003  # not one of those that are compared
STOPPED = 130


def register(app: typer.Typer) -> None:
    app.command("compare", cls=GroupedCommand, epilog=EXIT_CODES)(with_run_options(compare, leave_out=LEFT_OUT))


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK STRATEGY... [KEY=VALUE]",
            help="A task and strategies, each followed by its settings; or existing runs.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="METRIC=X", rich_help_panel=GROUP, help="Value to reach, such as accuracy=0.95."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option("--seeds", metavar="N", min=1, rich_help_panel=GROUP, help="Runs of each, with seeds 0 to N-1."),
    ] = 3,
    workers: Annotated[
        str, typer.Option("--workers", metavar="N,N", rich_help_panel=GROUP, help="Numbers of workers to compare.")
    ] = "4",
    tune: Annotated[
        bool,
        typer.Option("--tune", rich_help_panel=GROUP, help="Choose each learning rate first, by successive halving."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", rich_help_panel=GROUP, help="Keep runs and report.html in DIR."),
    ] = None,
    *,
    options: RunOptions,
    as_json: Json = False,
) -> None:
    """Compare strategies: time to a target, settings, spread over seeds, cost; with a verdict in words.

    Typed again, the command continues where it was stopped. Given runs are compared as they are.

    \b
    rainband compare digits downpour sync soft_sync --target accuracy=0.95 --seeds 5
    rainband compare digits downpour sync --target accuracy=0.95 --workers 1,4,16 --runtime sim --tune
    rainband compare last NAME
    """
    from rainband.views.compare.measured import parse_target

    with report_errors():
        goal = parse_target(target) if target else None
        runs = Path(options.get("runs") or "runs")
        directories = found_runs(words, runs)
        if directories:
            if len(directories) == 2:
                _show_two(directories, as_json)
            _show(of_runs(directories, goal), out, as_json)
            return
        plan = plan_of(words, workers, seeds, options, goal, out)
    comparison, stopped = Trainer(plan, tune, sys.stderr.isatty()).run()
    with report_errors():
        _show(comparison, plan.out, as_json)
    if stopped:
        typer.echo("stopped: the same command continues.", err=True)
        raise typer.Exit(STOPPED)
    if not all(one.finished for one in comparison.contenders):
        raise typer.Exit(FAILED)


# ---- existing runs ----


def found_runs(words: Sequence[str], runs: Path) -> list[Path]:
    """Return the directories of runs if the words name runs, and no task."""
    from rainband.tasks.load import task_names
    from rainband.views.history import find_run

    first = words[0]
    if first in task_names() or ":" in first:
        return []
    if len(words) < 2:
        raise ValueError(f"{first} alone cannot be compared: give two or more runs, or a task and strategies.")
    found = [find_run(runs, word) for word in words]
    if len({directory.resolve() for directory in found}) < len(found):
        raise ValueError("the same run is given twice: it would count as two seeds. Give different runs.")
    if empty := [str(directory) for directory in found if not (directory / "events.jsonl").is_file()]:
        raise ValueError(f"{', '.join(empty)}: there are no events in it, so there is nothing to compare.")
    return found


def of_runs(directories: Sequence[Path], target: Target | None) -> Comparison:
    from rainband.views.compare.judge import Comparison, contenders_of
    from rainband.views.compare.measured import facts_of

    facts = [facts_of(directory, target) for directory in directories]
    check_metric(target, facts)
    tasks = list(dict.fromkeys(fact.task for fact in facts))
    return Comparison(" and ".join(tasks), contenders_of(facts), target)


def check_metric(target: Target | None, facts: Sequence[RunMeasures]) -> None:
    """Refuse a target whose metric no run has measured, if any has measured something."""
    known = sorted({name for fact in facts for name in fact.metrics})
    if target is not None and known and target.metric not in known:
        raise ValueError(f"--target {target.metric}: the runs have not measured it; choose from {', '.join(known)}.")


def _show_two(directories: Sequence[Path], as_json: bool) -> None:
    """Show all results of two runs side by side, and the settings that differ."""
    from rainband.views.history import read_run
    from rainband.views.runs_text import compared

    first, second = map(read_run, directories)
    for line in [*compared(first, second), ""]:
        typer.echo(line, err=as_json)


def _show(comparison: Comparison, out: Path | None, as_json: bool) -> None:
    from rainband.views.compare.report import report
    from rainband.views.compare.tables import as_record, lines_of
    from rainband.views.runs_text import to_json

    for line in lines_of(comparison):
        typer.echo(line, err=as_json)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(report(comparison), encoding="utf-8")
        typer.echo(f"\nreport: {out / 'report.html'}", err=as_json)
    if as_json:
        typer.echo(to_json(as_record(comparison)))


# ---- runs of its own ----


@dataclass(frozen=True)
class Entry:
    """A strategy with its settings, for a number of workers."""

    name: str
    words: tuple[str, ...]  # strategy and key=value
    workers: int


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison."""

    task: str
    shared: tuple[str, ...]  # settings of the task and of the simulation
    entries: tuple[Entry, ...]
    seeds: int
    options: RunOptions
    target: Target | None
    out: Path

    @property
    def definition(self) -> dict[str, Any]:
        """Return what must be the same when the comparison continues."""
        options = {name: str(value) for name, value in sorted(self.options.items())}
        goal = f"{self.target.metric}={self.target.value:g}" if self.target else None
        return {"task": self.task, "shared": list(self.shared), "options": options, "target": goal}

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return what another definition has that is not in this one, and the reverse."""
        old, new = ({**one, **one.get("options", {}), "options": None} for one in (other, self.definition))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return [f"{name.replace('_', ' ')} {_value(old.get(name))}, not {_value(new.get(name))}" for name in names]


def plan_of(
    words: Sequence[str], workers: str, seeds: int, options: RunOptions, target: Target | None, out: Path | None
) -> ComparisonPlan:
    """Read the words: TASK, settings of it, and strategies that are each followed by their settings."""
    from rainband.cli.options.words import configured
    from rainband.tasks.load import load_task
    from rainband.views.formatting import count

    task, *rest = words
    shared = tuple(word for word in rest if word.startswith(("task.", "compute.")))
    strategies: list[list[str]] = []
    for word in (word for word in rest if word not in shared):
        if "=" in word:
            if not strategies:
                raise ValueError(f"{word}: settings follow the strategy that they are of.")
            strategies[-1].append(word)
        else:
            strategies.append([word])
    if not strategies:
        raise ValueError("strategies are required, such as rainband compare digits downpour sync.")
    numbers = _numbers(workers)
    runtime = str(options.get("runtime") or "processes")
    every = EVAL_EVERY_S.get(runtime, REAL_EVAL_EVERY_S)
    defaults: RunOptions = {"eval_every_s": every}
    if runtime != "sim":
        defaults["checkpoint_every"] = 0.0  # these runs are repeated, not continued
    options = {**defaults, **options}
    entries = tuple(
        Entry(" ".join(one) + (f", {count(number, 'worker')}" if len(numbers) > 1 else ""), tuple(one), number)
        for one in strategies
        for number in ([1] if requirements(one).max_replicas == 1 else numbers)
    )
    entries = tuple({entry.name: entry for entry in entries}.values())
    for entry in entries:  # every mistake is found before the first run
        config = configured([task, *entry.words, *shared], options_of(entry, options))
    load_task(config.task, config.task_settings)
    out = out or Path(f"comparison-{task.rpartition(':')[2]}")
    return ComparisonPlan(task, shared, entries, seeds, options, target, out)


def requirements(words: Sequence[str]) -> Requirements:
    """Return what a strategy with these settings needs."""
    from rainband.plugins import load_strategy, search_current_folder
    from rainband.settings import parse_pairs

    search_current_folder()
    return load_strategy(words[0], parse_pairs(words[1:])).requires


def options_of(entry: Entry, options: RunOptions) -> RunOptions:
    """Return the options for this strategy; a number of servers is for those that have servers."""
    mine: RunOptions = {**options, "workers": entry.workers}
    if not requirements(entry.words).servers:
        mine.pop("servers", None)
    return mine


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise OptionError(f"{opt('workers', text)}: give numbers from 1 on, such as 1,4,16.")
    return list(dict.fromkeys(numbers))


def _value(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return text or "none"


def _decoded(file: Path) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError:
        raise ValueError(f"{file} cannot be read: remove it, or use another folder with --out.") from None


class Trainer:
    """Trains what a plan has and what is not there yet, and shows how far it is."""

    def __init__(self, plan: ComparisonPlan, tune: bool, in_place: bool) -> None:
        self.plan, self.tune, self.in_place = plan, tune, in_place
        tuning = sum(number for _, number in HALVING) if tune else 0
        self.total = len(plan.entries) * (plan.seeds + tuning)
        self.done = 0
        self.trained = 0
        self.began_s = time.monotonic()
        self.stopped = False
        self.raised = dict[Path, str]()  # directories of runs that could not even fail in order -> why

    def run(self) -> tuple[Comparison, bool]:
        """Train; return the comparison of what has ended, and True if it was stopped before the end."""
        from rainband.views.compare.judge import Comparison

        with report_errors():
            self._begin()
        contenders = list(self._contenders())
        plan = self.plan
        grid = ", ".join(f"{factor:g}" for factor in LR_FACTORS)
        notes = [f"Learning rates were tuned on {grid} times the default, with a seed that is not compared."]
        command = " ".join(sys.argv[1:]) if sys.argv[1:2] == ["compare"] else ""
        return (
            Comparison(
                plan.task,
                tuple(contenders),
                plan.target,
                f"rainband {command}" if command else "",
                tuple(notes if self.tune else ()),
            ),
            self.stopped,
        )

    def _begin(self) -> None:
        """Write the definition, or check that the folder is of the same comparison."""
        import msgspec

        file = self.plan.out / "comparison.json"
        data = msgspec.json.format(msgspec.json.encode(self.plan.definition), indent=2)
        if file.is_file() and (differences := self.plan.differences(_decoded(file))):
            hint = (
                f" To judge its runs by another target, type rainband compare {self.plan.out}/runs/* --target METRIC=X."
            )
            raise ValueError(
                f"{self.plan.out} has another comparison ({'; '.join(differences)}): use another folder with --out, "
                f"or remove it.{hint if differences[0].startswith('target ') else ''}"
            )
        self.plan.out.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data + b"\n")

    def _contenders(self) -> Iterator[Entrant]:
        from rainband.views.compare.judge import Entrant

        for entry in self.plan.entries:
            words, tuning = self._tuned(entry) if self.tune else (entry.words, None)
            facts: list[RunMeasures] = []
            for seed in range(self.plan.seeds):
                if self.stopped:
                    break
                if (directory := self._trained(entry, words, seed, {})) is not None:
                    facts.append(self._facts(directory))
                    self._check_metric(facts[-1])
            if facts:
                yield Entrant(entry.name, tuple(facts), tuning)

    def _facts(self, directory: Path) -> RunMeasures:
        from rainband.views.compare.measured import facts_of

        facts = facts_of(directory, self.plan.target)
        reason = self.raised.get(directory)
        return replace(facts, state="failed", reason=reason) if reason else facts

    def _check_metric(self, fact: RunMeasures) -> None:
        """Refuse the target after the first run if that does not measure it; then the target may be corrected."""
        with report_errors():
            try:
                check_metric(self.plan.target, [fact])
            except ValueError:
                (self.plan.out / "comparison.json").unlink(missing_ok=True)
                raise

    def _tuned(self, entry: Entry) -> tuple[tuple[str, ...], Tuning | None]:
        """Return the words with the best learning rate of successive halving, and what finding it cost."""
        from rainband.coordinator.state import Target
        from rainband.views.compare.judge import Tuning
        from rainband.views.compare.measured import RunMeasures

        base = self._config(entry, entry.words, TUNE_SEED, {})
        lr = base.strategy_settings.get("lr")
        if not isinstance(lr, int | float):
            self.done += sum(number for _, number in HALVING)
            return entry.words, None
        rates, facts = [float(f"{lr * factor:.3g}") for factor in LR_FACTORS], dict[Path, RunMeasures]()
        tried, epochs = tuple(rates), self._epochs(base)
        for part, number in HALVING:
            scores: list[tuple[float, float]] = []
            for rate in rates[:number]:
                words = (*(word for word in entry.words if not word.startswith("lr=")), f"lr={rate:g}")
                changed: RunOptions = {"epochs": max(1, round(part * epochs))}
                directory = None if self.stopped else self._trained(entry, words, TUNE_SEED, changed)
                if directory is None:
                    return entry.words, None
                facts[directory] = fact = self._facts(directory)
                if fact.state == "finished" and fact.final is not None:
                    sign = 1.0 if Target(fact.metric, 0.0).is_upper else -1.0
                    scores.append((sign * fact.final, rate))
            rates = [rate for _, rate in sorted(scores)] or rates
        best = rates[0]
        cost = facts.values()
        tuning = Tuning(tried, best, len(cost), sum(f.samples for f in cost), sum(f.cpu_s for f in cost))
        return (*(word for word in entry.words if not word.startswith("lr=")), f"lr={best:g}"), tuning

    def _epochs(self, config: RunConfig) -> int:
        from rainband.tasks.load import load_task

        return config.epochs or load_task(config.task, config.task_settings).epochs

    def _config(self, entry: Entry, words: Sequence[str], seed: int, changed: RunOptions) -> RunConfig:
        from rainband.cli.options.words import configured

        options: RunOptions = {**options_of(entry, self.plan.options), "seed": seed, **changed}
        return configured([self.plan.task, *words, *self.plan.shared], options)

    def _trained(self, entry: Entry, words: Sequence[str], seed: int, changed: RunOptions) -> Path | None:
        """Return the directory of this run: of an earlier call, or trained now; None: it was stopped."""
        import msgspec

        part = f"-{changed['epochs']}-epochs" if "epochs" in changed else ""
        lr = f"-{words[-1]}" if self.tune else ""
        named = f"{' '.join(entry.words)}-{entry.workers}-workers{lr}{part}-seed{seed}"
        key = "".join(c if c.isalnum() or c in "-.=" else "_" for c in named)
        directory = self.plan.out / "runs" / key
        self._show(f"{entry.name}, seed {seed}")
        with report_errors():
            config = msgspec.structs.replace(self._config(entry, words, seed, changed), directory=str(directory))
            kept = _is_over(directory)
            if kept:
                _check_same(directory, config)
            else:
                _cleared(directory)
        if not kept:
            if not self._train(config):
                self.stopped = True
                return None
            self.trained += 1
        self.done += 1
        self._show("")
        return directory

    def _train(self, config: RunConfig) -> bool:
        """Run it; return False if it was stopped."""
        import importlib

        from rainband.cli.train import RUNTIMES

        run = importlib.import_module(RUNTIMES[config.runtime]).run
        try:
            return bool(run(config, lambda event: None, capture=True).outcome != "stopped")
        except KeyboardInterrupt:
            return False
        except Exception as error:  # in a simulation, the user's code raises here; the other runs go on
            self.raised[Path(config.directory)] = " ".join(f"{type(error).__name__}: {error}".split())
            return True

    def _show(self, what: str) -> None:
        """Show the progress: in place on a terminal, otherwise a line for each run."""
        left = ""
        if self.trained and (spent_s := time.monotonic() - self.began_s):
            from rainband.views.formatting import duration

            left = f", about {duration(spent_s / self.trained * (self.total - self.done))} left"
        filled = 24 * self.done // max(1, self.total)
        line = f"[{'#' * filled}{'.' * (24 - filled)}] {self.done} of {self.total} runs{left}  {what}"
        if self.in_place:
            sys.stderr.write(f"\r\033[K{line}" + ("\n" if self.done == self.total else ""))
            sys.stderr.flush()
        elif what:
            typer.echo(line, err=True)


def _is_over(directory: Path) -> bool:
    """Return True if this run has finished; others are trained again, because the cause may be gone."""
    from rainband.views.history import is_run, read_run

    return directory.is_dir() and is_run(directory) and read_run(directory).state == "finished"


def _check_same(directory: Path, config: RunConfig) -> None:
    """Refuse an earlier run whose configuration is not the one that would be trained."""
    from rainband.runtimes.run_directory import read_config
    from rainband.views.runs_text import settings_that_differ

    if rows := settings_that_differ(read_config(directory), config):
        differences = "; ".join(f"{name} {old}, not {new}" for name, old, new in rows)
        raise ValueError(
            f"{directory} was trained with other options ({differences}): use another folder with --out, or remove it."
        )


def _cleared(directory: Path) -> None:
    """Make an empty directory: what a stopped or killed run has left is of no use."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
