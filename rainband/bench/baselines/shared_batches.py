"""Processes of `rainband bench default`: loops whose workers share each batch, next to plain PyTorch and DDP.

The three are measured in the same processes, in turns, each as a user writes it: with gradients averaged at the end of
backward(), and a step of SGD with momentum on every worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from rainband.bench.baselines.data_parallel import join_gloo
from rainband.bench.harness.split_models import Workload, workload
from rainband.rounds.exchange import Exchange
from rainband.rounds.rounds import RoundExchange
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.transports.shared_rounds import SharedBoard

WARM_UP = 8  # steps of each block that are not measured


class CompareOrder(msgspec.Struct, frozen=True):
    """The order for one of two ranks that train a model in three ways."""

    rank: int
    port: int  # of gloo's ranks
    model: str
    blocks: int
    block_s: float  # the time of a block of plain PyTorch


class StepTimes(msgspec.Struct, frozen=True):
    """The median seconds of a step, for each block."""

    plain: list[float]
    ddp: list[float]
    shared: list[float]


def loop_of(fds: list[int], rank: int, num_ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> SplitLoop:
    """Return the loop of one worker, with the memory that these files are."""

    def exchange(state: LoopState, like: list[Tensor]) -> Exchange:
        return RoundExchange(SharedBoard(fds, rank, like), state, time.perf_counter)

    return SplitLoop(model, [optimizer], exchange, num_ranks)


def compare_main(job: bytes, fds: list[int]) -> None:
    """Report the times of steps in plain PyTorch (on rank 0 alone), with DDP, and with batches that are shared."""
    order = msgspec.msgpack.decode(job, type=CompareOrder)
    join_gloo(order.rank, order.port)
    plain, ddp, shared = (workload(order.model) for _ in range(3))
    wrapped = nn.parallel.DistributedDataParallel(ddp.model)
    optimizers = [SGD(one.model.parameters(), lr=1e-2, momentum=0.9) for one in (plain, ddp, shared)]

    def step(work: Workload, model: nn.Module, optimizer: SGD, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        work.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def half(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = (tensor.chunk(2)[order.rank] for tensor in batch)
        return inputs, targets

    times = StepTimes([], [], [])
    with loop_of(fds[1:], order.rank, 2, shared.model, optimizers[2]) as run:
        run.gradients.steps.known |= {id(one) for one in optimizers}  # the other loops are no mistake
        steps = WARM_UP + 10
        for _ in range(1 + order.blocks):  # the first one is only to learn how many steps take the time of a block
            dist.barrier()
            if order.rank == 0:
                times.plain.append(_block(plain, steps, lambda b: step(plain, plain.model, optimizers[0], b)))
            dist.barrier()
            times.ddp.append(_block(ddp, steps, lambda b: step(ddp, wrapped, optimizers[1], half(b))))
            dist.barrier()
            times.shared.append(_block(shared, steps, lambda b: step(shared, shared.model, optimizers[2], run.part(b))))
            if steps == WARM_UP + 10:
                number = torch.tensor(WARM_UP + max(10, round(order.block_s / (times.plain or [1.0])[0])))
                dist.broadcast(number, 0)
                steps = int(number)
    found = StepTimes(times.plain[1:], times.ddp[1:], times.shared[1:])
    _report(fds[0], found)


def _block(work: Workload, steps: int, step: Callable[[tuple[Tensor, Tensor]], None]) -> float:
    seconds = []
    for number in range(steps):
        before = time.perf_counter()
        step(work.batches[number % len(work.batches)])
        seconds.append(time.perf_counter() - before)
    return median(seconds[WARM_UP:])


class UnequalOrder(msgspec.Struct, frozen=True):
    """The order for one worker whose samples take a fixed time each, as on a device of its own."""

    rank: int
    sample_s: list[float]  # of each worker
    batch_size: int
    rounds: int
    settling: int  # rounds before the measured ones


def unequal_main(job: bytes, fds: list[int]) -> None:
    """Report the samples per second of all workers together."""
    order = msgspec.msgpack.decode(job, type=UnequalOrder)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=1e-3)
    batch, began = torch.randn(order.batch_size, 4), 0.0
    with loop_of(fds[1:], order.rank, len(order.sample_s), model, optimizer) as run:
        for number in range(order.settling + order.rounds):
            if number == order.settling:
                began = time.perf_counter()
            part = run.part(batch)
            time.sleep(len(part) * order.sample_s[order.rank])
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
        took_s = time.perf_counter() - began
    _report(fds[0], [order.rounds * order.batch_size / took_s])


class JoinOrder(msgspec.Struct, frozen=True):
    """The order for one of three workers, of which the last one joins late."""

    rank: int
    model: str
    settling: int  # steps before it joins, and after


class JoinTimes(msgspec.Struct, frozen=True):
    """The seconds of all steps of a worker, and of its joining."""

    steps: list[float]
    joined_at: int  # the step in which another worker joined
    joining: float


def join_main(job: bytes, fds: list[int]) -> None:
    """Train with AdamW; report the time of every step, of which one gives the state to the worker that joins."""
    order = msgspec.msgpack.decode(job, type=JoinOrder)
    work = workload(order.model)
    optimizer = AdamW(work.model.parameters(), lr=1e-4)
    fds_of_memory, late = fds[1:-1], fds[-1]
    steps: list[float] = []
    if order.rank == 2:
        os.read(late, 1)
    before = time.perf_counter()
    with loop_of(fds_of_memory, order.rank, 3, work.model, optimizer) as run:
        joining = time.perf_counter() - before
        together = joined_at = 0
        while run.stopped is None:
            before = time.perf_counter()
            inputs, targets = run.part(work.batches[0])  # a worker that joins does not know how many came before
            optimizer.zero_grad()
            work.loss(work.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps.append(time.perf_counter() - before)
            if len(steps) == order.settling and order.rank == 0:
                os.write(late, b"j")
            if len(run.exchange.members) == 3:
                joined_at = joined_at or len(steps) - 1
                together += 1
            if together == order.settling and order.rank == 0:
                run.stop("measured")
    _report(fds[0], JoinTimes(steps, joined_at, joining))


def _report(fd: int, found: StepTimes | JoinTimes | list[float]) -> None:
    os.write(fd, msgspec.msgpack.encode(found))
    os.close(fd)
