"""Runs functions beside the thread that serves messages, so that a slow disk delays nothing."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rainband.transports.event_loop import readable_within

Task = Callable[[], Callable[[], None]]  # returns what its owner's thread is to do when it is done


def _raise(error: Exception) -> None:
    raise error


class Background(Protocol):
    """Runs tasks one after the other."""

    pending: int  # tasks whose end was not noticed yet

    def submit(self, task: Task) -> None: ...

    def settle(self) -> None:
        """Do what the finished tasks have returned, on the thread that calls this."""


class AtOnce:
    """Runs each task when it is submitted, for the simulator, whose time is virtual."""

    pending = 0

    def submit(self, task: Task) -> None:
        task()()

    def settle(self) -> None:
        """Do nothing: all is done."""


class BackgroundThread:
    """Runs tasks on one thread. Its `fd` is readable when there is something to settle."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pending = 0
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        self.pending += 1
        self._tasks.put(task)
        if self._thread is None:  # a daemon: a process that ends does not wait for a disk
            self._thread = threading.Thread(target=self._run, name="rainband checkpoints", daemon=True)
            self._thread.start()

    def _run(self) -> Any:
        while True:
            task = self._tasks.get()
            try:
                finished = task()
            except Exception as error:  # its owner's thread raises it: a task that never ends would be waited for
                finished = partial(_raise, error)
            self._finished.put(finished)
            os.eventfd_write(self.fd, 1)

    def finish(self) -> None:
        """Wait until all tasks are done, and settle them."""
        while self.pending:
            self.wait(1.0)

    def wait(self, timeout_s: float) -> None:
        """Wait until a task is done, and settle it."""
        readable_within(self.fd, timeout_s)
        self.settle()

    def settle(self) -> None:
        if not self.pending:
            return
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        try:
            while not self._finished.empty():
                self.pending -= 1
                self._finished.get()()
        finally:
            if not self._finished.empty():  # one has raised: the others are settled next time
                os.eventfd_write(self.fd, 1)
