"""Show a run while it runs: in place on a terminal, otherwise as lines; and pass its events to sinks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TextIO

from rainband.protocol.events import AnyEvent, PhaseChanged, PlanMade, Progress, RunStarted
from rainband.views import event_text
from rainband.views.history import MOST_LIVE, RunSoFar
from rainband.views.sinks import SafeSink, Sink

LINE_EVERY_S = 5.0  # in a log file


class View(Protocol):
    """A view shows the events of one run."""

    so_far: RunSoFar

    def __call__(self, event: AnyEvent) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """Writes a line every few seconds of the events' own time, so that a stored run gives the same lines."""

    def __init__(self, stream: TextIO, verbose: bool = False) -> None:
        self.stream, self.verbose = stream, verbose
        self.so_far = RunSoFar(most_progress=MOST_LIVE)
        self.next_line_s = 0.0

    def __call__(self, event: AnyEvent) -> None:
        self.so_far.absorb(event)
        for line in [*self._new_lines(event), *event_text.lasting_lines(event, self.so_far, self.verbose)]:
            self.say(line)

    def say(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""

    def _new_lines(self, event: AnyEvent) -> list[str]:
        match event:
            case RunStarted():
                return [event_text.headline(self.so_far), event_text.waiting_for(self.so_far)]
            case PlanMade() if not self.verbose:
                return [event_text.plan_made(event)]
            case PhaseChanged(phase="concluding"):
                return ["evaluating and saving the model ..."]
            case Progress() if event.at_s >= self.next_line_s and (
                event.samples_done < event.samples or (event.batches_done and not event.samples)
            ):
                self.next_line_s = event.at_s + LINE_EVERY_S
                return [event_text.progress_line(self.so_far)]
        return []


class RunWatch:
    """A context manager that shows events and log records, and restores the terminal and the logger."""

    def __init__(self, stream: TextIO, verbose: bool = False, sinks: Sequence[Callable[[], Sink]] = ()) -> None:
        self.stream, self.verbose = stream, verbose
        self.sinks = [SafeSink(open_sink, self.say) for open_sink in sinks]
        self.view: View | None = None
        self.closed = False
        self.handler = LogLines(self.say)

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
        """Show something, unless the terminal or pipe was closed, which must not end the training."""
        if self.closed:
            return
        try:
            if self.view is None:
                self.view = open_view(self.stream, self.verbose)
            do(self.view)
        except OSError:
            self.closed = True


def open_view(stream: TextIO, verbose: bool) -> View:
    if is_terminal(stream):
        from rainband.views.progress import LiveView

        return LiveView(stream, verbose)
    return PlainView(stream, verbose)


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream can redraw lines in place."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class LogLines(logging.Handler):
    """A logging handler that passes records to a view as lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")
