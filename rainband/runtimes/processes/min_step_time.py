"""Real workers at a chosen pace: each step takes at least as long as on a device that one has not got, or a slow one.

The times are those of virtual time (sim/compute.py); a worker that has computed sooner sleeps for the rest, so several
fit on one core, and one of them can be slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rainband.model.gradient import Gradient
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace
from rainband.settings import build
from rainband.strategy import Batch
from rainband.worker.worker import ModuleWorker


def at_its_pace(worker: ModuleWorker, config: RunConfig) -> None:
    """Have the worker's steps take as long as the configuration says, if it says so."""
    if config.sim.compute:
        pace = ComputePace(build(ComputeModel, config.sim.compute), config.seed, worker.rank)
        worker.compute = paced(worker.compute, pace)  # type: ignore[method-assign, assignment]


def paced(
    compute: Callable[[Batch], Gradient],
    pace: ComputePace,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[Batch], Gradient]:
    """The same gradients, each after the time that its step takes."""

    def after_a_while(batch: Batch) -> Gradient:
        done_at = now() + pace.next_s()
        gradient = compute(batch)
        sleep(max(0.0, done_at - now()))
        return gradient

    return after_a_while
