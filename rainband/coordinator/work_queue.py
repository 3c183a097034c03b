"""Who computes which cells of one evaluation: handed out on demand, and copied where someone is slow. Pure.

A worker that asks gets cells that follow each other, many at first and one at a time towards the end; the last ones go
to those who have nothing to do, not ahead to those who are still at work. When all are handed out, whoever is idle gets
a copy of what should have come long ago. A cell is done when a worker was told so by every block; others that have it
leave off. What a worker has not delivered is handed out again when it is lost. Which result counts is no question here:
every block takes the first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

PARTS = 3  # a worker gets a third of its share of what is left
OVERDUE = 2.0  # times the usual time of a cell: then a copy is worth it
UNKNOWN_S = 1.0  # the usual time of a cell before any has come
REMEMBERED = 64  # cells whose times make the usual one


@dataclass
class WorkerPace:
    """How long cells take, from one evaluation to the next, and where each worker began the last one."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    home: dict[int, int] = field(default_factory=dict)  # worker -> its first cell: its data may still be in a cache

    @property
    def usual_s(self) -> float | None:
        return median(self.times_s) if self.times_s else None


@dataclass
class AssignedItem:
    """What one worker has to do, in this order."""

    work_items: list[int] = field(default_factory=list)
    since_s: float = 0.0  # it has worked on the first of them
    last: int = -1  # that it was given


class WorkQueue:
    """The cells of one evaluation."""

    def __init__(self, work_items: Sequence[int], pace: WorkerPace) -> None:
        self.pace = pace
        self.work_items = sorted(work_items)
        self.fresh = list(self.work_items)  # that nobody was given
        self.open = set(work_items)  # that nobody has delivered
        self.held: dict[int, AssignedItem] = {}
        self.copies: dict[int, int] = {}  # cell -> workers that have it
        self.backups = 0  # copies handed out
        self.delivered: dict[int, int] = {}  # worker -> cells that it delivered first

    def give(self, worker: int, num_workers: int, now: float, idle: bool = True) -> tuple[int, ...]:
        """Cells for a worker that asks; none: there is nothing for it now. `idle`: it has computed what it has."""
        held = self.held.setdefault(worker, AssignedItem(since_s=now))
        if (
            idle and held.work_items and not self.pace.times_s
        ):  # computed, though not delivered: a first idea of the time
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
            wanted = self.pace.home.get(
                worker, self.work_items[worker % num_workers * len(self.work_items) // num_workers]
            )
        else:
            wanted = held.last + 1
        at = bisect_left(self.fresh, wanted)
        at = 0 if at == len(self.fresh) else at
        work_items = self.fresh[at : at + most]
        del self.fresh[at : at + most]
        if held.last < 0:
            self.pace.home[worker] = work_items[0]
        return tuple(work_items)

    def _overdue(self, worker: int, now: float) -> int | None:
        """What should have come long ago and fewest have; of what one worker has, the last: it gets there last."""
        found = [
            (self.copies[work_item], -at, held.since_s, work_item)
            for other, held in self.held.items()
            for at, work_item in enumerate(held.work_items)
            if other != worker and work_item in self.open and now >= self._due(held, at)
        ]
        return min(found)[-1] if found else None

    def _due(self, held: AssignedItem, at: int) -> float:
        """Later for each copy that there is: not everyone shall do the same."""
        usual_s = self.pace.usual_s or UNKNOWN_S
        return held.since_s + (at + 1) * OVERDUE * usual_s * self.copies[held.work_items[at]]

    def has(self, worker: int) -> bool:
        """Is there something that it has not delivered yet?"""
        return worker in self.held and bool(self.held[worker].work_items)

    def next_due(self, idle: Sequence[int]) -> float | None:
        """When one of those who are idle may get a copy; None: nothing is open, or there is something fresh to do."""
        if self.fresh:
            return None
        due = [
            self._due(held, at)
            for other, held in self.held.items()
            for at, work_item in enumerate(held.work_items)
            if work_item in self.open and any(worker != other for worker in idle)
        ]
        return min(due, default=None)

    def returned(self, worker: int, work_item: int, now: float) -> list[int]:
        """A worker has delivered a cell to every block; returns the others that have it, who may leave off."""
        held = self.held.get(worker)
        if held is not None and work_item in held.work_items:
            self.pace.times_s.append(now - held.since_s)
            self._take_away(held, work_item, now)
        if work_item in self.open:
            self.open.discard(work_item)
            self.delivered[worker] = self.delivered.get(worker, 0) + 1
        others = [other for other, theirs in self.held.items() if work_item in theirs.work_items]
        for other in others:
            self._take_away(self.held[other], work_item, now)
        return others

    def _take_away(self, held: AssignedItem, work_item: int, now: float) -> None:
        if held.work_items[0] == work_item:
            held.since_s = now
        held.work_items.remove(work_item)
        self.copies[work_item] -= 1

    def copied(self) -> dict[int, tuple[int, ...]]:
        """Who has what others have, too, as far as is known: when all is done, they may leave off."""
        twice = {work_item for work_item, copies in self.copies.items() if copies > 1}
        return {worker: found for worker, held in self.held.items() if (found := tuple(twice & set(held.work_items)))}

    def forget(self, worker: int) -> int | None:
        """A worker is gone: what only it had is handed out again. Returns the cell it was at."""
        held = self.held.pop(worker, None)
        self.pace.home.pop(worker, None)
        if held is None:
            return None
        for work_item in held.work_items:
            self.copies[work_item] -= 1
            if work_item in self.open and not self.copies[work_item]:
                insort(self.fresh, work_item)
        return held.work_items[0] if held.work_items else None
