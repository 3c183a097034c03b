"""Baselines of model-parallel training: one plain process, and torch.distributed.pipelining.

All run in processes from the same zygote, with one torch thread each and the same allocator settings as our workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

WARM_UP = 2  # batches that are not measured
CLOCK_EVERY = 4  # batches between two readings of the clock


class PlainProcessOrder(msgspec.Struct, frozen=True):
    """The order to train a task in one process for some seconds."""

    task: str
    seconds: float
    batch_size: int


def plain_main(job: bytes, fds: list[int]) -> None:
    """Report the samples per second of a plain PyTorch loop."""
    from rainband.tasks.load import load_task

    order = msgspec.msgpack.decode(job, type=PlainProcessOrder)
    task = load_task(order.task, {})
    torch.manual_seed(0)
    model: nn.Module = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    draw = _drawing(task.data(), order.batch_size)

    def step() -> None:
        batch = draw()
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    _report(fds[0], [order.batch_size * _rate(step, order.seconds, lambda stop: stop)])


class PipeliningOrder(msgspec.Struct, frozen=True):
    """The order for one of two ranks of torch.distributed.pipelining, each with half of the chain's layers."""

    rank: int
    port: int
    schedule: str  # ScheduleGPipe, Schedule1F1B
    microbatches: int
    seconds: float


def pipelining_main(job: bytes, fds: list[int]) -> None:
    """Report the samples per second of two ranks together."""
    from torch.distributed import pipelining

    from rainband.bench.harness.models import Chain

    order = msgspec.msgpack.decode(job, type=PipeliningOrder)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{order.port}", rank=order.rank, world_size=2)
    task = Chain()
    torch.manual_seed(0)
    module = task.stages()[order.rank]
    stage = pipelining.PipelineStage(module, order.rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, order.schedule)(stage, order.microbatches, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, fused=True)
    draw = _drawing(task.data(), task.batch_size)

    def step() -> None:
        inputs, labels = draw()
        optimizer.zero_grad()
        if order.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels)
        optimizer.step()

    _report(fds[0], [task.batch_size * _rate(step, order.seconds, _first_decides)])


def _first_decides(stop: bool) -> bool:
    value = torch.tensor(float(stop))
    dist.broadcast(value, 0)  # the ranks must stop at the same step
    return bool(value)


def _rate(step: Callable[[], None], seconds: float, agreed: Callable[[bool], bool]) -> float:
    """Return the steps per second, measured for some seconds."""
    for _ in range(WARM_UP):
        step()
    started, done = time.perf_counter(), 0
    while True:
        for _ in range(CLOCK_EVERY):
            step()
            done += 1
        if agreed(time.perf_counter() - started > seconds):
            return done / (time.perf_counter() - started)


def _drawing(data: Any, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws batches in a random order, gathering the samples as Rainband's workers do."""
    generator = torch.Generator().manual_seed(0)
    left: list[Tensor] = []

    def draw() -> tuple[Tensor, Tensor]:
        if not left:
            left.extend(torch.split(torch.randperm(len(data), generator=generator), size))
        batch: tuple[Tensor, Tensor] = data.batch(left.pop().numpy())
        return batch

    return draw


def _report(fd: int, values: list[float]) -> None:
    os.write(fd, msgspec.msgpack.encode(values))
    os.close(fd)
