"""The queue of work items of one evaluation: handed out on demand, and copied if a worker is slow. Pure.

A worker that asks gets consecutive items, many at first and one at a time towards the end; the last ones go to idle
workers, not ahead of time to busy ones. When all are handed out, an idle worker gets a copy of an overdue item. An item
is done when every block has acknowledged it to a worker; the coordinator then stops the other workers that have it.
The items of a lost worker are handed out again. Every block takes the first result of an item, so
copies need no arbitration.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

PARTS = 3  # a worker gets at most a third of its share of the remaining items
OVERDUE = 2.0  # times the median time of an item: then a copy is handed out
UNKNOWN_S = 1.0  # the assumed time of an item before any was delivered
REMEMBERED = 64  # items whose times make the median


@dataclass
class WorkerPace:
    """The usual time of an item, and the first item of each worker, kept between evaluations."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    first: dict[int, int] = field(default_factory=dict)  # worker -> its first item: its data may still be cached

    @property
    def usual_s(self) -> float | None:
        return median(self.times_s) if self.times_s else None


@dataclass
class AssignedItem:
    """The items of one worker, in the order in which it computes them."""

    work_items: list[int] = field(default_factory=list)
    since_s: float = 0.0  # when it began the first of them
    last: int = -1  # the last item that it received


class WorkQueue:
    """The work items of one evaluation."""

    def __init__(self, work_items: Sequence[int], pace: WorkerPace) -> None:
        self.pace = pace
        self.work_items = sorted(work_items)
        self.fresh = list(self.work_items)  # handed out to no worker yet
        self.open = set(work_items)  # not delivered yet
        self.held: dict[int, AssignedItem] = {}
        self.copies: dict[int, int] = {}  # work item -> workers that have it
        self.backups = 0  # copies handed out
        self.delivered: dict[int, int] = {}  # worker -> items that it delivered first
        self.parts: dict[tuple[int, int], set[int]] = {}  # (worker that leads a replica, item) -> ranks that have it

    def give(self, worker: int, num_workers: int, now: float, idle: bool = True) -> tuple[int, ...]:
        """Return items for a worker that asks, () if there are none now. `idle`: it has computed all its items."""
        held = self.held.setdefault(worker, AssignedItem(since_s=now))
        if idle and held.work_items and not self.pace.times_s:  # computed, not delivered yet: a first estimate
            self.pace.times_s.append((now - held.since_s) / len(held.work_items))
        idle = idle or not held.work_items
        work_items = self._fresh(worker, held, num_workers) if idle or len(self.fresh) > num_workers else ()
        if not work_items and idle:
            copied = self._overdue(worker, now)
            work_items = () if copied is None else (copied,)
            self.backups += len(work_items)
        for work_item in work_items:
            self.copies[work_item] = self.copies.get(work_item, 0) + 1
        if work_items:
            if not held.work_items:
                held.since_s = now
            held.work_items += work_items
            held.last = work_items[-1]
        return work_items

    def _fresh(self, worker: int, held: AssignedItem, num_workers: int) -> tuple[int, ...]:
        if not self.fresh:
            return ()
        num_workers = max(1, num_workers)
        most = max(1, len(self.fresh) // (PARTS * num_workers))
        if held.last < 0:
            wanted = self.pace.first.get(
                worker, self.work_items[worker % num_workers * len(self.work_items) // num_workers]
            )
        else:
            wanted = held.last + 1
        at = bisect_left(self.fresh, wanted)
        at = 0 if at == len(self.fresh) else at
        work_items = self.fresh[at : at + most]
        del self.fresh[at : at + most]
        if held.last < 0:
            self.pace.first[worker] = work_items[0]
        return tuple(work_items)

    def _overdue(self, worker: int, now: float) -> int | None:
        """Return the overdue item with the fewest copies; of one worker's items the last, which it computes last."""
        found = [
            (self.copies[work_item], -at, held.since_s, work_item)
            for other, held in self.held.items()
            for at, work_item in enumerate(held.work_items)
            if other != worker and work_item in self.open and now >= self._due(held, at)
        ]
        return min(found)[-1] if found else None

    def _due(self, held: AssignedItem, at: int) -> float:
        """Return when an item is overdue: later for each copy, so that idle workers do not all copy the same one."""
        usual_s = self.pace.usual_s or UNKNOWN_S
        return held.since_s + (at + 1) * OVERDUE * usual_s * self.copies[held.work_items[at]]

    def has(self, worker: int) -> bool:
        """Return whether a worker has undelivered items."""
        return worker in self.held and bool(self.held[worker].work_items)

    def next_due(self, idle: Sequence[int]) -> float | None:
        """Return when an idle worker may get a copy; None: nothing is open, or some items are not given yet."""
        if self.fresh:
            return None
        due = [
            self._due(held, at)
            for other, held in self.held.items()
            for at, work_item in enumerate(held.work_items)
            if work_item in self.open and any(worker != other for worker in idle)
        ]
        return min(due, default=None)

    def has_every_part(self, leader: int, rank: int, work_item: int, replica_size: int) -> bool:
        """Note that the worker of this rank has delivered its part of an item; return True if all of the replica have.

        A replica that is lost between the pushes of its workers has delivered the item to some blocks only.
        """
        ranks = self.parts.setdefault((leader, work_item), set())
        ranks.add(rank)
        return len(ranks) == replica_size

    def returned(self, worker: int, work_item: int, now: float) -> list[int]:
        """Note that a worker has delivered an item to every block; return the other workers that have it."""
        held = self.held.get(worker)
        if held is not None and work_item in held.work_items:
            self.pace.times_s.append(now - held.since_s)
            self._remove(held, work_item, now)
        if work_item in self.open:
            self.open.discard(work_item)
            self.delivered[worker] = self.delivered.get(worker, 0) + 1
        others = [other for other, theirs in self.held.items() if work_item in theirs.work_items]
        for other in others:
            self._remove(self.held[other], work_item, now)
        return others

    def _remove(self, held: AssignedItem, work_item: int, now: float) -> None:
        if held.work_items[0] == work_item:
            held.since_s = now
        held.work_items.remove(work_item)
        self.copies[work_item] -= 1

    def copied(self) -> dict[int, tuple[int, ...]]:
        """Return, for each worker, its items that other workers have too."""
        copies = {work_item for work_item, number in self.copies.items() if number > 1}
        return {worker: found for worker, held in self.held.items() if (found := tuple(copies & set(held.work_items)))}

    def forget(self, worker: int) -> int | None:
        """Hand out again what only this worker had; return the item that it was computing."""
        held = self.held.pop(worker, None)
        self.parts = {key: ranks for key, ranks in self.parts.items() if key[0] != worker}
        self.pace.first.pop(worker, None)
        if held is None:
            return None
        for work_item in held.work_items:
            self.copies[work_item] -= 1
            if work_item in self.open and not self.copies[work_item]:
                insort(self.fresh, work_item)
        return held.work_items[0] if held.work_items else None
