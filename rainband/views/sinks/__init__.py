"""Sinks write the events of a run in other formats than events.jsonl. A sink reads events and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rainband.protocol.events import AnyEvent

if TYPE_CHECKING:
    from rainband.options import RunOptions


class Sink(Protocol):
    """Takes every event of one run, in order."""

    def write(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


class SafeSink:
    """A sink whose failure, such as a full disk, is reported once and does not end the run."""

    def __init__(self, open_sink: Callable[[], Sink], complain: Callable[[str], None]) -> None:
        self.open_sink, self.complain = open_sink, complain
        self.sink: Sink | None = None
        self.failed = False

    def write(self, event: AnyEvent) -> None:
        self._try(lambda: self._opened().write(event))

    def close(self) -> None:
        if self.sink is not None:
            self._try(self.sink.close)

    def _opened(self) -> Sink:
        if self.sink is None:
            self.sink = self.open_sink()
        return self.sink

    def _try(self, do: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            do()
        except Exception as error:  # of any library: the training matters more
            self.failed = True
            name = type(self.sink).__name__ if self.sink is not None else "a sink"
            self.complain(f"{name} stopped writing ({type(error).__name__}: {error}); the run continues.")


def chosen_sinks(options: RunOptions) -> list[Callable[[Path], Sink]]:
    """Return the sinks that were asked for; raise if the library of one is not installed."""
    sinks: list[Callable[[Path], Sink]] = []
    if options.get("csv"):
        from rainband.views.sinks.csv import Csv

        sinks.append(Csv)
    if options.get("tensorboard"):
        from rainband.views.sinks.tensorboard import TensorBoard, check_installed

        check_installed()
        sinks.append(TensorBoard)
    if options.get("dashboard"):
        from rainband.views.sinks import dashboard

        dashboard.check_installed()
        sinks.append(dashboard.DashboardProcess)
    return sinks
