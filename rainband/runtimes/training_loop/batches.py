"""The batches that a custom training loop draws: taken from leases, loaded by a DataLoader, pushed by the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Dataset
from rainband.strategy import Batch
from rainband.tasks.task import DatasetData, fingerprint
from rainband.worker.client import Client
from rainband.worker.worker import Sampler

OURS = ("batch_sampler", "sampler", "shuffle", "drop_last")  # arguments of a DataLoader that the plan decides
Indices = list[int]


class LoopBatches:
    """The batches to draw next, those that the loop has drawn but not stepped on, and the end of each epoch."""

    def __init__(
        self, client: Client, wait: Callable[[float | None], object], push_what_is_owed: Callable[[], bool]
    ) -> None:
        self.client = client
        self.wait = wait
        self.push_what_is_owed = push_what_is_owed  # steps the strategy has not pushed yet, because it gathers several
        self.passes = 0  # begun so far
        self.pass_is_over = False
        self.queue: deque[Batch] = deque()  # of the current work item
        self.ahead: deque[Batch] = deque()  # the loader has them, the loop not yet
        self.unstepped: list[Batch] = []  # the loop has them, and has not stepped since
        self.last: Batch | None = None
        self.item_ends: set[Batch] = set()

    def begin_pass(self) -> None:
        self.passes += 1
        self.pass_is_over = False

    def __iter__(self) -> Iterator[Indices]:
        """For the loader: the samples of one batch after the other, in so far as they are leased to us.

        It ends when the pass is over; a loader that fetches ahead gets no more for now than there is without
        waiting, because what we would wait for may be that the loop steps on what it has fetched.
        """
        sampler = Sampler(self.client.plan)
        while (batch := self._next(may_wait=not self.ahead)) is not None:
            self.ahead.append(batch)
            yield sampler.indices(batch).tolist()

    def hand_over(self) -> Batch | None:
        """The loader has brought its oldest batch. None: its lease was taken back meanwhile."""
        batch = self.ahead.popleft()
        if not self._is_ours(batch):
            return None
        self.unstepped.append(batch)
        self.last = batch
        return batch

    def take(self) -> tuple[Batch, ...]:
        """The batches drawn since the step before: they name this one."""
        batches, self.unstepped = tuple(self.unstepped), []
        return batches

    def end_an_item(self, batches: tuple[Batch, ...]) -> bool:
        """Return True if a push must end here: reassigned batches are grouped by the blocks that lack them."""
        ends = self.item_ends.intersection(batches)
        self.item_ends -= ends
        return bool(ends)

    def put_back(self) -> None:
        """The loop was left early: what the loader has fetched is drawn again later."""
        self.queue.extendleft(reversed(self.ahead))
        self.ahead.clear()

    def forget(self) -> None:
        """The leases were given up; what the loader has fetched by them is left out when it comes."""
        self.client.leases.held.clear()
        self.client.leases.request_again()

    def _is_ours(self, batch: Batch) -> bool:
        lease = self.client.leases.held.get(batch.portion)
        return lease is not None and lease.number == batch.lease

    def _next(self, may_wait: bool) -> Batch | None:
        client = self.client
        self.wait(0)  # what has come meanwhile
        self.queue = deque(filter(self._is_ours, self.queue))
        while not self.queue:
            if (work_item := client.next_item()) is not None:
                self.queue.extend(work_item.batches)
                if work_item.batches[-1].lease > 1:
                    self.item_ends.add(work_item.batches[-1])
            elif client.finished or client.stopping or (client.leases.no_work and self.unstepped):
                self.pass_is_over = True
                return None
            elif not may_wait:
                return None
            else:
                self._wait_for_more()
        if client.stopping or client.plan.epoch_of(self.queue[0].portion) >= self.passes:
            self.pass_is_over = True
            return None
        return self.queue.popleft()

    def _wait_for_more(self) -> None:
        """Wait for a lease. Others may wait for what we have stepped on; if nobody pushed, nobody would get more."""
        if self.client.leases.no_work and self.push_what_is_owed():
            return  # a lease may have come meanwhile
        stats, started = self.client.stats, time.monotonic()
        stats.waiting = True
        self.wait(None)
        stats.waiting = False
        stats.waited(time.monotonic() - started)


class InOrderBatches:
    """All batches of one pass, for a script that trains alone."""

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch

    def __iter__(self) -> Iterator[Indices]:
        sampler = Sampler(self.plan)
        first = self.epoch * self.plan.portions_per_epoch
        for portion in range(first, first + self.plan.portions_per_epoch):
            for k in range(self.plan.batches_in(portion)):
                yield sampler.indices(Batch(portion, k, 1)).tolist()


def described(dataset: Any, batch_size: int, epochs: int, arguments: dict[str, Any]) -> Dataset:
    """Return the dataset for the data plan; raise an error for wrong data or arguments of the loader."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length, so its samples cannot be shared out: give a map-style dataset "
            "(with __len__ and __getitem__), or loop over a loader of your own inside rainband.join."
        )
    if not len(dataset):
        raise ValueError("the dataset is empty: there is nothing to train on.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: give a whole number, 1 or more.")
    for name in OURS:
        if arguments.get(name) and not (name == "shuffle" and arguments[name] is True):
            raise ValueError(f"{name} is decided by the run, which shuffles and shares the data out: leave it out.")
    if arguments.get("shuffle") is False:
        raise ValueError("shuffle=False cannot be kept by several workers: leave it out.")
    return Dataset(_fingerprint(dataset, arguments.get("collate_fn")), len(dataset), batch_size, epochs)


def _fingerprint(dataset: Any, collate: Any) -> str:
    try:
        return fingerprint(DatasetData(dataset, collate))
    except (ValueError, TypeError):  # batches of the user's own kind: the number of samples must do
        return "unknown"


def loader(
    dataset: Any, batches: LoopBatches | InOrderBatches, arguments: dict[str, Any], ahead: bool = True
) -> DataLoader[Any]:
    """A real DataLoader. Without `ahead` it fetches a batch when it is asked for, and not before."""
    given = {name: value for name, value in arguments.items() if name not in OURS}
    if not ahead:
        for name in ("num_workers", "prefetch_factor", "persistent_workers"):
            given.pop(name, None)
    if given.get("num_workers"):
        given.setdefault("persistent_workers", True)
    # It draws a number for its workers whenever it begins; which must not change the numbers of the user's own code.
    given.setdefault("generator", torch.Generator().manual_seed(torch.initial_seed() % (1 << 63)))
    return DataLoader(dataset, batch_sampler=batches, **given)
