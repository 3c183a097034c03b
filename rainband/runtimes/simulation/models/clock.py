"""Virtual time: a queue of planned events, done in the order of their time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random

Do = Callable[[], object]
Planned = tuple[float, object, Do]  # time, order among events of equal time, what to do


class VirtualClock:
    """Plans events and does them in the order of their time; events of equal time in the order of planning.

    With `shuffle`, events of equal time happen in a random order, so that fault tests cover many orders. With
    `slots_per_s`, only the events of the current slot of time are sorted: with thousands of events, sorting all of them
    would cost more than doing them.
    """

    def __init__(self, shuffle: Random | None = None, slots_per_s: float = 0.0) -> None:
        self.now = 0.0
        self.progress_at = 0.0  # when a worker last made progress
        self.planned: list[Planned] = []  # a heap: the events up to the end of the current slot
        self.slots_per_s = slots_per_s
        self._slot = 0  # the current one
        self._later: dict[int, list[Planned]] = {}  # slot -> its events, in the order of planning
        self._slots: list[int] = []  # a heap: the keys of `_later`
        self.num_later = 0
        self._shuffle = shuffle
        self._number = 0
        self.idle = 0  # planned events that repeat for ever: see `at`

    @property
    def done(self) -> int:
        """Return the number of events that have happened."""
        return self._number - self.num_planned

    @property
    def num_planned(self) -> int:
        return len(self.planned) + self.num_later

    def now_s(self) -> float:
        return self.now

    def at(self, time_s: float, do: Do, idle: bool = False) -> None:
        """Plan an event. Idle events (heartbeats, ticks) repeat for ever and are no sign of progress."""
        assert time_s >= self.now, f"it is {self.now} s: too late to plan an event for {time_s} s"
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
        """Continue with the next slot, because all events of the current one have happened. False: there is none."""
        if not self._slots:
            return False
        self._slot = heappop(self._slots)
        self.planned += self._later.pop(self._slot)  # in place: others hold this list
        self.num_later -= len(self.planned)
        heapify(self.planned)
        return True

    def step(self) -> bool:
        """Do the next event; False: there is none."""
        if not self.planned and not self.go_on():
            return False
        self.now, _, do = heappop(self.planned)
        do()
        return True
