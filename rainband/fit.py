"""Train a task with one call, from a script, a notebook or a prompt: `rainband.fit(task, workers=4, servers=2)`.

A task or strategy that can be imported goes to the processes by its name and settings. Any other (defined at a prompt,
say) goes through memory that only this run's own processes inherit; that is the one use of pickle in this package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from rainband.protocol.accounting import BatchAccounting, Staleness
    from rainband.protocol.events import AnyEvent, Progress
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.processes.launcher import RunResult
    from rainband.strategy import Strategy
    from rainband.tasks.task import Task

ENTRIES = {"worker": "rainband.fit:be_worker", "server": "rainband.fit:be_server"}


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What came of a training."""

    module: nn.Module  # trained, in evaluation mode
    metrics: dict[str, float]  # of the task's `evaluate`
    history: list[Progress]  # how it went: samples done, loss, staleness, ...
    accounting: BatchAccounting  # what became of every batch
    staleness: Staleness
    directory: Path  # events, metrics and model.safetensors
    outcome: str  # finished, or stopped (by Ctrl-C)


def fit(
    task: Task | str,
    strategy: Strategy | str = "downpour",
    workers: int = 4,
    servers: int = 2,
    *,
    stages: int | None = None,
    plan: str | Path | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    stages_per_worker: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    threads: int = 1,
    transport: str = "auto",
    failure_timeout_s: float = 5.0,
    runs: str | Path = "runs",
    on_event: Callable[[AnyEvent], None] | None = None,
    runtime: str = "processes",
    network: str = "lan",
) -> FitResult:
    """Train `task` with `workers` processes and `servers` parameter servers; returns when it is done.

    `task` is any object with model(), data(), loss(), evaluate(), batch_size and epochs, or the name of a built-in
    one; rainband.ModuleTask makes one of a module and a dataset. `strategy` is one of rainband's, such as
    rainband.Downpour(n_push=4), or one of your own. `on_event` is called with every event of the run.

    With stages=2 the model is cut in two, and every two workers compute one copy of it together; a batch is cut into
    `microbatches`, so that both have something to do. `schedule` says in which order: one_f_one_b, gpipe, or
    interleaved, where each worker has several stages (`stages_per_worker`, 2 by default) and is idle for a shorter
    time. `plan` is a file of `rainband placement`, which says how to cut the model.

    With world="sim" the run is simulated, in virtual time and in this process, over a `network` (lan, 1gbit, wan,
    datacentre, or a TOML file); its seconds are virtual, its gradients true.
    """
    import msgspec

    from rainband.errors import RainbandError
    from rainband.runtimes.advice import foreseen
    from rainband.runtimes.config import RunConfig, SimSettings, check_epochs, is_one_memory
    from rainband.runtimes.stage_options import (
        PipelineOptions,
        check_flow,
        check_plan,
        check_versions,
        read_plan,
        workers_per_replica,
    )
    from rainband.runtimes.stage_plan import check_num_workers, make_stage_plan

    task_name, task_settings = _named(task, "rainband.tasks")
    strategy_name, strategy_settings = _named(strategy, "rainband.strategies")
    made: Strategy = _object(strategy, strategy_name, strategy_settings)
    called = strategy_name or type(strategy).__name__
    check_epochs(made, called, epochs)
    cut, flow = (
        read_plan(Path(plan) if plan else None, stages),
        PipelineOptions(microbatches, schedule, stages_per_worker),
    )
    size = workers_per_replica(cut, stages) or 1
    if is_one_memory(made):
        servers = 0
    elif made.requires.max_replicas == 1:
        workers, servers = size, 0
    check_num_workers(made, called, workers, size)
    if size > 1:
        if cut is not None:
            check_plan(made, called, cut)
        check_flow(made, called, flow, size, cut)
        check_versions(made, cut.replicas() if cut is not None else [1] * size)
    elif any(flow):
        raise ValueError(
            "microbatches, schedule and stages_per_worker are for a model in several stages: give stages=2, too."
        )
    if runtime not in ("processes", "sim"):
        raise ValueError(f"no world named {runtime!r}: choose local (processes on this machine) or sim (virtual time).")
    if workers < 1 or servers < 0:
        raise ValueError(f"workers={workers}, servers={servers}: there must be at least one worker.")
    config = RunConfig(
        task=task_name or type(task).__name__,
        task_settings=task_settings,
        strategy=called,
        strategy_settings=strategy_settings,
        num_workers=workers,
        num_servers=servers,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        threads=threads,
        transport=transport,
        failure_timeout_s=failure_timeout_s,
        runtime=runtime,
        sim=SimSettings(model=network),
    )
    if size > 1:
        whole: Task = _object(task, task_name, task_settings)
        stage_plan = make_stage_plan(
            whole, config.task, size, plan=cut, batch_size=batch_size, flow=flow, seed=seed, threads=threads
        )
        config = msgspec.structs.replace(config, stage_plan=stage_plan)
    for text in foreseen(made, workers // size, called="copies of the model" if size > 1 else "workers"):
        warnings.warn(text, stacklevel=2)
    notes = _Notes(on_event)
    carried = {"task": None if task_name else task, "strategy": None if strategy_name else strategy}
    with _inherited(carried if runtime == "processes" else {}) as fds:
        config = _in_directory(config, Path(runs))
        result = _train(config, task, made, notes, fds)
    if result.outcome == "failed":
        raise RainbandError(f"{result.reason}{notes.traceback} (its directory is {config.directory})")
    _warn_if_diverged(result)
    return _fitted(task, config, result, notes)


def _train(config: RunConfig, task: Task | str, strategy: Strategy, notes: _Notes, fds: list[int]) -> RunResult:
    from rainband.runtimes.processes import launcher as local
    from rainband.runtimes.simulation import run as sim

    if config.runtime == "sim":
        made: Task = _object(task, config.task, config.task_settings)
        return sim.run(config, notes, task=made, strategy=strategy)
    return local.run(config, notes, capture=True, entries=ENTRIES, fds=fds, strategy=strategy)


def _warn_if_diverged(result: RunResult) -> None:
    from rainband.runtimes.result import diverged

    if many := diverged(result.accounting):
        warnings.warn(
            f"the training diverged: {many.skipped} of {many.batches} batches were skipped, because their gradients "
            "were not finite. Try a smaller learning rate, and see whether there is NaN in the data.",
            stacklevel=3,
        )


class _Notes:
    """Keeps what a fit returns of the events; shows what the processes print."""

    def __init__(self, on_event: Callable[[AnyEvent], None] | None) -> None:
        self.on_event = on_event
        self.history: list[Progress] = []
        self.traceback = ""

    def __call__(self, event: AnyEvent) -> None:
        from rainband.protocol.events import ProcessOutput, Progress, UserError

        match event:
            case Progress():
                self.history.append(event)
            case ProcessOutput():
                print(*event.lines, sep="\n")
            case UserError():
                self.traceback = f"\n\n{event.traceback}"
        if self.on_event is not None:
            self.on_event(event)


def _in_directory(config: RunConfig, runs: Path) -> RunConfig:
    import msgspec

    from rainband.runtimes.run_directory import new_directory

    return msgspec.structs.replace(config, directory=str(new_directory(runs, config.task, config.strategy)))


def _fitted(task: Task | str, config: RunConfig, result: RunResult, notes: _Notes) -> FitResult:
    import msgspec
    import safetensors.torch
    import torch

    from rainband.protocol.accounting import BatchAccounting, Staleness

    directory = Path(config.directory)
    with torch.random.fork_rng(devices=[]):
        module = _object(task, config.task, config.task_settings).model()
    saved = directory / "model.safetensors"
    if saved.exists():  # a run that was interrupted before it began has none
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


# ---- by name, where that is possible ----


def _named(thing: Any, family: str) -> tuple[str, dict[str, Any]]:
    """The name and settings from which another process makes an equal object; no name where that cannot be."""
    from rainband.settings import as_dict

    if isinstance(thing, str):
        return thing, {}
    kind = type(thing)
    if kind.__module__ == "__main__" or not dataclasses.is_dataclass(kind) or not _can_be_imported(kind):
        return "", {}
    settings = as_dict(thing)
    if not all(_is_plain(value) for value in settings.values()):
        return "", {}
    inside, _, name = kind.__module__.rpartition(".")
    return (name if inside == family else f"{kind.__module__}:{kind.__name__}"), settings


def _can_be_imported(kind: type) -> bool:
    try:
        module = importlib.import_module(kind.__module__)
    except ImportError:
        return False
    return getattr(module, kind.__name__, None) is kind and bool(inspect.getsourcefile(kind))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _object(thing: Any, name: str, settings: dict[str, Any]) -> Any:
    """The object itself, where a name was given for it."""
    from rainband.plugins import load_strategy, strategy_names
    from rainband.tasks.load import load_task

    if not isinstance(thing, str):
        return thing
    return load_strategy(name, settings) if name in strategy_names() else load_task(name, settings)


# ---- through inherited memory, where it is not ----


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
    memory = fds.pop() if order.memory else None
    carried = _carried(fds)
    work(order, carried["task"], carried["strategy"], memory)


def be_server(job: bytes, fds: list[int]) -> None:
    """The entry of a server's process."""
    from rainband.runtimes.config import decode_job
    from rainband.runtimes.processes.server_process import serve

    serve(decode_job(job), _carried(fds)["strategy"])
