"""Virtual time: what happens next is the earliest thing that was planned."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random

Do = Callable[[], object]
Planned = tuple[float, object, Do]  # when, its turn among things of one moment, what


class VirtualClock:
    """Plans things and does them in the order of their time; what is planned for one moment, in the order planned.

    With `shuffle`, things of one moment happen in an order drawn from it: fault tests look at many orders.
    With `slots_per_s` only the things of the slot of time at hand are kept in order, those of later ones lie in heaps:
    where thousands are planned, the order of all of them costs more than doing some.
    """

    def __init__(self, shuffle: Random | None = None, slots_per_s: float = 0.0) -> None:
        self.now = 0.0
        self.progress_at = 0.0  # when somebody last got on with his work
        self.planned: list[Planned] = []  # a heap: what comes up to the end of the slot at hand
        self.slots_per_s = slots_per_s
        self._slot = 0  # the one at hand
        self._later: dict[int, list[Planned]] = {}  # slot -> what comes then, as it was planned
        self._slots: list[int] = []  # a heap: those of `_later`
        self.num_later = 0
        self._shuffle = shuffle
        self._number = 0
        self.idle = 0  # planned things that only keep time: see `at`

    @property
    def done(self) -> int:
        """How many things have happened."""
        return self._number - self.num_planned

    @property
    def num_planned(self) -> int:
        return len(self.planned) + self.num_later

    def now_s(self) -> float:
        return self.now

    def at(self, time_s: float, do: Do, idle: bool = False) -> None:
        """Plan something. Idle things (heartbeats, ticks) repeat for ever and say nothing about progress."""
        assert time_s >= self.now, f"at {self.now} s nothing can be planned for {time_s} s"
        self._number = number = self._number + 1
        turn = number if self._shuffle is None else (self._shuffle.random(), number)
        slot = int(time_s * self.slots_per_s)
        if slot <= self._slot:
            heappush(self.planned, (time_s, turn, self._idly(do) if idle else do))
            return
        self.num_later += 1
        later = self._later.get(slot)
        if later is None:
            later = self._later[slot] = []
            heappush(self._slots, slot)
        later.append((time_s, turn, self._idly(do) if idle else do))

    def after(self, delay_s: float, do: Do, idle: bool = False) -> None:
        self.at(self.now + delay_s, do, idle)

    def _idly(self, do: Do) -> Do:
        self.idle += 1

        def idly() -> None:
            self.idle -= 1
            do()

        return idly

    def go_on(self) -> bool:
        """All of the slot at hand has happened: go on to the next one. False: nothing is planned."""
        if not self._slots:
            return False
        self._slot = heappop(self._slots)
        self.planned += self._later.pop(self._slot)  # the same list: others look at it
        self.num_later -= len(self.planned)
        heapify(self.planned)
        return True

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self.planned and not self.go_on():
            return False
        self.now, _, do = heappop(self.planned)
        do()
        return True
