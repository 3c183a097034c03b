"""`--threads auto` against one torch thread for each worker, and against a thread for each core in each worker.

Workers share each batch of a chain of equal layers, without servers. With fewer workers than cores one thread leaves
cores idle; with several workers, a thread for each core in each lets them wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rainband.bench.harness.models import Chain
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.runs import run_to_measure
from rainband.options import num_threads
from rainband.runtimes.config import RunConfig
from rainband.runtimes.configure import usable_cores

BATCH_SIZE = 256
MIN_RATIO = 0.95  # auto against the better of the others


def run(effort: Effort) -> Iterator[Row]:
    repeats, epochs = (3, 4) if effort == "full" else (1, 2)
    cores = usable_cores()
    for workers in dict.fromkeys((1, min(2, cores), cores)):
        yield from _workers(workers, cores, repeats, epochs)


def _workers(workers: int, cores: int, repeats: int, epochs: int) -> list[Row]:
    auto = num_threads("threads", "auto", workers, 0, cores)
    rates: dict[int, list[float]] = {threads: [] for threads in dict.fromkeys((1, auto, cores))}
    for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
        for threads, found in rates.items():
            found.append(samples_per_s(workers, threads, epochs))
    name = f"{workers} workers" if workers > 1 else "1 worker"
    rows = [
        Row(f"{name}, {_threads(threads)}{' (auto)' * (threads == auto)}", median(found), "samples/s")
        for threads, found in rates.items()
    ]
    for threads in dict.fromkeys((1, cores)):
        if threads != auto:
            ratio = median([a / b for a, b in zip(rates[auto], rates[threads], strict=True)])
            rows.append(at_least(f"{name}, --threads auto", ratio, MIN_RATIO, f"{_threads(threads)} each"))
    return rows


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def samples_per_s(workers: int, threads: int, epochs: int) -> float:
    """Return the speed of workers that share each batch."""
    config = RunConfig(
        task=f"{Chain.__module__}:{Chain.__name__}",
        strategy="sync",
        strategy_settings={"lr": 1e-3},
        num_workers=workers,
        num_servers=0,
        threads=threads,
        epochs=epochs,
        batch_size=BATCH_SIZE,
        eval_every_s=0.0,
    )
    return run_to_measure(config, lambda event: None).samples_per_s
