"""Additions to shared memory without locks: the fraction lost, and the speed against additions with a lock.

Two processes add ones with the code of hogwild's workers, few enough for float32 to count exactly. Additions to the
same component at the same moment may be lost; none can be lost where rows are disjoint.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import torch
from torch import Tensor

from rainband.bench.harness.processes import PRELOAD, BenchProcess
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.runtimes.hogwild.worker import add_in_place
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.shared_memory import SharedSegment

NUM_PROCESSES = 2
ROWS, WIDTH, TOUCHED = 100_000, 16, 20  # of a table; TOUCHED rows per addition


class AddOrder(msgspec.Struct, frozen=True):
    """The order for one process that adds to the memory it inherits."""

    index: int
    kind: str  # dense, sparse, disjoint
    rows: int
    width: int
    additions: int
    locked: bool


class Added(msgspec.Struct, frozen=True):
    """The result of one process."""

    seconds: float
    total: float  # the sum of all additions


def run(effort: Effort) -> list[Row]:
    times = 1 if effort == "quick" else 3
    zygote = Zygote.start((*PRELOAD, "rainband.bench.cases.hogwild"))
    try:
        small, _ = _measure(zygote, "dense", 1, 1024, times * 20_000)
        large, _ = _measure(zygote, "dense", 1, 1 << 20, times * 200)
        disjoint, _ = _measure(zygote, "disjoint", ROWS, WIDTH, times * 20_000)
        with_lock, _ = _measure(zygote, "dense", 1, 1 << 20, times * 100, locked=True)
        turns = [  # alternating, so that a slow minute of the machine hits both
            [_measure(zygote, "sparse", ROWS, WIDTH, times * 20_000, locked) for locked in (False, True)]
            for _ in range(3)
        ]
    finally:
        zygote.close(1.0)
    sparse, free = (median([turn[0][i] for turn in turns]) for i in (0, 1))
    against_lock = median([turn[0][1] / turn[1][1] for turn in turns])
    return [
        Row("lost of additions by both to the same 1,024 components", small, "%"),
        Row("lost of additions by both to the same 1,048,576 components", large, "%"),
        Row(f"lost of additions to {TOUCHED} random rows of {ROWS:,}", sparse, "%"),
        at_most(f"lost of additions to {TOUCHED} disjoint rows", disjoint, 0.0, "", "%"),
        at_most("lost of additions with a lock", with_lock, 0.0, "", "%"),
        Row("additions of sparse rows without a lock", free, "additions/s"),
        at_least("additions of sparse rows without a lock", against_lock, 1.0, "the same with a lock"),
    ]


def _measure(
    zygote: Zygote, kind: str, rows: int, width: int, additions: int, locked: bool = False
) -> tuple[float, float]:
    """Return the percentage of additions that were lost, and the additions per second of both processes."""
    fd = SharedSegment.reserve("rainband bench")
    table = _table(SharedSegment.settle(fd, rows * width * 4), rows, width)
    pipes = [os.pipe() for _ in range(NUM_PROCESSES)]
    orders = [AddOrder(i, kind, rows, width, additions, locked) for i in range(NUM_PROCESSES)]
    entry = "rainband.bench.cases.hogwild:add_main"
    pairs = zip(orders, pipes, strict=True)
    processes = [BenchProcess(zygote, entry, order, "adder", [fd, pipe[0]]) for order, pipe in pairs]
    for process in processes:
        process.read_byte()  # it is ready
    for reader, go in pipes:
        os.write(go, b"g")
        os.close(go)
        os.close(reader)
    added = [process.result(Added) for process in processes]
    total = sum(one.total for one in added)
    found = table.sum(dtype=torch.float64).item()
    os.close(fd)
    return 100 * (total - found) / total, NUM_PROCESSES * additions / max(one.seconds for one in added)


def _table(segment: SharedSegment, rows: int, width: int) -> Tensor:
    return segment.bytes.view(torch.float32).view(rows, width)


def add_main(job: bytes, fds: list[int]) -> None:
    """Add ones to shared memory, repeatedly."""
    order = msgspec.msgpack.decode(job, type=AddOrder)
    result_fd, memory_fd, go_fd = fds
    lock_fd = os.open(f"/proc/self/fd/{memory_fd}", os.O_RDWR)  # opened again: a lock belongs to an open file
    table = _table(SharedSegment.open(memory_fd, order.rows * order.width * 4, True), order.rows, order.width)
    gradients = _gradients(order)
    os.write(result_fd, b"r")
    os.read(go_fd, 1)
    started = time.perf_counter()
    for number in range(order.additions):
        with _locked(lock_fd, order.locked):
            add_in_place(table, gradients[number % len(gradients)], 1.0)
    seconds = time.perf_counter() - started
    rounds, rest = divmod(order.additions, len(gradients))
    sums = [float(gradient.sum()) for gradient in gradients]
    os.write(result_fd, msgspec.msgpack.encode(Added(seconds, rounds * sum(sums) + sum(sums[:rest]))))
    os.close(result_fd)


def _gradients(order: AddOrder) -> list[Tensor]:
    """Return gradients of ones: everywhere, or in random rows, which may be disjoint from the other process's."""
    if order.kind == "dense":
        return [torch.ones(order.rows, order.width)]
    random = torch.Generator().manual_seed(order.index)
    gradients = []
    for _ in range(256):
        rows = torch.randperm(order.rows // NUM_PROCESSES, generator=random)[:TOUCHED]
        if order.kind == "disjoint":
            rows = rows * NUM_PROCESSES + order.index
        values = torch.ones(len(rows), order.width)
        gradients.append(
            torch.sparse_coo_tensor(rows[None], values, (order.rows, order.width), check_invariants=True).coalesce()
        )
    return gradients


@contextmanager
def _locked(fd: int, enabled: bool) -> Iterator[None]:
    """Hold a lock of the kernel that all processes share."""
    if not enabled:
        yield
        return
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
