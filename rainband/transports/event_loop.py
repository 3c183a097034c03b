"""The event loop on which a worker's computing thread waits for its sockets, and for messages of other threads."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    """An open file or socket."""

    def fileno(self) -> int: ...


def readable_within(file: int | HasFileno, timeout_s: float) -> bool:
    """Wait until a file can be read, has ended or is broken; return False if none of it happens in time.

    It uses poll, because select() raises for a file descriptor above 1023.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


class EventLoop:
    """Calls back on the thread that waits, so callbacks need no locks."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.posted: deque[Callable[[], None]] = deque()
        self.waking = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self.wake_fd, self._call_posted)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.callbacks[fd] = callback
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self.callbacks.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def post(self, callback: Callable[[], None]) -> None:
        """Have a function called by the thread that waits; may be called from any thread."""
        self.posted.append(callback)
        if not self.waking:  # one wake-up for all functions posted until it is handled
            self.waking = True
            os.eventfd_write(self.wake_fd, 1)

    def _call_posted(self) -> None:
        os.eventfd_read(self.wake_fd)
        self.waking = False  # first: functions posted from now on cause another wake-up
        try:
            while self.posted:
                self.posted.popleft()()
        finally:
            if self.posted and not self.waking:  # one has raised: the next wait calls the others
                self.waking = True
                os.eventfd_write(self.wake_fd, 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for events and handle them; return False if there was none in time."""
        ready = self.epoll.poll(timeout_s)
        for fd, _ in ready:
            if fd in self.callbacks:  # an earlier callback may have removed it
                self.callbacks[fd]()
        return bool(ready)
