"""Watch a run: its events go to the view that fits the place, and to sinks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TextIO

from rainband.protocol.events import AnyEvent
from rainband.views.history import RunSoFar
from rainband.views.sinks import SafeSink, Sink


class View(Protocol):
    """Shows events to people."""

    so_far: RunSoFar

    def __call__(self, event: AnyEvent) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class RunWatch:
    """Used with `with`; whatever happens inside, the terminal is as it was afterwards."""

    def __init__(self, stream: TextIO, verbose: bool = False, sinks: Sequence[Callable[[], Sink]] = ()) -> None:
        self.stream = stream
        self.verbose = verbose
        self.sinks = [SafeSink(open_sink, self.say) for open_sink in sinks]
        self.view: View | None = None
        self.blind = False
        self.handler = _Records(self.say)

    def __enter__(self) -> RunWatch:
        logger = logging.getLogger("rainband")
        self.before = logger.level, logger.propagate
        logger.setLevel(logging.DEBUG if self.verbose else logging.WARNING)
        logger.propagate = False
        logger.addHandler(self.handler)
        return self

    def __call__(self, event: AnyEvent) -> None:
        for sink in self.sinks:
            sink.write(event)
        self._show(lambda view: view(event))

    def say(self, line: str) -> None:
        self._show(lambda view: view.say(line))

    @property
    def so_far(self) -> RunSoFar:
        return self.view.so_far if self.view else RunSoFar()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()
        if self.view is not None:
            self._show(lambda view: view.close())
        logger = logging.getLogger("rainband")
        logger.removeHandler(self.handler)
        level, logger.propagate = self.before
        logger.setLevel(level)

    def _show(self, do: Callable[[View], None]) -> None:
        """A terminal that was closed, or a pipe that nobody reads, must not end the training."""
        if self.blind:
            return
        try:
            if self.view is None:
                self.view = open_view(self.stream, self.verbose)
            do(self.view)
        except OSError:
            self.blind = True


def open_view(stream: TextIO, verbose: bool) -> View:
    if is_terminal(stream):
        from rainband.views.progress import LiveView

        return LiveView(stream, verbose)
    from rainband.views.plain_progress import PlainView

    return PlainView(stream, verbose)


def is_terminal(stream: TextIO) -> bool:
    """Whether lines can be drawn anew in place."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class _Records(logging.Handler):
    """Log records become lines of the view."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")
