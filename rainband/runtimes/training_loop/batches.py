"""The batches of a custom training loop: taken from leases, loaded by a DataLoader, counted by the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from rainband.protocol.messages import Dataset
from rainband.strategy import Batch
from rainband.tasks.task import DatasetData, fingerprint
from rainband.worker.client import Client
from rainband.worker.sampler import Sampler

OURS = ("batch_sampler", "sampler", "shuffle", "drop_last")  # arguments of a DataLoader that the data plan follows
Indices = list[int]


class LoopBatches:
    """The order of batches, the batches drawn since the last step, and the end of a pass over the data."""

    def __init__(
        self, client: Client, wait: Callable[[float | None], object], push_gathered: Callable[[], bool]
    ) -> None:
        self.client = client
        self.wait = wait
        self.push_gathered = push_gathered  # push the steps that the strategy has gathered; False: there are none
        self.passes = 0  # begun
        self.pass_is_over = False
        self.queue: deque[Batch] = deque()  # of the work item taken last
        self.ahead: deque[Batch] = deque()  # fetched by the loader, not yet drawn by the loop
        self.unstepped: list[Batch] = []  # drawn by the loop since its last step
        self.last: Batch | None = None
        self.item_ends: set[Batch] = set()

    def begin_pass(self) -> int:
        """Begin the next pass, and return its number. The one before may have been left open."""
        self.put_back()
        self.passes += 1
        self.pass_is_over = False
        return self.passes

    def __iter__(self) -> Iterator[Indices]:
        """Yield, for the loader, the sample indices of each batch leased to this worker, until the pass is over.

        A loader that fetches ahead gets only batches that are available without waiting, because new leases may
        require that the loop first steps on batches that were fetched.
        """
        sampler = Sampler(self.client.plan)
        while (batch := self._next(may_wait=not self.ahead)) is not None:
            self.ahead.append(batch)
            yield sampler.indices(batch).tolist()

    def hand_over(self) -> Batch | None:
        """Return the loader's oldest batch; None if its lease was revoked meanwhile."""
        batch = self.ahead.popleft()
        if not self._is_leased(batch):
            return None
        self.unstepped.append(batch)
        self.last = batch
        return batch

    def take(self) -> tuple[Batch, ...]:
        """Return and forget the batches drawn since the last step."""
        batches, self.unstepped = tuple(self.unstepped), []
        return batches

    def take_last(self) -> tuple[Batch, ...]:
        """Return and forget the batch drawn last."""
        return (self.unstepped.pop(),)

    def end_an_item(self, batches: tuple[Batch, ...]) -> bool:
        """Return True if a push must end here: reassigned batches are grouped by the blocks that lack them."""
        ends = self.item_ends.intersection(batches)
        self.item_ends -= ends
        return bool(ends)

    def put_back(self) -> None:
        """Return fetched batches to the queue, because the loop ended the pass early."""
        self.queue.extendleft(reversed(self.ahead))
        self.ahead.clear()

    def forget(self) -> None:
        """Forget all leases. Batches that were fetched with them are then left out."""
        self.client.leases.held.clear()
        self.client.leases.request_again()

    def _is_leased(self, batch: Batch) -> bool:
        lease = self.client.leases.held.get(batch.portion)
        return lease is not None and lease.number == batch.lease

    def _next(self, may_wait: bool) -> Batch | None:
        client = self.client
        self.wait(0)  # handle messages that have arrived
        self.queue = deque(filter(self._is_leased, self.queue))
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
        """Wait for a lease. Push first: other workers may be waiting for these steps, and hold the only leases."""
        if self.client.leases.no_work and self.push_gathered():
            return  # a lease may have arrived
        stats, started = self.client.stats, time.monotonic()
        stats.waiting = True
        self.wait(None)
        stats.waiting = False
        stats.waited(time.monotonic() - started)


class LikelyBatches:
    """The order in which a loader's processes fetch ahead in rounds: the batches leased to this worker, by round.

    Which of them is next is known only when its round begins. Mostly it is the first of these.
    """

    def __init__(self, drawn: LoopBatches) -> None:
        self.drawn = drawn
        self.first: Batch | None = None  # a batch to begin with
        self.fetching: deque[tuple[int, int]] = deque()  # portion and number of each batch that is being fetched
        self.last = (-1, -1)  # round and portion of the last one

    @property
    def passes(self) -> int:
        return self.drawn.passes

    def begin_with(self, batch: Batch) -> None:
        self.first = batch
        self.fetching.clear()

    def __iter__(self) -> Iterator[Indices]:
        sampler = Sampler(self.drawn.client.plan)
        while (batch := self._next()) is not None:
            self.fetching.append((batch.portion, batch.k))
            self.last = self._place(batch)
            yield sampler.indices(batch).tolist()

    def _next(self) -> Batch | None:
        if (first := self.first) is not None:
            self.first = None
            return first
        leases, plan = self.drawn.client.leases.held.values(), self.drawn.client.plan
        leased = (Batch(one.portion, k, one.number) for one in leases for ks in one.todo for k in ks)
        wanted = (b for b in leased if plan.epoch_of(b.portion) < self.passes and self._place(b) > self.last)
        return min(wanted, key=self._place, default=None)

    def _place(self, batch: Batch) -> tuple[int, int]:
        return self.drawn.client.plan.round_of(batch.portion, batch.k), batch.portion


def fetched_ahead(dataset: Any, drawn: LoopBatches, arguments: dict[str, Any]) -> Iterator[Any]:
    """Yield the samples of each batch of a pass in rounds, which the loader's processes have mostly fetched before."""
    likely = LikelyBatches(drawn)
    processes = loader(dataset, likely, arguments)
    fetched = iter(processes)
    for _ in drawn:
        batch = drawn.ahead[-1]
        if (batch.portion, batch.k) not in likely.fetching:
            likely.begin_with(batch)
            fetched = iter(processes)
        while likely.fetching.popleft() != (batch.portion, batch.k):
            next(fetched)  # of a lease that was revoked
        yield next(fetched)


def described(dataset: Any, batch_size: int, epochs: int, arguments: dict[str, Any]) -> Dataset:
    """Return what the data plan needs to know; raise ValueError for unsuitable data or loader arguments."""
    refuse_loader(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length, so its samples cannot be distributed: use a map-style dataset "
            "(with __len__ and __getitem__), or iterate over your own loader inside rainband.join."
        )
    drop_last = bool(arguments.get("drop_last"))
    check_sizes(dataset, batch_size, drop_last)
    for name in ("batch_sampler", "sampler", "shuffle"):
        if arguments.get(name) and not (name == "shuffle" and arguments[name] is True):
            raise ValueError(f"{name} is decided by the run, which shuffles and distributes the data: omit it.")
    if arguments.get("shuffle") is False:
        raise ValueError("shuffle=False is not supported, because workers draw batches in any order: omit it.")
    return Dataset(fingerprint_of(dataset, arguments.get("collate_fn")), len(dataset), batch_size, epochs, drop_last)


def refuse_loader(dataset: Any) -> None:
    """Raise ValueError for a DataLoader in the place of its dataset."""
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "run.batches(...) makes batches of a dataset: for a DataLoader, iterate over run.loader(loader)."
        )


def check_sizes(dataset: Any, batch_size: int, drop_last: bool) -> None:
    """Raise ValueError if no batch of this size can be made of the dataset."""
    if not len(dataset):
        raise ValueError("the dataset is empty: it must have at least one sample.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be an integer, 1 or more.")
    if drop_last and len(dataset) < batch_size:
        raise ValueError(f"drop_last=True leaves no batch of {batch_size}, as the dataset has {len(dataset)} samples.")


def fingerprint_of(dataset: Any, collate: Any) -> str:
    try:
        return fingerprint(DatasetData(dataset, collate))
    except (ValueError, TypeError):  # batches of another type: then only the number of samples is compared
        return "unknown"


class PassOrder(Protocol):
    """The batches of a pass, as a DataLoader asks for them."""

    @property
    def passes(self) -> int:
        """Return how many passes have begun."""

    def __iter__(self) -> Iterator[Indices]: ...


def loader(dataset: Any, batches: PassOrder, arguments: dict[str, Any], ahead: bool = True) -> DataLoader[Any]:
    """Return the DataLoader of the next pass. Without `ahead` it fetches each batch only when it is requested."""
    given = {name: value for name, value in arguments.items() if name not in OURS}
    if not ahead:
        for name in ("num_workers", "prefetch_factor", "persistent_workers"):
            given.pop(name, None)
    if given.get("num_workers"):
        given.setdefault("persistent_workers", True)
    # A DataLoader seeds its processes with a random number, which must not change the user's own random numbers, and
    # must differ from pass to pass: else random transforms would repeat.
    seed = xxhash.xxh3_64_intdigest(f"{torch.initial_seed()} {batches.passes}".encode()) >> 1
    given.setdefault("generator", torch.Generator().manual_seed(seed))
    return DataLoader(dataset, batch_sampler=batches, **given)
