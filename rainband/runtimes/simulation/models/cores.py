"""Processes that share the cores of one machine: a model of the Linux scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from math import ceil, inf

from rainband.runtimes.simulation.models.clock import VirtualClock

Do = Callable[[], None]
ROUNDING_S = 1e-12
TICK_S = 0.004  # the kernel checks at each tick whether another process should run
SLICE_S = 0.0014  # a process runs at least this long
HOT_S = 0.0005  # a process that ran this recently rarely migrates: its data is in the caches of its core
# Probabilities that an idle core takes over a process that waits for another core:
AT_TICK = 2 / 3  # at a tick
HOT_AT_TICK = 1 / 6  # at a tick, a process that just ran
WHEN_IDLE = 1 / 4  # when the core has just become idle


class CoreProcess:
    """A simulated process with queued work."""

    def __init__(self) -> None:
        self.core: Core | None = None  # where it ran last
        self.work: deque[tuple[float, Do]] = deque()  # (seconds left, what to do then)
        self.ran_at = -inf  # when it last ran

    @property
    def left_s(self) -> float:
        return sum(amount_s for amount_s, _ in self.work)


class Core:
    """One core: the first process of its queue runs, the others wait."""

    def __init__(self) -> None:
        self.queue: deque[CoreProcess] = deque()
        self.since = 0.0  # the first has run since then


class EveryNth:
    """Returns True for a fixed fraction of calls, evenly spaced."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.sum = 0.0

    def __call__(self) -> bool:
        self.sum += self.part
        if self.sum < 1 - ROUNDING_S:
            return False
        self.sum -= 1
        return True


class Cores:
    """The cores of one machine, shared by any number of processes.

    A process that wakes up goes to the core where it ran last. An idle core needs `wake_s` to start. On a busy core it
    preempts a process that has run for `SLICE_S`; otherwise it waits there, or migrates to an idle core with
    probability `moves`. (In virtual machines it rarely migrates: an idle core looks like one that the host has taken
    away.) At every tick a core switches to the next process of its queue, if the current one has run for `SLICE_S`.

    An idle core sometimes takes over a process that waits for another core: when it has just become idle, and at a
    tick, but rarely a process that just ran. So two processes often alternate on one core, beside an idle one, until
    one of them has no more work.

    A running process advances at the speed

        1 / (1 + crowding (busy cores - 1))

    `crowding` is the contention of busy cores for memory bandwidth, caches and clock rate.
    """

    def __init__(
        self, clock: VirtualClock, num_cores: int, crowding: float = 0.0, wake_s: float = 0.0, moves: float = 1.0
    ) -> None:
        self.clock = clock
        self.crowding = crowding
        self.wake_s = wake_s
        self.cores = [Core() for _ in range(num_cores)]
        self.processes: dict[Hashable, CoreProcess] = {}
        self.moves = EveryNth(moves)
        self.at_tick, self.hot_at_tick, self.when_idle = EveryNth(AT_TICK), EveryNth(HOT_AT_TICK), EveryNth(WHEN_IDLE)
        self.looked_at = 0.0
        self.alarm = 0  # only the last alarm that was set counts

    def work(self, amount_s: float, then: Do, who: Hashable) -> None:
        """Add work to a process's queue: seconds that it takes on a core of its own."""
        self._advance()
        self._add(amount_s, then, who)
        self._set_alarm()

    def alongside(self, start_s: float, amount_s: float, who: Hashable) -> float:
        """Add work that a process does by itself from a moment on, after its queued work.

        Returns how long it takes beside the current work of the others.
        """
        self._advance()
        process = self._add(amount_s, nothing, who)
        self._set_alarm()
        return max(0.0, self._done_at(process) - start_s)

    def _add(self, amount_s: float, then: Do, who: Hashable) -> CoreProcess:
        process = self.processes.setdefault(who, CoreProcess())
        process.work.append((amount_s, then))
        if process.core is None or process not in process.core.queue:
            self._wake(process)
        return process

    def _wake(self, process: CoreProcess) -> None:
        process.core = core = self._core_for(process)
        if not core.queue and self.wake_s:
            process.work.appendleft((self.wake_s, nothing))
        if core.queue and self.clock.now < core.since + SLICE_S:
            core.queue.insert(1, process)
            return
        if core.queue:
            self._turn(core)
        core.queue.appendleft(process)
        core.since = self.clock.now

    def _core_for(self, process: CoreProcess) -> Core:
        emptiest = min(self.cores, key=lambda core: len(core.queue))
        if process.core is None:
            return emptiest
        return emptiest if process.core.queue and not emptiest.queue and self.moves() else process.core

    def _turn(self, core: Core) -> None:
        """Switch to the next process."""
        core.queue[0].ran_at = core.since = self.clock.now
        core.queue.rotate(-1)

    def _done_at(self, process: CoreProcess) -> float:
        """Return when all work of a process is done, if no work is added."""
        assert process.core is not None
        core, speed, now = process.core, self._speed(), self.clock.now
        queue, since = deque((other, other.left_s) for other in core.queue), core.since
        while True:
            first, left_s = queue.popleft()
            ends = now + left_s / speed
            turn_ends = _tick_after(since + SLICE_S, now)
            if queue and turn_ends < ends:
                queue.append((first, left_s - (turn_ends - now) * speed))
                now = since = turn_ends
            elif first is process:
                return ends
            else:
                now = since = ends

    def _speed(self) -> float:
        busy = max(1, sum(bool(core.queue) for core in self.cores))
        return 1 / (1 + self.crowding * (busy - 1))

    def _advance(self) -> None:
        passed_s = self.clock.now - self.looked_at
        self.looked_at = self.clock.now
        if not passed_s:
            return
        done_s = passed_s * self._speed()
        for core in self.cores:
            if core.queue and core.queue[0].work:
                left_s, then = core.queue[0].work[0]
                core.queue[0].work[0] = (left_s - done_s, then)

    def _set_alarm(self) -> None:
        self.alarm += 1
        number, speed, now = self.alarm, self._speed(), self.clock.now
        moments = []
        for core in self.cores:
            if core.queue and core.queue[0].work:
                moments.append(now + max(0.0, core.queue[0].work[0][0]) / speed)
                if len(core.queue) > 1:
                    moments.append(_tick_after(core.since + SLICE_S, now))
        if self._is_uneven():
            moments.append(_tick_after(now, now))
        if moments:
            self.clock.at(min(moments), lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self.alarm:
            return
        self._advance()
        for core in self.cores:
            self._look_at(core)
        if _is_tick(self.clock.now) and self._is_uneven():
            share = self.hot_at_tick if self._last().ran_at + HOT_S > self.clock.now else self.at_tick
            if share():
                self._take_over()
        self._set_alarm()

    def _look_at(self, core: Core) -> None:
        """Finish the work that is done, or switch to the next process."""
        if not core.queue:
            return
        first = core.queue[0]
        if first.work and first.work[0][0] <= ROUNDING_S:
            _, then = first.work.popleft()
            then()  # it may add work, and another process may get the core
        if not first.work:
            self._sleep(first, core)
        elif len(core.queue) > 1 and _is_tick(self.clock.now) and core.since + SLICE_S <= self.clock.now:
            self._turn(core)

    def _sleep(self, process: CoreProcess, core: Core) -> None:
        if core.queue[0] is process:
            process.ran_at = core.since = self.clock.now
        core.queue.remove(process)
        if not core.queue and self._is_uneven() and self._last().ran_at + HOT_S <= self.clock.now and self.when_idle():
            self._take_over()

    def _is_uneven(self) -> bool:
        """Return True if a core is idle while a process waits for another core."""
        sizes = [len(core.queue) for core in self.cores]
        return min(sizes) == 0 and max(sizes) > 1

    def _last(self) -> CoreProcess:
        """Return the last process of the longest queue."""
        return max(self.cores, key=lambda core: len(core.queue)).queue[-1]

    def _take_over(self) -> None:
        process = self._last()
        assert process.core is not None
        process.core.queue.remove(process)
        process.core = next(core for core in self.cores if not core.queue)
        process.core.queue.append(process)
        process.core.since = self.clock.now


def _tick_after(moment_s: float, now_s: float) -> float:
    """Return the first tick that is at or after `moment_s`, and after `now_s`."""
    tick = ceil(moment_s / TICK_S - 1e-9)
    while tick * TICK_S <= now_s + ROUNDING_S:
        tick += 1
    return tick * TICK_S


def _is_tick(moment_s: float) -> bool:
    return abs(moment_s - round(moment_s / TICK_S) * TICK_S) <= ROUNDING_S


def nothing() -> None:
    """Do nothing."""


class OwnCore:
    """A core for each process: work takes its own time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def work(self, amount_s: float, then: Do, who: Hashable) -> None:
        self.clock.at(self.clock.now + amount_s, then)

    def alongside(self, start_s: float, amount_s: float, who: Hashable) -> float:
        return amount_s
