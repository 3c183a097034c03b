"""Virtual time: what happens next is the earliest thing that was planned."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

Do = Callable[[], object]
Planned = tuple[float, object, Do]  # when, its turn among things of one moment, what


class VirtualClock:
    """Plans things and does them in the order of their time; what is planned for one moment, in the order planned.

    With `shuffle`, things of one moment happen in an order drawn from it: fault tests look at many orders.
    """

    def __init__(self, shuffle: Random | None = None) -> None:
        self.now = 0.0
        self.progress_at = 0.0  # when somebody last got on with his work
        self.planned: list[Planned] = []  # a heap
        self._shuffle = shuffle
        self._number = 0
        self.idle = 0  # planned things that only keep time: see `at`

    @property
    def done(self) -> int:
        """How many things have happened."""
        return self._number - len(self.planned)

    def now_s(self) -> float:
        return self.now

    def at(self, time_s: float, do: Do, idle: bool = False) -> None:
        """Plan something. Idle things (heartbeats, ticks) repeat for ever and say nothing about progress."""
        assert time_s >= self.now, f"at {self.now} s nothing can be planned for {time_s} s"
        self._number = number = self._number + 1
        turn = number if self._shuffle is None else (self._shuffle.random(), number)
        heappush(self.planned, (time_s, turn, self._idly(do) if idle else do))

    def after(self, delay_s: float, do: Do, idle: bool = False) -> None:
        self.at(self.now + delay_s, do, idle)

    def _idly(self, do: Do) -> Do:
        self.idle += 1

        def idly() -> None:
            self.idle -= 1
            do()

        return idly

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self.planned:
            return False
        self.now, _, do = heappop(self.planned)
        do()
        return True
