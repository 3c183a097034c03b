"""The event loop on which a worker's computing thread waits for its sockets, and for messages of other threads."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable


class EventLoop:
    """Callbacks always run on the thread that waits, so nothing behind them needs a lock."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.posted: deque[Callable[[], None]] = deque()
        self.rung = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self.bell, self._run_posted)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.callbacks[fd] = callback
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self.callbacks.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def post(self, callback: Callable[[], None]) -> None:
        """From any thread: have this called by the thread that waits."""
        self.posted.append(callback)
        if not self.rung:  # one ring for all that is posted until it is heard
            self.rung = True
            os.eventfd_write(self.bell, 1)

    def _run_posted(self) -> None:
        os.eventfd_read(self.bell)
        self.rung = False  # before looking: what is posted from now on rings again
        try:
            while self.posted:
                self.posted.popleft()()
        finally:
            if self.posted and not self.rung:  # one has raised: the others are for the next to wait
                self.rung = True
                os.eventfd_write(self.bell, 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something has happened and deal with it; False: nothing came in time."""
        ready = self.epoll.poll(timeout_s)
        for fd, _ in ready:
            if fd in self.callbacks:  # one before it may have had it removed
                self.callbacks[fd]()
        return bool(ready)
