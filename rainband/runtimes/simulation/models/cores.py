"""Processes that share the cores of one machine in virtual time, as Linux lets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from math import ceil, inf

from rainband.runtimes.simulation.models.clock import VirtualClock

Do = Callable[[], None]
ROUNDING_S = 1e-12
TICK_S = 0.004  # so often the kernel looks whether another process should have the core
SLICE_S = 0.0014  # and for so long it leaves it to the one that has it
HOT_S = 0.0005  # who ran so recently is rarely moved: its data is still in the caches of its core
AT_TICK = 2 / 3  # so often an idle core takes over who waits for another, when it looks with a tick,
HOT_AT_TICK = 1 / 6  # also who just ran,
WHEN_IDLE = 1 / 4  # and when it has just become idle


class CoreProcess:
    """Somebody who has work, piece after piece."""

    def __init__(self) -> None:
        self.core: Core | None = None  # where it was last
        self.pieces: deque[tuple[float, Do]] = deque()  # seconds left, what then
        self.ran_at = -inf  # it last had a core

    @property
    def left_s(self) -> float:
        return sum(amount_s for amount_s, _ in self.pieces)


class Core:
    """One core: the first has it, the others wait."""

    def __init__(self) -> None:
        self.queue: deque[CoreProcess] = deque()
        self.since = 0.0  # the first has it since then


class EveryNth:
    """Says yes to a part of all questions, evenly spread."""

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
    """So many cores for any number of processes.

    A process that wakes up goes to the core where it was before. A core that was idle needs `wake_s` to begin. One
    that is taken is given up by a process that has had it for `SLICE_S`; otherwise who wakes up waits there, or goes to
    an idle core, where the machine `moves` it: to that part of all. (A virtual machine rarely does: there an idle core
    looks like one that is not to be had.) With every tick a core goes on to the next who waits for it, if the one that
    has it has had it for `SLICE_S`.

    An idle core takes over one who waits for another, sometimes: when it has just become idle, and with a tick, but
    rarely one that ran a moment ago. So two who have a core in turns often stay there, beside an idle one, until one of
    them has nothing more to do.

    One that has a core advances at the speed

        1 / (1 + crowding (busy cores - 1))

    `crowding` is what busy cores take from each other: memory, caches, clock rate.
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
        """So many seconds of work for a process, if it were alone; after what it has to do already."""
        self._advance()
        self._add(amount_s, then, who)
        self._set_alarm()

    def alongside(self, start_s: float, amount_s: float, who: Hashable) -> float:
        """Work that a process does by itself from a moment on, after what it has to do already.

        Returns how long that takes beside what others have to do now.
        """
        self._advance()
        process = self._add(amount_s, nothing, who)
        self._set_alarm()
        return max(0.0, self._done_at(process) - start_s)

    def _add(self, amount_s: float, then: Do, who: Hashable) -> CoreProcess:
        process = self.processes.setdefault(who, CoreProcess())
        process.pieces.append((amount_s, then))
        if process.core is None or process not in process.core.queue:
            self._wake(process)
        return process

    def _wake(self, process: CoreProcess) -> None:
        process.core = core = self._core_for(process)
        if not core.queue and self.wake_s:
            process.pieces.appendleft((self.wake_s, nothing))
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
        """The next has it now."""
        core.queue[0].ran_at = core.since = self.clock.now
        core.queue.rotate(-1)

    def _done_at(self, process: CoreProcess) -> float:
        """When all of its work is done, if nothing else comes."""
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
            if core.queue and core.queue[0].pieces:
                left_s, then = core.queue[0].pieces[0]
                core.queue[0].pieces[0] = (left_s - done_s, then)

    def _set_alarm(self) -> None:
        self.alarm += 1
        number, speed, now = self.alarm, self._speed(), self.clock.now
        moments = []
        for core in self.cores:
            if core.queue and core.queue[0].pieces:
                moments.append(now + max(0.0, core.queue[0].pieces[0][0]) / speed)
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
        """A piece is done, or a turn is over."""
        if not core.queue:
            return
        first = core.queue[0]
        if first.pieces and first.pieces[0][0] <= ROUNDING_S:
            _, then = first.pieces.popleft()
            then()  # it may have more to do now, and somebody else may have taken the core
        if not first.pieces:
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
        """Is a core idle while somebody waits for another?"""
        sizes = [len(core.queue) for core in self.cores]
        return min(sizes) == 0 and max(sizes) > 1

    def _last(self) -> CoreProcess:
        """Of all who wait for the core with the longest queue."""
        return max(self.cores, key=lambda core: len(core.queue)).queue[-1]

    def _take_over(self) -> None:
        process = self._last()
        assert process.core is not None
        process.core.queue.remove(process)
        process.core = next(core for core in self.cores if not core.queue)
        process.core.queue.append(process)
        process.core.since = self.clock.now


def _tick_after(moment_s: float, now_s: float) -> float:
    """The first tick from a moment on that is still to come."""
    tick = ceil(moment_s / TICK_S - 1e-9)
    while tick * TICK_S <= now_s + ROUNDING_S:
        tick += 1
    return tick * TICK_S


def _is_tick(moment_s: float) -> bool:
    return abs(moment_s - round(moment_s / TICK_S) * TICK_S) <= ROUNDING_S


def nothing() -> None:
    """Nobody waits for it."""


class OwnCore:
    """A core for everyone: work takes as long as it is."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def work(self, amount_s: float, then: Do, who: Hashable) -> None:
        self.clock.at(self.clock.now + amount_s, then)

    def alongside(self, start_s: float, amount_s: float, who: Hashable) -> float:
        return amount_s
