"""The clocks of a block's readers, and the slowest of them at every version of the block.

A worker's clock is the number of its work items that the block is done with: applied, duplicate, skipped or refused.
Work items may arrive in another order than they were sent; a clock ticks only when all earlier ones have arrived.
"""

from __future__ import annotations

from bisect import bisect_right

KEPT = 4096  # rises of the slowest clock that are remembered: far more than any gradient misses


class Clocks:
    """The clocks of one block. Only members are waited for; a clock outlives its worker's membership."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.members: set[int] = set()
        self.ahead: dict[int, set[int]] = {}  # worker -> work items that arrived before earlier ones
        self.there: dict[int, dict[int, None]] = {}  # clock -> members at it, in the order in which they came there
        self.slowest = 0
        self.rises: list[tuple[int, int]] = [(0, 0)]  # (version, slowest clock from then on)

    def enter(self, worker: int, base: int, version: int) -> None:
        """Wait for this worker from now on. It starts at the slowest clock, or where it says it is, if that is more."""
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
        """Do not wait for this worker any more."""
        if worker in self.members:
            self.members.discard(worker)
            del self.there[self.of[worker]][worker]
            self._rise(version)

    def tick(self, worker: int, clock: int, version: int) -> None:
        """Note that the block is done with work item number `clock` of a worker, of which the first is 1."""
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
        """Update the slowest clock, which never falls, because a worker that joins starts there."""
        before = self.slowest
        if not self.members:  # no worker counts: the next to join starts at the highest clock
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
        """The slowest clock when the block had this version: what every reader of it had seen of everyone."""
        at = bisect_right(self.rises, version, key=lambda rise: rise[0])
        return self.rises[max(0, at - 1)][1]

    def laggard(self, but: int) -> int | None:
        """The slowest member: of several the one that has been there longest. None: it is the one who asks."""
        return next((worker for worker in self.there.get(self.slowest, ()) if worker != but), None)
