"""One of four workers is five times slower: samples/s and time to an accuracy, of us and of DDP/gloo, in one run.

Every worker's step takes a fixed time, as on a device of its own: it computes the gradient, which is short, and sleeps
for the rest. So four workers fit on two cores, and what is measured is who waits for whom. Rates were chosen for each
way of training from 0.05, 0.1, 0.2 ... by the fewest epochs to the accuracy.

All begin with the same parameters, and DDP goes through the batches that our rounds go through. Who measures the
accuracy is one of the fast workers: DDP's does it while it would wait anyway, ours loses a part of its steps to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rainband.bench.baselines.data_parallel import PacedOrder
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.run_directory import new_directory
from rainband.tasks.digits import Digits

NUM_WORKERS, SLOW, FACTOR = 4, 3, 5.0  # worker 0 measures the accuracy, so it is not the slow one
STEP_S = 0.08  # of a device; computing a gradient of the digits takes a few ms
ACCURACY = 0.95
DDP_LR = 0.4
THROUGHPUT_BAR, SOONER_BAR = 0.9, 2.0


@dataclass(frozen=True)
class Contender:
    """A strategy with its settings, and for how many epochs it trains."""

    strategy: str
    epochs: int
    settings: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False  # it must keep the fast workers' throughput

    @property
    def name(self) -> str:
        more = f" backup_workers={self.settings['backup_workers']}" if "backup_workers" in self.settings else ""
        return self.strategy + more


@dataclass(frozen=True)
class StragglerFound:
    """What came of one run."""

    samples_per_s: float
    reached_s: float | None  # none: the accuracy was never seen


CONTENDERS = (
    Contender("sync", 8, {"lr": 0.4}),
    Contender("sync", 15, {"lr": 0.2, "backup_workers": 1}),
    Contender("stale_sync", 6, {"lr": 0.1}),
    Contender("soft_sync", 15, {"lr": 0.4}, asynchronous=True),
    Contender("downpour", 15, {"lr": 0.01, "overlap": False}, asynchronous=True),
    Contender("hogwild", 15, {"lr": 0.1}, asynchronous=True),
)


def run(effort: Effort) -> Iterator[Row]:
    contenders = CONTENDERS if effort == "full" else [c for c in CONTENDERS if c.strategy in ("sync", "downpour")]
    zygote = Zygote.start(PRELOAD)
    try:
        ddp = _ddp(zygote)
    finally:
        zygote.close(1.0)
    ideal = (NUM_WORKERS - 1) * Digits().batch_size / STEP_S
    yield Row("the three fast workers alone, at best", ideal, "samples/s")
    yield from _rows("DDP/gloo", ddp)
    for contender in contenders:
        found = _train(contender)
        yield from _rows(contender.name, found)
        if contender.asynchronous:
            share, sooner = found.samples_per_s / ideal, _times_sooner(ddp, found)
            yield at_least(contender.name, share, THROUGHPUT_BAR, "the fast workers' samples/s")
            yield at_least(f"{contender.name} at {ACCURACY:.0%}, times sooner", sooner, SOONER_BAR, "DDP/gloo")


def _rows(name: str, found: StragglerFound) -> list[Row]:
    rows = [Row(name, found.samples_per_s, "samples/s")]
    if found.reached_s is None:
        return rows
    return [*rows, Row(f"{name}, to an accuracy of {ACCURACY:.0%}", found.reached_s, "s")]


def _times_sooner(ddp: StragglerFound, ours: StragglerFound) -> float:
    if ddp.reached_s is None or ours.reached_s is None:
        return 0.0
    return ddp.reached_s / ours.reached_s


def _ddp(zygote: Zygote) -> StragglerFound:
    port = free_port()
    ranks = [
        BenchProcess(
            zygote,
            "rainband.bench.baselines.data_parallel:paced_main",
            PacedOrder(rank, NUM_WORKERS, port, STEP_S * (FACTOR if rank == SLOW else 1), DDP_LR, ACCURACY),
            "DDP",
        )
        for rank in range(NUM_WORKERS)
    ]
    (rate, reached_s), *_ = [rank.result() for rank in ranks]
    return StragglerFound(rate, reached_s or None)


def _train(contender: Contender) -> StragglerFound:
    seen: list[events.AnyEvent] = []
    compute = {"kind": "constant", "step_s": STEP_S, "slow_workers": (SLOW,), "slow_factor": FACTOR}
    with tempfile.TemporaryDirectory() as root:
        config = RunConfig(
            task="digits",
            strategy=contender.strategy,
            strategy_settings=contender.settings,
            num_workers=NUM_WORKERS,
            num_servers=0 if contender.strategy == "hogwild" else 1,
            epochs=contender.epochs,
            eval_every_s=0.1,
            failure_timeout_s=1.0,  # heartbeats, which bring the accuracy, come five times as often
            directory=str(new_directory(Path(root), "digits", contender.strategy)),
            sim=SimSettings(compute=compute),
        )
        result = local.run(config, seen.append)
    if result.outcome != "finished":
        raise RuntimeError(f"{contender.name} {result.outcome}: {result.reason}")
    return found_in(seen)


def found_in(seen: list[events.AnyEvent]) -> StragglerFound:
    """Samples/s between the first and the last report that has them; seconds from the run's start to the accuracy.

    It starts when all is ready, as DDP does. (Of a first step is heard with the next heartbeat, when it is over.)
    """
    began = next(event.at_s for event in seen if isinstance(event, events.PhaseChanged) and event.phase == "running")
    progress = [event for event in seen if isinstance(event, events.Progress) and event.samples_done]
    half_way = [event for event in progress if event.samples_done < event.samples]  # at the end some have no work
    first, last = half_way[0], half_way[-1]
    rate = (last.samples_done - first.samples_done) / (last.at_s - first.at_s)
    there = (event.at_s for event in progress if event.metrics.get("accuracy", 0.0) >= ACCURACY)
    reached_at = next(there, None)
    return StragglerFound(rate, None if reached_at is None else reached_at - began)
