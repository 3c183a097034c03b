"""Clocks of a block's readers, and the slowest of them at every version of the block.

A worker's clock counts its pushes that were answered: accepted, duplicate, skipped or rejected. Pushes may arrive out
of order; a clock ticks only when all earlier ones have arrived.
"""

from __future__ import annotations

from bisect import bisect_right

KEPT = 4096  # rises of the slowest clock that are stored: far more than the staleness of any gradient


class Clocks:
    """The clocks of one block. Readers wait for members only; a clock is stored after its worker has left."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.members: set[int] = set()
        self.ahead: dict[int, set[int]] = {}  # worker -> work items that arrived before earlier ones
        self.there: dict[int, dict[int, None]] = {}  # clock -> members at it, in order of arrival
        self.slowest = 0
        self.rises: list[tuple[int, int]] = [(0, 0)]  # (version, slowest clock from then on)

    def enter(self, worker: int, base: int, version: int) -> None:
        """Add a member. It starts at the slowest clock or at its own (`base`), whichever is higher."""
        clock = max(self.of.get(worker, 0), base)
        if worker in self.members:
            if clock > self.of[worker]:
                self._move(worker, clock, version)
            return
        self.of[worker] = clock = max(clock, self.slowest)
        self.members.add(worker)
        self.there.setdefault(clock, {})[worker] = None
        self.ahead.pop(worker, None)
        self._rise(version)

    def leave(self, worker: int, version: int) -> None:
        """Remove a member: readers do not wait for it."""
        if worker in self.members:
            self.members.discard(worker)
            del self.there[self.of[worker]][worker]
            self._rise(version)

    def tick(self, worker: int, clock: int, version: int) -> None:
        """Note that this worker's work item number `clock`, counted from 1, is settled."""
        now = self.of.get(worker, 0)
        if clock <= now:
            return
        if clock > now + 1:
            self.ahead.setdefault(worker, set()).add(clock)
            return
        early = self.ahead.get(worker, set())
        while clock + 1 in early:
            clock += 1
            early.discard(clock)
        self._move(worker, clock, version)

    def _move(self, worker: int, clock: int, version: int) -> None:
        if worker in self.members:
            del self.there[self.of[worker]][worker]
            self.there.setdefault(clock, {})[worker] = None
        self.of[worker] = clock
        self._rise(version)

    def _rise(self, version: int) -> None:
        """Update the slowest clock. It never falls, because new members start there."""
        before = self.slowest
        if not self.members:  # the next member starts where the fastest was
            self.there.clear()
            self.slowest = max(before, *self.of.values())
        while self.members and not self.there.get(self.slowest):
            self.there.pop(self.slowest, None)
            self.slowest += 1
        if self.slowest > before:
            self.rises.append((version, self.slowest))
            if len(self.rises) > 2 * KEPT:
                del self.rises[:KEPT]

    def slowest_at(self, version: int) -> int:
        """Return the slowest clock when the block had this version."""
        at = bisect_right(self.rises, version, key=lambda rise: rise[0])
        return self.rises[max(0, at - 1)][1]

    def laggard(self, but: int) -> int | None:
        """Return a slowest member other than `but`, the first to arrive at its clock; None if there is none."""
        return next((worker for worker in self.there.get(self.slowest, ()) if worker != but), None)
