"""Training with a straggler: one of four workers is five times slower; throughput and time to an accuracy, against DDP.

Every step takes a fixed time, as on a device of its own: a worker computes the gradient, which is short, and sleeps for
the rest. So four workers fit on two cores, and the benchmark measures waiting. The learning rate of each strategy, of
0.05, 0.1, 0.2 ..., is the one with the fewest epochs to the accuracy.

All begin with the same parameters, and DDP uses the batches of Rainband's rounds. One of the fast workers evaluates:
with DDP while it would wait anyway, with Rainband instead of some of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rainband.bench.baselines.data_parallel import PacedOrder
from rainband.bench.harness.processes import PRELOAD, BenchProcess, free_port
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.runs import run_to_measure
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.processes.zygote import Zygote
from rainband.tasks.digits import Digits
from rainband.views.formatting import assignment

NUM_WORKERS, SLOW, FACTOR = 4, 3, 5.0  # worker 0 evaluates, so another one is slow
STEP_S = 0.08  # computing a gradient takes a few ms of it
ACCURACY = 0.95
DDP_LR = 0.4
MIN_THROUGHPUT, MIN_SPEEDUP = 0.9, 2.0


@dataclass(frozen=True)
class Contender:
    """A strategy with its settings and number of epochs."""

    strategy: str
    epochs: int
    settings: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False  # has targets for throughput and time

    @property
    def name(self) -> str:
        shown = {name: self.settings[name] for name in ("batch_per_worker", "backup_workers") if name in self.settings}
        more = "".join(f" {assignment(name, value)}" for name, value in shown.items())
        return self.strategy + more


@dataclass(frozen=True)
class StragglerResult:
    """The result of one run."""

    samples_per_s: float
    reached_s: float | None  # None: the accuracy was not reached


CONTENDERS = (
    Contender("sync", 8, {"lr": 0.4, "batch_per_worker": True}),
    Contender("sync", 15, {"lr": 0.2, "batch_per_worker": True, "backup_workers": 1}),
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
    yield Row("the three fast workers alone, ideal", ideal, "samples/s")
    yield from _rows("DDP/gloo", ddp)
    for contender in contenders:
        found = _train(contender)
        yield from _rows(contender.name, found)
        if contender.asynchronous:
            share, speedup = found.samples_per_s / ideal, _speedup(ddp, found)
            yield at_least(contender.name, share, MIN_THROUGHPUT, "the fast workers' samples/s")
            name = f"{contender.name}, speedup to an accuracy of {ACCURACY:.0%}"
            yield at_least(name, speedup, MIN_SPEEDUP, "DDP/gloo")


def _rows(name: str, found: StragglerResult) -> list[Row]:
    reached = (
        [] if found.reached_s is None else [Row(f"{name}, to an accuracy of {ACCURACY:.0%}", found.reached_s, "s")]
    )
    return [Row(name, found.samples_per_s, "samples/s"), *reached]


def _speedup(ddp: StragglerResult, ours: StragglerResult) -> float:
    if ddp.reached_s is None or ours.reached_s is None:
        return 0.0
    return ddp.reached_s / ours.reached_s


def _ddp(zygote: Zygote) -> StragglerResult:
    port, entry = free_port(), "rainband.bench.baselines.data_parallel:paced_main"
    step_s = [STEP_S * (FACTOR if rank == SLOW else 1) for rank in range(NUM_WORKERS)]
    orders = [PacedOrder(rank, NUM_WORKERS, port, step_s[rank], DDP_LR, ACCURACY) for rank in range(NUM_WORKERS)]
    ranks = [BenchProcess(zygote, entry, order, "DDP") for order in orders]
    (rate, reached_s), *_ = [rank.result() for rank in ranks]
    return StragglerResult(rate, reached_s or None)


def _train(contender: Contender) -> StragglerResult:
    run_events: list[events.AnyEvent] = []
    compute = {"kind": "constant", "step_s": STEP_S, "slow_workers": (SLOW,), "slow_factor": FACTOR}
    config = RunConfig(
        task="digits",
        strategy=contender.strategy,
        strategy_settings=contender.settings,
        num_workers=NUM_WORKERS,
        num_servers=0 if contender.strategy == "hogwild" else 1,
        epochs=contender.epochs,
        eval_every_s=0.1,
        failure_timeout_s=1.0,  # heartbeats, which carry the accuracy, are five times as frequent
        sim=SimSettings(compute=compute),
    )
    run_to_measure(config, run_events.append)
    return result_of(run_events)


def result_of(run_events: list[events.AnyEvent]) -> StragglerResult:
    """Return the throughput between the first and the last report, and the seconds to the accuracy.

    Time starts when all workers are ready, as for DDP: the event of the first step comes later, with a heartbeat.
    """
    began = next(e.at_s for e in run_events if isinstance(e, events.PhaseChanged) and e.phase == "running")
    progress = [event for event in run_events if isinstance(event, events.Progress) and event.samples_done]
    before_end = [event for event in progress if event.samples_done < event.samples]  # at the end some have no work
    first, last = before_end[0], before_end[-1]
    rate = (last.samples_done - first.samples_done) / (last.at_s - first.at_s)
    reached = (event.at_s for event in progress if event.metrics.get("accuracy", 0.0) >= ACCURACY)
    reached_at = next(reached, None)
    return StragglerResult(rate, None if reached_at is None else reached_at - began)
