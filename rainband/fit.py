"""Train a task with one call, from a script, a notebook or a prompt: `rainband.fit(task, workers=4, servers=2)`.

A task or strategy that can be imported is sent to the processes as its name and settings. Any other (defined at a
prompt, say) is pickled into memory that only this run's own processes inherit: the one use of pickle in this package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Unpack

from rainband.options import DEFAULT_STRATEGY, FitOptions, OptionError, RunOptions, declared

if TYPE_CHECKING:
    from torch import nn

    from rainband.protocol.accounting import BatchAccounting, Staleness
    from rainband.protocol.events import AnyEvent, Progress
    from rainband.runtimes.config import Job, RunConfig
    from rainband.runtimes.processes.launcher import RunResult
    from rainband.strategy import Strategy
    from rainband.tasks.task import Task
    from rainband.views.dashboard.saved import SavedPage
    from rainband.views.forecast import RateForecast
    from rainband.views.sinks import Sink

AUTO = "auto"  # the strategy that rainband.analysis chooses
TASKS, STRATEGIES = "rainband.tasks", "rainband.strategies"
ENTRIES = {"worker": "rainband.fit:be_worker", "server": "rainband.fit:be_server"}


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of `fit`."""

    module: nn.Module  # trained, in evaluation mode
    metrics: dict[str, float]  # from the task's `evaluate`
    history: list[Progress]  # progress events: samples done, loss, staleness, ...
    accounting: BatchAccounting  # batches applied, skipped, lost and applied twice
    staleness: Staleness
    directory: Path  # events, metrics and model.safetensors
    outcome: str  # finished, or stopped (by Ctrl-C)

    def show(self) -> SavedPage:
        """Return the page of the run, as `rainband dashboard` shows it; a notebook displays it."""
        from rainband.views.dashboard.saved import SavedPage

        return SavedPage(self.directory)


def fit(
    task: Task | str | None = None,
    strategy: Strategy | str | None = None,
    workers: int | tuple[int, int] | None = None,
    servers: int | None = None,
    *,
    on_event: Callable[[AnyEvent], None] | None = None,
    **options: Unpack[FitOptions],
) -> FitResult:
    """Train `task` with `workers` worker processes and `servers` server processes; return when it is trained.

    `task` is any object with model(), data(), loss(), evaluate(), batch_size and epochs, or the name of a built-in
    task; rainband.ModuleTask makes one of a module and a dataset. `strategy` (by default sync) is one of
    rainband's, such as rainband.Downpour(n_push=4), one of your own, a name, or "auto": the one that
    `rainband analyze` recommends. `on_event` is called with every event.

    `options` are those of `rainband train`, which rainband.options describes: epochs=3, batch_size=64, seed=1,
    threads=2, transport="tcp", csv=True, ... Among them:

        stages=2               split the model into two stages, one worker each; workers is a multiple of stages
        placement="plan.json"  split it according to a file of `rainband placement`
        runtime="ray"          run on a Ray cluster; workers=(4, 32): begin with 4, use up to 32 when there is room
        runtime="sim"          simulate the run in this process: its gradients are real, its seconds are virtual
        config="runs/NAME"     repeat an earlier run; omit the task and the strategy
    """
    from rainband.errors import RainbandError
    from rainband.plugins import load_strategy
    from rainband.runtimes.advice import warnings_for
    from rainband.runtimes.configure import configure
    from rainband.runtimes.run_directory import removed_if_refused
    from rainband.views.sinks import chosen_sinks

    chosen: RunOptions = {**_range_of(workers), "servers": servers, **options}
    if on_event is not None and not callable(on_event):
        raise OptionError(f"on_event={on_event!r}: must be a function that takes an event, such as print.")
    forecast = None
    if strategy == AUTO and task is not None:
        strategy, chosen, forecast = _auto(task, chosen)
    file = options.get("config")
    base, task, made = _new(task, strategy) if file is None else _repeated(file, task, strategy)
    _check_names(options, made)
    config = configure(base, made, chosen, lambda: _task(task, base))
    if config.strategy_settings != base.strategy_settings:  # such as those that sync needs with stages
        made = load_strategy(config.strategy, config.strategy_settings)
    sinks = chosen_sinks(chosen)
    for text in warnings_for(
        made, config.num_replicas, called="replicas of the model" if config.stage_plan else "workers"
    ):
        warnings.warn(text, stacklevel=2)
    if config.stage_plan is not None and config.stage_plan.loss_note:
        warnings.warn(config.stage_plan.loss_note, stacklevel=2)
    carried = {
        "task": None if _named(task, TASKS)[0] else task,
        "strategy": None if _named(made, STRATEGIES)[0] else made,
    }
    with _inherited(carried if config.runtime != "sim" else {}) as fds:
        config = _in_directory(config, Path(options.get("runs") or "runs"))
        notes = _Notes(on_event, sinks, Path(config.directory))
        if forecast is not None:
            forecast.save(Path(config.directory))
        try:
            with removed_if_refused(Path(config.directory)):
                result = _train(config, task, made, notes, fds)
        finally:
            notes.close()
    if result.outcome == "failed":
        raise RainbandError(f"{result.reason}{notes.traceback} (its directory is {config.directory})")
    _warn_if_diverged(result)
    return _fitted(task, config, result, notes)


def _auto(task: Task | str, options: RunOptions) -> tuple[Strategy, RunOptions, RateForecast]:
    """Return the strategy that an analysis recommends, the options for it, and the predicted rate."""
    from rainband.analysis.auto import analyze_for, forecast_of, options_for
    from rainband.plugins import load_strategy
    from rainband.runtimes.configure import check_task
    from rainband.settings import parse_pairs
    from rainband.tasks.load import load_task

    if isinstance(task, str):
        check_task(task, {})
        made = load_task(task, {})
    else:
        _check_task_object(task)
        made = task
    name = task if isinstance(task, str) else type(task).__name__
    forecast = forecast_of(analyze_for(made, name, options, Path(options.get("runs") or "runs"), print))
    words, *pairs = forecast.chosen.split()
    return load_strategy(words, parse_pairs(pairs)), options_for(forecast.chosen, options), forecast


def _range_of(workers: object) -> RunOptions:
    """Return the options for workers=4, or for workers=(4, 32)."""
    if not isinstance(workers, tuple | list):
        return {"workers": workers}  # type: ignore[typeddict-item]  # configure() checks it
    if len(workers) != 2:
        raise OptionError(f"workers={workers!r}: give a number, or the smallest and the largest, such as (4, 32).")
    return {"workers": workers[0], "max_workers": workers[1]}


def _new(task: Task | str | None, strategy: Strategy | str | None) -> tuple[RunConfig, Task | str, Strategy]:
    """Return a configuration with this task and strategy, and both."""
    from rainband.adapters.ray_data import with_rows
    from rainband.plugins import load_strategy
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.configure import SERVERS, WORKERS, check_task

    if task is None:
        raise TypeError("fit() requires a task, or config=, an earlier run.")
    if isinstance(task, str):
        check_task(task, {})
    else:
        _check_task_object(task)
        task = with_rows(task)
    strategy = DEFAULT_STRATEGY if strategy is None else strategy
    _check_strategy_object(strategy)
    made = load_strategy(strategy, {}) if isinstance(strategy, str) else strategy
    task_name, task_settings = _named(task, TASKS)
    strategy_name, strategy_settings = _named(made, STRATEGIES)
    config = RunConfig(
        task=task_name or type(task).__name__,
        task_settings=task_settings,
        strategy=strategy_name or type(made).__name__,
        strategy_settings=strategy_settings,
        num_workers=WORKERS,
        num_servers=SERVERS,
    )
    return config, task, made


def _repeated(
    file: str | Path, task: Task | str | None, strategy: Strategy | str | None
) -> tuple[RunConfig, str, Strategy]:
    """Return the configuration of an earlier run, its task and its strategy."""
    from rainband.plugins import load_strategy
    from rainband.runtimes.configure import check_task
    from rainband.runtimes.run_directory import read_config

    if not isinstance(file, str | Path):
        raise ValueError(f"config={file!r}: must be the path of an earlier run.")
    config = read_config(Path(file))
    if task is not None or strategy is not None:
        raise ValueError(f"{file} already has a task and a strategy: omit them, or config.")
    if config.script:
        raise ValueError(f"{file} is that of a script: repeat it with rainband run.")
    check_task(config.task, config.task_settings)
    return config, config.task, load_strategy(config.strategy, config.strategy_settings)


def _check_task_object(task: object) -> None:
    """Raise if an object that was given as the task is none."""
    from rainband.tasks.load import METHODS, NUMBERS

    kind = type(task).__name__
    if inspect.isclass(task):
        raise ValueError(f"task: {task.__name__} is a class. Make an object of it: {task.__name__}().")
    missing = [name for name in METHODS if not callable(getattr(task, name, None))]
    missing += [name for name in NUMBERS if not isinstance(getattr(task, name, None), int)]
    if len(missing) == len(METHODS) + len(NUMBERS):
        shown = shorten(repr(task), 60, placeholder="...")
        raise ValueError(f'{shown} is not a task: give a name, such as "digits", or rainband.ModuleTask(...).')
    if missing:
        raise ValueError(
            f"{kind} is not a task, because it has no {', '.join(missing)}: add what is missing, or make a task of a "
            "module, rainband.ModuleTask(make_module, dataset, loss_fn)."
        )


def _check_strategy_object(strategy: object) -> None:
    from rainband.plugins import strategy_names
    from rainband.strategy import Strategy

    if inspect.isclass(strategy):
        raise ValueError(f"strategy: {strategy.__name__} is a class. Make an object of it: {strategy.__name__}().")
    if not isinstance(strategy, Strategy | str):
        raise ValueError(
            f"strategy={strategy!r}: must be a strategy, such as rainband.Downpour(), or the name of one: "
            f"{', '.join(strategy_names())}."
        )


def _check_names(options: Mapping[str, object], strategy: Strategy) -> None:
    """Raise if a setting of the strategy was given as an option of the run."""
    settings: set[str] = (
        {field.name for field in dataclasses.fields(strategy)} if dataclasses.is_dataclass(strategy) else set()
    )
    for name, value in options.items():
        if name not in declared() and (name == "settings" or name in settings):
            example = f"{name}={value!r}" if name in settings else "lr=0.1" if "lr" in settings else "..."
            raise OptionError(
                f"fit() has no option {name}: give the strategy its settings, {_called(strategy)}({example})."
            )


def _called(strategy: Strategy) -> str:
    kind = type(strategy)
    return f"rainband.{kind.__name__}" if kind.__module__.startswith(STRATEGIES) else kind.__name__


def _task(task: Task | str, config: RunConfig) -> Task:
    """Return the task itself; `config` has its settings, if it is given by name."""
    from rainband.tasks.load import load_task

    return load_task(config.task, config.task_settings) if isinstance(task, str) else task


def _train(config: RunConfig, task: Task | str, strategy: Strategy, notes: _Notes, fds: list[int]) -> RunResult:
    from rainband.runtimes.processes import launcher
    from rainband.runtimes.simulation import run as simulation

    if config.runtime == "sim":
        return simulation.run(config, notes, task=_task(task, config), strategy=strategy)
    if config.runtime == "ray":
        from rainband.runtimes.ray import launcher as on_ray

        return on_ray.run(config, notes, capture=True, entries=ENTRIES, fds=fds, strategy=strategy)
    return launcher.run(config, notes, capture=True, entries=ENTRIES, fds=fds, strategy=strategy)


def _warn_if_diverged(result: RunResult) -> None:
    from rainband.runtimes.result import diverged

    if check := diverged(result.accounting):
        warnings.warn(
            f"the training diverged: {check.skipped} of {check.batches} batches were skipped, because their gradients "
            "were not finite. Try a smaller learning rate, and see whether there is NaN in the data.",
            stacklevel=3,
        )


class _Notes:
    """Stores the events that a `FitResult` has, prints the output of the processes, and passes all events on."""

    def __init__(
        self, on_event: Callable[[AnyEvent], None] | None, sinks: Sequence[Callable[[Path], Sink]], directory: Path
    ) -> None:
        from rainband.views.sinks import SafeSink

        self.on_event = on_event
        self.sinks = [SafeSink(partial(sink, directory), warnings.warn) for sink in sinks]
        self.history: list[Progress] = []
        self.traceback = ""

    def __call__(self, event: AnyEvent) -> None:
        from rainband.protocol.events import ProcessOutput, Progress, UserError, Warned

        match event:
            case Progress():
                self.history.append(event)
            case ProcessOutput():
                print(*event.lines, sep="\n")
            case UserError():
                self.traceback = f"\n\n{event.traceback}"
            case Warned():
                warnings.warn(event.text, stacklevel=2)
        for sink in self.sinks:
            sink.write(event)
        if self.on_event is not None:
            self.on_event(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _in_directory(config: RunConfig, runs: Path) -> RunConfig:
    import msgspec

    from rainband.runtimes.run_directory import new_directory

    directory = new_directory(runs, config.task, config.strategy).absolute()  # the caller's code may change to another
    return msgspec.structs.replace(config, directory=str(directory))


def _fitted(task: Task | str, config: RunConfig, result: RunResult, notes: _Notes) -> FitResult:
    import msgspec
    import safetensors.torch
    import torch

    from rainband.errors import RainbandError
    from rainband.protocol.accounting import BatchAccounting, Staleness

    directory = Path(config.directory)
    if not result.accounting:
        raise RainbandError(f"the run was stopped before it had begun ({result.reason or result.outcome}).")
    with torch.random.fork_rng(devices=[]):
        module = _task(task, config).model()
    saved = directory / "model.safetensors"
    if saved.exists():  # a run that was interrupted at its beginning has none
        safetensors.torch.load_model(module, str(saved))
    return FitResult(
        module=module.eval(),
        metrics=result.metrics,
        history=notes.history,
        accounting=msgspec.convert(result.accounting, BatchAccounting),
        staleness=msgspec.convert(result.staleness, Staleness, strict=False),
        directory=directory,
        outcome=result.outcome,
    )


def _named(thing: Any, family: str) -> tuple[str, dict[str, Any]]:
    """Return the name and settings from which another process makes an equal object; "" if there is no such name."""
    from rainband.settings import as_dict, as_plain

    if isinstance(thing, str):
        return thing, {}
    kind = type(thing)
    if kind.__module__ == "__main__" or not dataclasses.is_dataclass(kind) or not _can_be_imported(kind):
        return "", {}
    settings = as_plain(thing)
    if len(settings) < len(as_dict(thing)):
        return "", {}
    built_in = kind.__module__.startswith(f"{family}.")  # its file may be in a sub-folder
    return (kind.__module__.rpartition(".")[2] if built_in else f"{kind.__module__}:{kind.__name__}"), settings


def _can_be_imported(kind: type) -> bool:
    try:
        module = importlib.import_module(kind.__module__)
    except ImportError:
        return False
    return getattr(module, kind.__name__, None) is kind and bool(inspect.getsourcefile(kind))


@contextmanager
def _inherited(carried: dict[str, Any]) -> Iterator[list[int]]:
    """Write what has no name into a file without a name, for children to inherit; tensors are not copied there."""
    if not any(thing is not None for thing in carried.values()):
        yield []
        return
    fd = os.memfd_create("rainband-task")
    try:
        _write(carried, fd)
        yield [fd]
    finally:
        os.close(fd)


def _write(carried: dict[str, Any], fd: int) -> None:
    import cloudpickle
    import torch

    try:
        with open(fd, "wb", closefd=False) as file:
            torch.save(carried, file, pickle_module=cloudpickle)
    except (TypeError, AttributeError, ValueError) as error:
        names = ", ".join(name for name, thing in carried.items() if thing is not None)
        raise ValueError(
            f"the {names} cannot be handed to other processes: {error}. Open files and connections inside model() or "
            "data(), or put the class into a module that can be imported."
        ) from error


def _carried(fds: list[int]) -> dict[str, Any]:
    if not fds:
        return {"task": None, "strategy": None}
    import torch

    carried: dict[str, Any] = torch.load(f"/proc/self/fd/{fds[0]}", mmap=True, weights_only=False)
    return carried


def be_worker(job: bytes, fds: list[int]) -> None:
    """The entry of a worker's process."""
    from rainband.runtimes.config import decode_job
    from rainband.runtimes.processes.worker_main import work

    order = decode_job(job)
    carried = _carried(_own_fds(order, fds))
    work(order, fds, carried["task"], carried["strategy"])


def be_server(job: bytes, fds: list[int]) -> None:
    """The entry of a server's process."""
    from rainband.runtimes.config import decode_job
    from rainband.runtimes.processes.server_process import serve

    order = decode_job(job)
    serve(order, fds, _carried(_own_fds(order, fds))["strategy"])


def _own_fds(order: Job, fds: list[int]) -> list[int]:
    """Return the inherited files that are not those of the job: see `Job`."""
    return fds[: len(fds) - order.memory - order.group_files - order.round_files - (order.door is not None)]
