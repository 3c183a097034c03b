"""Processes that share the cores of one machine in virtual time, as Linux lets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from math import ceil

from rainband.sim.clock import VirtualClock

Do = Callable[[], None]
ROUNDING_S = 1e-12
TICK_S = 0.004  # so often the kernel looks whether another process should have the core
SLICE_S = 0.0014  # and for so long it leaves it to the one that has it
BALANCE_TICKS = 4  # so rarely an idle core looks whether somebody waits for another


class Process:
    """Somebody who has work, piece after piece."""

    def __init__(self) -> None:
        self.core: Core | None = None  # where it was last
        self.pieces: deque[tuple[float, Do]] = deque()  # seconds left, what then

    @property
    def left_s(self) -> float:
        return sum(amount_s for amount_s, _ in self.pieces)


class Core:
    """One core: the first has it, the others wait."""

    def __init__(self) -> None:
        self.queue: deque[Process] = deque()
        self.since = 0.0  # the first has it since then


class Cores:
    """So many cores for any number of processes.

    A process that wakes up goes to the core where it was before; if that is taken, to one that is idle. If none is, it
    takes its old one from a process that has had it for `SLICE_S`, or else waits there. With every tick a core goes on
    to the next who waits for it, if the one that has it has had it for `SLICE_S`. A core that is idle takes over one
    who waits for another only with every fourth tick: until then it stays idle, as seen on machines with two cores.
    One that has a core advances at the speed

        1 / (1 + crowding (busy cores - 1))

    `crowding` is what busy cores take from each other: memory, caches, clock rate.
    """

    def __init__(self, clock: VirtualClock, num_cores: int, crowding: float = 0.0) -> None:
        self.clock = clock
        self.crowding = crowding
        self.cores = [Core() for _ in range(num_cores)]
        self.processes: dict[Hashable, Process] = {}
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

    def _add(self, amount_s: float, then: Do, who: Hashable) -> Process:
        process = self.processes.setdefault(who, Process())
        process.pieces.append((amount_s, then))
        if process.core is None or process not in process.core.queue:
            self._wake(process)
        return process

    def _wake(self, process: Process) -> None:
        core = process.core
        if core is None or core.queue:
            idle = next((other for other in self.cores if not other.queue), None)
            core = idle or core or min(self.cores, key=lambda other: len(other.queue))
        process.core = core
        if core.queue and self.clock.now < core.since + SLICE_S:
            core.queue.insert(1, process)
            return
        if core.queue:
            core.queue.rotate(-1)
        core.queue.appendleft(process)
        core.since = self.clock.now

    def _done_at(self, process: Process) -> float:
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
            moments.append(_tick_after(now, now, BALANCE_TICKS))
        if moments:
            self.clock.at(min(moments), lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self.alarm:
            return
        self._advance()
        for core in self.cores:
            self._look_at(core)
        if _is_tick(self.clock.now, BALANCE_TICKS) and self._is_uneven():
            self._balance()
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
            was_first = core.queue[0] is first
            core.queue.remove(first)
            core.since = self.clock.now if was_first else core.since
        elif len(core.queue) > 1 and _is_tick(self.clock.now) and core.since + SLICE_S <= self.clock.now:
            core.queue.rotate(-1)
            core.since = self.clock.now

    def _is_uneven(self) -> bool:
        """Is a core idle while somebody waits for another?"""
        sizes = [len(core.queue) for core in self.cores]
        return min(sizes) == 0 and max(sizes) > 1

    def _balance(self) -> None:
        idle = next(core for core in self.cores if not core.queue)
        process = max(self.cores, key=lambda core: len(core.queue)).queue.pop()
        process.core = idle
        idle.queue.append(process)
        idle.since = self.clock.now


def _tick_after(moment_s: float, now_s: float, every: int = 1) -> float:
    """The first tick from a moment on that is still to come, or of every so many."""
    tick = ceil(moment_s / TICK_S / every - 1e-9)
    while tick * TICK_S * every <= now_s + ROUNDING_S:
        tick += 1
    return tick * TICK_S * every


def _is_tick(moment_s: float, every: int = 1) -> bool:
    return abs(moment_s - round(moment_s / TICK_S / every) * TICK_S * every) <= ROUNDING_S


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
