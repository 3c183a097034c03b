"""Ctrl-C, SIGTERM and SIGHUP, with which users and machines ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(note: Callable[[int], None]) -> Iterator[bool]:
    """Call `note` with the number of each such signal inside the block; yield False if that is impossible.

    Python delivers signals to the main thread only; in another thread the run is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: note(number)) for number in numbers}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
