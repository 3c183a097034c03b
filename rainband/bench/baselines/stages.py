"""A model that is cut, measured against what users have: one plain process, and torch.distributed.pipelining.

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

WARM_UP = 2  # batches that do not count

BLOCK = 4  # batches between two looks at the clock


class AloneOrder(msgspec.Struct, frozen=True):
    """Plain training of a task in one process, for some seconds."""

    task: str
    seconds: float
    batch_size: int


def alone_main(job: bytes, fds: list[int]) -> None:
    """Samples per second of a plain PyTorch loop."""
    from rainband.tasks.load import load_task

    order = msgspec.msgpack.decode(job, type=AloneOrder)
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

    _report(fds[0], [order.batch_size * _rate(step, order.seconds, lambda enough: enough)])


class PipeliningOrder(msgspec.Struct, frozen=True):
    """One of two ranks of torch.distributed.pipelining, each with half of the bench's chain."""

    rank: int
    port: int
    schedule: str  # ScheduleGPipe, Schedule1F1B
    microbatches: int
    seconds: float


def pipelining_main(job: bytes, fds: list[int]) -> None:
    """Samples per second of two ranks together."""
    from torch.distributed import pipelining

    from rainband.bench.harness.models import Chain

    order = msgspec.msgpack.decode(job, type=PipeliningOrder)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{order.port}", rank=order.rank, world_size=2)
    task = Chain()
    torch.manual_seed(0)
    half = task.halves()[order.rank]
    stage = pipelining.PipelineStage(half, order.rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, order.schedule)(stage, order.microbatches, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD(half.parameters(), lr=1e-3, fused=True)
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


def _first_decides(enough: bool) -> bool:
    word = torch.tensor(float(enough))
    dist.broadcast(word, 0)  # a tiny message: the ranks must stop at the same step
    return bool(word)


def _rate(step: Callable[[], None], seconds: float, agreed: Callable[[bool], bool]) -> float:
    """Steps per second."""
    for _ in range(WARM_UP):
        step()
    started, done = time.perf_counter(), 0
    while True:
        for _ in range(BLOCK):
            step()
            done += 1
        if agreed(time.perf_counter() - started > seconds):
            return done / (time.perf_counter() - started)


def _drawing(data: Any, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Draws batches in a random order, the same in every process; our workers, too, gather their samples anew."""
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
