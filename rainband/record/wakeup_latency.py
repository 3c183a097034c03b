"""Measure how long a process takes to wake up when a message arrives, and how often it migrates to another core.

On the core of the sender it runs as soon as that core is free; an idle core has to wake up first. Linux prefers an idle
core for a process that wakes up, but not everywhere: in many virtual machines an idle core looks like one that the host
has taken away.
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
BUSY_S = 0.0005  # the sender stays busy afterwards, as a worker does that has pushed
_MOMENT = struct.Struct("<d")


class WakeupLatency(NamedTuple):
    wake_s: float  # until an idle core runs a process that wakes up
    moves: float  # probability that a process migrates when it wakes up, its core is busy and another is idle


def measure_wakeup(zygote: Zygote) -> WakeupLatency:
    """Measure with processes that are pinned to cores."""
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


@contextmanager
def _spawned(zygote: Zygote, what: str, core: int) -> Iterator[socket.socket]:
    """Connect to a new process that runs `echo_main` or `sleeper_main` with a core."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            entry = f"rainband.record.wakeup_latency:{what}_main"
            zygote.spawn(entry, b"%d" % core, f"rainband {what}", [theirs.fileno()], 1)
        yield ours


def _wakes_after(zygote: Zygote, core: int) -> float:
    """Return the seconds until a process on a core receives a message."""
    with _spawned(zygote, "echo", core) as ours:
        seconds: list[float] = []
        for _ in range(WAKES):
            _be_busy()
            began = time.perf_counter()  # the same clock in all processes
            ours.sendall(b"!")
            seconds.append(_MOMENT.unpack(read_all(ours.fileno(), _MOMENT.size))[0] - began)
        return median(seconds)


def _moves(zygote: Zygote, home: int) -> float:
    with _spawned(zygote, "sleeper", home) as ours:
        moved = 0
        for _ in range(WAKES):
            ours.sendall(b"!")
            _be_busy()
            moved += read_all(ours.fileno(), 1) != b"="
        return moved / WAKES


def read_all(fd: int, length: int) -> bytes:
    """Read the answer of a measuring process; raise RuntimeError if it has ended."""
    data = b""
    while len(data) < length:
        more = os.read(fd, length - len(data))
        if not more:
            raise RuntimeError("a measuring process ended without a result: see its output above.")
        data += more
    return data


def _be_busy() -> None:
    until = time.perf_counter() + BUSY_S
    while time.perf_counter() < until:
        pass


def echo_main(job: bytes, fds: list[int]) -> None:
    """Answer each message with the time of waking up, on a given core."""
    os.sched_setaffinity(0, {int(job)})
    with socket.socket(fileno=fds[0]) as sock:
        while sock.recv(1):
            sock.sendall(_MOMENT.pack(time.perf_counter()))


def sleeper_main(job: bytes, fds: list[int]) -> None:
    """Sleep on a given core, free to wake up on any; answer whether it was the same one."""
    home, everywhere = int(job), os.sched_getaffinity(0) | {int(job)}
    with socket.socket(fileno=fds[0]) as sock:
        while True:
            os.sched_setaffinity(0, {home})
            os.sched_setaffinity(0, everywhere)
            if not sock.recv(1):
                return
            sock.sendall(b"=" if core_here() == home else b"#")


def core_here() -> int:
    """Return the core on which this thread runs."""
    after_name = Path("/proc/thread-self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    return int(after_name.split()[36])
