"""Measure a task on this machine: the time of a gradient, of a whole batch and of a worker's part of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rainband.analysis.count import GradientWork, count_gradient
from rainband.model.seeds import global_generators_from
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace
from rainband.tasks.task import Data, Task

WARM_UP = 2
MIN_REPEATS, MAX_REPEATS = 5, 40
MEASURE_S = 0.8  # of each size, unless a gradient takes longer


@dataclass(frozen=True)
class GradientTimes:
    """Seconds of a gradient with this number of samples, measured several times."""

    samples: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the times that a quarter of the measurements is below, and above."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


@dataclass(frozen=True)
class MeasuredTask:
    """A task before its training: its operations, its size, and the time of a gradient here."""

    work: GradientWork
    batch: GradientTimes
    part: GradientTimes  # of the batch, if the workers share it
    model_bytes: int


def measure_task(task: Task, workers: int, batch_size: int | None = None, threads: int = 1) -> MeasuredTask:
    """Compute some gradients of a new model."""
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model has no values (device meta), so its gradient cannot be computed.")
    size = min(len(data), batch_size or task.batch_size)
    with _threads(threads), global_generators_from(0):
        batch = GradientTimes(size, _times(task, model, data, size))
        part_size = -(-size // workers)
        part = GradientTimes(part_size, _times(task, model, data, part_size)) if part_size < size else batch
        work = count_gradient(task, model, data.batch(list(range(size))), size)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return MeasuredTask(work, batch, part, model_bytes)


def with_times(measured: MeasuredTask, compute: ComputeModel) -> MeasuredTask:
    """Return the task with the times that a simulation draws; a part takes its share of them."""
    pace = ComputePace(compute, 0, 0)
    drawn = tuple(pace.next_s() for _ in range(MAX_REPEATS))
    share = measured.part.samples / measured.batch.samples
    return replace(
        measured,
        batch=replace(measured.batch, seconds=drawn),
        part=replace(measured.part, seconds=tuple(share * seconds for seconds in drawn)),
    )


def _times(task: Task, model: nn.Module, data: Data, size: int) -> tuple[float, ...]:
    """Return the seconds of reading a batch and computing its gradient."""
    order = torch.randperm(len(data)).tolist()
    model.train()
    seconds: list[float] = []
    while len(seconds) < WARM_UP + MIN_REPEATS or (
        len(seconds) < WARM_UP + MAX_REPEATS and sum(seconds[WARM_UP:]) < MEASURE_S
    ):
        first = len(seconds) * size % max(1, len(data) - size + 1)
        model.zero_grad(set_to_none=True)
        began_s = time.perf_counter()
        batch: Any = data.batch(order[first : first + size])
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - began_s)
    return tuple(seconds[WARM_UP:])


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
