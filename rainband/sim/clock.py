"""Virtual time: what happens next is the earliest thing that was planned."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

Do = Callable[[], None]


class VirtualClock:
    """Plans things and does them in the order of their time; what is planned for one moment, in the order planned.

    With `shuffle`, things of one moment happen in an order drawn from it: fault tests look at many orders.
    """

    def __init__(self, shuffle: Random | None = None) -> None:
        self.now = 0.0
        self.done = 0  # things that have happened
        self.working = 0  # planned things that are more than keeping time: see `idle` below
        self._shuffle = shuffle
        self._planned: list[tuple[float, float, int, bool, Do]] = []
        self._number = 0

    def now_s(self) -> float:
        return self.now

    def at(self, time_s: float, do: Do, idle: bool = False) -> None:
        """Plan something. Idle things (heartbeats, ticks) repeat for ever and say nothing about progress."""
        assert time_s >= self.now, f"at {self.now} s nothing can be planned for {time_s} s"
        self._number += 1
        tie = self._shuffle.random() if self._shuffle else 0.0
        self.working += not idle
        heappush(self._planned, (time_s, tie, self._number, idle, do))

    def after(self, delay_s: float, do: Do, idle: bool = False) -> None:
        self.at(self.now + delay_s, do, idle)

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self._planned:
            return False
        self.now, _, _, idle, do = heappop(self._planned)
        self.working -= not idle
        self.done += 1
        do()
        return True
