"""Processes that share the cores of one machine in virtual time: each runs at the same speed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from rainband.sim.clock import VirtualClock

Do = Callable[[], None]
ROUNDING_S = 1e-12


class Cores:
    """So many cores for any number of processes.

    With n processes that have work, each advances at the speed  min(1, cores / n) / (1 + crowding (min(n, cores) - 1)).
    `crowding` is what two busy cores take from each other: memory, caches, clock rate.
    """

    def __init__(self, clock: VirtualClock, num_cores: int, crowding: float = 0.0) -> None:
        self.clock = clock
        self.num_cores = num_cores
        self.crowding = crowding
        self.advanced = 0.0  # seconds of work done by a process that was there all the time
        self.looked_at = 0.0
        self.running: list[tuple[float, int, Do]] = []  # (value of `advanced` at which it is done, number, what then)
        self.number = 0
        self.alarm = 0  # only the last alarm that was set counts

    def work(self, amount_s: float, then: Do) -> None:
        """So many seconds of work for one process, if it were alone."""
        self._advance()
        self.number += 1
        heappush(self.running, (self.advanced + amount_s, self.number, then))
        self._set_alarm()

    def alongside(self, start_s: float, amount_s: float) -> float:
        """Work that a process does by itself, now or later; returns how long it takes beside what others have to do.

        What is to start later comes after other such work of the same process, which is over by then.
        """
        self._advance()
        later_s = max(0.0, start_s - self.clock.now)
        done_s = self.advanced + (later_s * self.speed if self.running else 0.0)
        takes_s = self._takes(amount_s, sorted(due - done_s for due, _, _ in self.running if due > done_s + ROUNDING_S))
        if later_s:
            self.clock.at(start_s, lambda: self.work(amount_s, nothing))
        else:
            self.work(amount_s, nothing)
        return takes_s

    def _takes(self, amount_s: float, others_s: list[float]) -> float:
        """How long a process takes for its work, if others have so much, least first."""
        done_s = time_s = 0.0
        for number, other_s in enumerate(others_s):
            until_s = min(other_s, amount_s)  # with this work of its own done, that other has no more
            time_s += (until_s - done_s) / self._speed(len(others_s) - number + 1)
            done_s = until_s
        return time_s + (amount_s - done_s) / self._speed(1)

    @property
    def speed(self) -> float:
        return self._speed(len(self.running))

    def _speed(self, processes: int) -> float:
        busy = min(processes, self.num_cores)
        return busy / processes / (1 + self.crowding * (busy - 1))

    def _advance(self) -> None:
        if self.running:
            self.advanced += (self.clock.now - self.looked_at) * self.speed
        self.looked_at = self.clock.now

    def _set_alarm(self) -> None:
        self.alarm += 1
        if self.running:
            number, left_s = self.alarm, max(0.0, self.running[0][0] - self.advanced)
            self.clock.after(left_s / self.speed, lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self.alarm:
            return
        self._advance()
        due, _, then = heappop(self.running)
        self.advanced = max(self.advanced, due)  # rounding must not leave a rest
        self._set_alarm()
        then()


def nothing() -> None:
    """Nobody waits for it."""


class OwnCore:
    """A core for everyone: work takes as long as it is."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def work(self, amount_s: float, then: Do) -> None:
        self.clock.at(self.clock.now + amount_s, then)

    def alongside(self, start_s: float, amount_s: float) -> float:
        return amount_s
