"""How long it takes until a process that gets a message runs, and where it does: measured with a second process.

On the core of who sent the message it begins as soon as it may; an idle core has to be woken first. Linux puts who
wakes up on an idle core rather than behind somebody, but not everywhere: to many virtual machines a core that is idle
looks like one that the host has taken away.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rainband.runtimes.processes.zygote import Zygote

WAKES = 200
BUSY_S = 0.0005  # so long who wakes another goes on afterwards, as a worker does that has pushed
_MOMENT = struct.Struct("<d")


class WakeupLatency(NamedTuple):
    wake_s: float  # until an idle core begins with who wakes up
    moves: float  # so often who wakes up goes to an idle core, where its own is taken


def measure_waking(zygote: Zygote) -> WakeupLatency:
    """By processes that run where they are told to."""
    cores = sorted(os.sched_getaffinity(0))
    here, there = cores[0], cores[-1]
    if here == there:
        return WakeupLatency(0.0, 0.0)
    with pinned(here):
        return WakeupLatency(max(0.0, _wakes_after(zygote, there) - _wakes_after(zygote, here)), _moves(zygote, here))


@contextmanager
def pinned(core: int) -> Iterator[None]:
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


def _wakes_after(zygote: Zygote, core: int) -> float:
    """Seconds from a message to a process there until it has it."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            zygote.spawn(
                "rainband.record.wakeup_latency:echo_main", b"%d" % core, "rainband echo", [theirs.fileno()], 1
            )
        seconds: list[float] = []
        for _ in range(WAKES):
            _be_busy()
            began = time.perf_counter()  # the same clock in all processes
            ours.sendall(b"!")
            seconds.append(_MOMENT.unpack(read_all(ours.fileno(), _MOMENT.size))[0] - began)
        return median(seconds)


def _moves(zygote: Zygote, home: int) -> float:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            zygote.spawn(
                "rainband.record.wakeup_latency:sleeper_main", b"%d" % home, "rainband sleeper", [theirs.fileno()], 1
            )
        moved = 0
        for _ in range(WAKES):
            ours.sendall(b"!")
            _be_busy()
            moved += read_all(ours.fileno(), 1) != b"="
        return moved / WAKES


def read_all(fd: int, length: int) -> bytes:
    """What a measuring process answers; it may have ended instead."""
    data = b""
    while len(data) < length:
        more = os.read(fd, length - len(data))
        if not more:
            raise RuntimeError("a measuring process ended without a result; what it printed above says why.")
        data += more
    return data


def _be_busy() -> None:
    until = time.perf_counter() + BUSY_S
    while time.perf_counter() < until:
        pass


def echo_main(job: bytes, fds: list[int]) -> None:
    """Says when it woke up, on the core it is told."""
    os.sched_setaffinity(0, {int(job)})
    with socket.socket(fileno=fds[0]) as sock:
        while sock.recv(1):
            sock.sendall(_MOMENT.pack(time.perf_counter()))


def sleeper_main(job: bytes, fds: list[int]) -> None:
    """Goes to sleep on the core it is told, free to wake up on any; says whether it was that one."""
    home, everywhere = int(job), os.sched_getaffinity(0) | {int(job)}
    with socket.socket(fileno=fds[0]) as sock:
        while True:
            os.sched_setaffinity(0, {home})
            os.sched_setaffinity(0, everywhere)
            if not sock.recv(1):
                return
            sock.sendall(b"=" if core_here() == home else b"#")


def core_here() -> int:
    """The core on which this thread runs."""
    after_name = Path("/proc/thread-self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    return int(after_name.split()[36])
