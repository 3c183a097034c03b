"""Loops whose workers share each batch, against plain PyTorch with one thread, DDP over gloo, and unequal workers.

All use the same model, batches and allocator settings. A worker is slow by sleeping for each of its samples, as if it
had a device of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import median

from rainband.bench.baselines.shared_batches import CompareOrder, JoinOrder, JoinTimes, StepTimes, UnequalOrder
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.shared_rounds import RoundsMemory

ENTRY = "rainband.bench.baselines.shared_batches"
TARGETS = {  # against plain PyTorch and DDP
    "MLP 0.1M": (1.0, 5.0),
    "MLP 1M": (1.2, 2.5),
    "MLP 6M": (1.25, 1.7),
    "CNN": (1.65, 1.7),
    "LM 1M": (1.8, 1.1),
}
SAMPLE_S, BATCH_SIZE = 0.001, 64
SLOW = 5  # times as slow is one of four workers
MOST_PAUSE_S = 0.05


def run(effort: Effort) -> Iterator[Row]:
    zygote = Zygote.start((*PRELOAD, ENTRY))
    try:
        for model in TARGETS:
            yield from _compared(zygote, model, 7 if effort == "full" else 3)
        yield _unequal(zygote, 100 if effort == "full" else 60)
        yield from _joining(zygote)
    finally:
        zygote.close(1.0)


def _compared(zygote: Zygote, model: str, blocks: int) -> Iterator[Row]:
    port, memory = free_port(), RoundsMemory(2)
    orders = [CompareOrder(rank, port, model, blocks, block_s=1.0) for rank in range(2)]
    processes = [BenchProcess(zygote, f"{ENTRY}:compare_main", order, "bench", memory.fds) for order in orders]
    times, _ = [process.result(StepTimes) for process in processes]
    memory.close()
    plain, ddp, shared = (median(each) for each in (times.plain, times.ddp, times.shared))
    against_plain, against_ddp = TARGETS[model]
    yield Row(f"{model}, a step of plain PyTorch", plain * 1000, "ms")
    yield at_least(f"{model}, 2 workers", plain / shared, against_plain, "plain PyTorch, one thread")
    yield at_least(f"{model}, 2 workers", ddp / shared, against_ddp, "DDP over gloo")


def _unequal(zygote: Zygote, rounds: int) -> Row:
    sample_s = [SAMPLE_S, SAMPLE_S, SAMPLE_S, SLOW * SAMPLE_S]
    memory = RoundsMemory(len(sample_s))
    orders = [UnequalOrder(rank, sample_s, BATCH_SIZE, rounds, settling=20) for rank in range(len(sample_s))]
    processes = [BenchProcess(zygote, f"{ENTRY}:unequal_main", order, "bench", memory.fds) for order in orders]
    speeds = [process.result()[0] for process in processes]
    memory.close()
    possible = sum(1 / seconds for seconds in sample_s)
    return at_least(f"samples/s, one of 4 workers {SLOW} times slower", speeds[0] / possible, 0.8, "sum of the speeds")


def _joining(zygote: Zygote) -> Iterator[Row]:
    memory, (reader, writer) = RoundsMemory(3), os.pipe()
    memory.exclude(2)  # it joins late: the others do not wait for it
    orders = [JoinOrder(rank, "MLP 6M", settling=40) for rank in range(3)]
    ends = [writer, writer, reader]
    processes = [
        BenchProcess(zygote, f"{ENTRY}:join_main", order, "bench", [*memory.fds, end])
        for order, end in zip(orders, ends, strict=True)
    ]
    os.close(reader)
    os.close(writer)
    times = [process.result(JoinTimes) for process in processes]
    memory.close()
    pause = max(one.steps[one.joined_at] - median(one.steps) for one in times[:2])
    yield at_most("MLP 6M, AdamW, a worker joins: pause of the others", pause * 1000, MOST_PAUSE_S * 1000, "", "ms")
    yield Row("MLP 6M, AdamW, a worker joins: its own time", times[2].joining * 1000, "ms")
