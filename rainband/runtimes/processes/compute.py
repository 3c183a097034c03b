"""Compute of a worker process: batches prepared ahead, and steps that take a minimum time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rainband.protocol.steps import Work
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace
from rainband.settings import build
from rainband.strategy import Batch
from rainband.worker.worker import Compute, ModuleWorker


class MinStepTime:
    """Makes each gradient take at least the time that the simulation's compute model gives it.

    A worker that has computed sooner sleeps for the rest, so several workers share one core as if each had its own,
    and one of them can be slow.
    """

    def __init__(
        self, pace: ComputePace, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.pace = pace
        self.now = now
        self.sleep = sleep

    def perform(self, work: Work) -> None:
        if not isinstance(work, Compute):
            work.perform()
            return
        done_at = self.now() + work.share * self.pace.next_s()
        work.perform()
        self.sleep(max(0.0, done_at - self.now()))


def min_step_time(config: RunConfig, index: int) -> Callable[[Work], None] | None:
    """Return what the configuration says about the step times of worker `index`."""
    if not config.sim.compute:
        return None
    return MinStepTime(ComputePace(build(ComputeModel, config.sim.compute), config.seed, index)).perform


def prefetched(worker: ModuleWorker) -> Prefetch | None:
    """Return what prepares a worker's data ahead, if its data allows that: see `Data`."""
    ahead = worker.plan.coordinated and getattr(worker.data, "prefetch", False)
    return Prefetch(worker) if ahead else None


class Prefetch:
    """Prepares the next batch on a thread, while the gradient of this one is computed."""

    def __init__(self, worker: ModuleWorker) -> None:
        self.worker = worker
        self.thread = ThreadPoolExecutor(1, "prefetch")
        self.next: Batch | None = None
        self.samples: Future[Any] | None = None

    def __call__(self, batch: Batch) -> Any:
        ahead = self.samples if batch == self.next else None
        samples = self._begin(batch).result() if ahead is None else ahead.result()
        self.next = self.worker.client.items.after(batch, self.worker.plan)
        self.samples = None if self.next is None else self._begin(self.next)
        return samples

    def _begin(self, batch: Batch) -> Future[Any]:
        # Always on that thread: files that the data has open are read by one thread only.
        return self.thread.submit(self.worker.data.batch, self.worker.sampler.indices(batch))
