"""Prepares the data of the next batch on a thread, while the gradient of this one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rainband.strategy import Batch
from rainband.worker.worker import ModuleWorker


def prefetched(worker: ModuleWorker) -> None:
    """Have a worker's data prepared ahead, if its data may be: see `Data`."""
    if worker.plan.coordinated and getattr(worker.data, "prefetch", False):
        worker.fetch = Prefetch(worker)  # type: ignore[method-assign]


class Prefetch:
    """One batch ahead: with the next cell in hand, or the rest of this one, what comes next is known."""

    def __init__(self, worker: ModuleWorker) -> None:
        self.worker = worker
        self.thread = ThreadPoolExecutor(1, "prefetch")
        self.next: Batch | None = None
        self.samples: Future[Any] | None = None

    def __call__(self, batch: Batch) -> Any:
        ahead = self.samples if batch == self.next else None
        samples = self._begin(batch).result() if ahead is None else ahead.result()
        self.next = self.worker.client.handed.after(batch, self.worker.plan)
        self.samples = None if self.next is None else self._begin(self.next)
        return samples

    def _begin(self, batch: Batch) -> Future[Any]:
        # Always on that thread: files that the data has open are read by one thread only.
        return self.thread.submit(self.worker.data.batch, self.worker.sampler.indices(batch))
