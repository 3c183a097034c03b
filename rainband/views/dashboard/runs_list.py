"""The newest runs of a folder, each from the first and the last line of its events."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.views.history import is_locked, list_runs

MAX_RUNS = 200
MAX_LINE = 1 << 20
MAX_TEXT = 200

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list."""

    name: str
    state: str  # running, finished, stopped, failed, killed
    task: str = ""
    strategy: str = ""
    workers: int = 0
    started_at: str = ""
    seconds: float | None = None
    metrics: dict[str, float | None] = {}


def list_newest(root: Path) -> list[RunRow]:
    """Return the newest runs, the newest first."""
    return [_row(directory) for directory in list_runs(root)[:MAX_RUNS]]


def _row(directory: Path) -> RunRow:
    path = directory / "events.jsonl"
    first, last = _ends(path)
    started = first if isinstance(first, events.RunStarted) else None
    ended = last if isinstance(last, events.RunEnded) else None
    return RunRow(
        name=directory.name,
        state=ended.outcome if ended else "running" if is_locked(path) else "killed",
        task=started.task[:MAX_TEXT] if started else "",
        strategy=started.strategy[:MAX_TEXT] if started else "",
        workers=started.num_workers if started else 0,
        started_at=started.started_at if started else "",
        seconds=ended.seconds if ended else None,
        metrics=dict(list(ended.metrics.items())[:4]) if ended else {},
    )


def _ends(path: Path) -> tuple[AnyEvent | None, AnyEvent | None]:
    """Return the first and the last event."""
    try:
        with path.open("rb") as file:
            first = file.readline(MAX_LINE)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LINE))
            last = file.read(MAX_LINE).rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return None, None
    return _event(first), _event(last)


def _event(line: bytes) -> AnyEvent | None:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
