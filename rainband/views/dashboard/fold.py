"""A run, folded into what its page needs: constant size, whatever its length and its number of workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.views.dashboard.log_text import one_line
from rainband.views.dashboard.series import Column, Curve, Point, Shares, Strips
from rainband.views.history import MOST_LIVE, RunSoFar, is_locked

SLICE_BYTES = 1 << 20  # of events.jsonl, read at once
MAX_LINE_BYTES = 64 << 20  # a longer line cannot be an event
MAX_LOG, MAX_LOG_TEXT = 100, 240
MAX_MARKS = 60
MARKED = (events.Lost, events.Returned, events.GuardActed, events.UpdateSizeChanged, events.UserError, events.Restored)
REGULAR = (events.Progress, events.NodesMeasured)  # not in the log

_decode = msgspec.json.Decoder(AnyEvent).decode


class LogLine(NamedTuple):
    """An event in the log; `offset` is its place in events.jsonl."""

    offset: int
    at_s: float
    kind: str
    text: str


class Mark(NamedTuple):
    """An event that the curves show."""

    at_s: float
    kind: str
    text: str


class Folded:
    """The state of a run after some of its events, in constant size."""

    def __init__(self) -> None:
        self.so_far = RunSoFar(most_progress=MOST_LIVE // 100)
        self.curve, self.strips = Curve(), Strips()
        self.nodes: events.NodesMeasured | None = None
        self.log: deque[LogLine] = deque(maxlen=MAX_LOG)
        self.marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        self.evaluated: dict[str, float] = {}  # the newest metrics
        self.num_events = 0

    def absorb(self, event: AnyEvent, offset: int = 0) -> None:
        """Update the state by the next event, which begins at this byte of events.jsonl."""
        self.num_events += 1
        self.so_far.absorb(event)
        if isinstance(event, events.Progress):
            self._add_point(event)
        elif isinstance(event, events.NodesMeasured):
            self._add_column(event)
        else:
            line = one_line(event)[:MAX_LOG_TEXT]
            self.log.append(LogLine(offset, event.at_s, type(event).__name__, line))
            if isinstance(event, MARKED):
                self.marks.append(Mark(event.at_s, type(event).__name__, line))
        if isinstance(event, events.RunEnded):
            self._add_last_metrics(event)

    @property
    def metric(self) -> str:
        """Return the name of the metric that is drawn: the task's first besides its loss."""
        return main_metric(self.evaluated)

    def updates_of(self, progress: events.Progress) -> float:
        """Return the updates so far: those of the servers to each block, or those that the workers made."""
        plan = self.so_far.plan
        if self.nodes is None or not any(self.nodes.updates) or plan is None:
            return progress.batches_done
        return sum(self.nodes.updates) / max(1, plan.num_blocks)

    def _add_point(self, progress: events.Progress) -> None:
        new = bool(progress.metrics) and progress.metrics != self.evaluated
        self.evaluated = dict(progress.metrics) or self.evaluated
        rates = progress.steps_per_s if self.so_far.unit == "step" else progress.samples_per_s
        self.curve.add(
            Point(
                at_s=progress.at_s,
                samples=progress.samples_done or progress.batches_done,
                updates=self.updates_of(progress),
                loss=finite(progress.loss),
                metric=finite(progress.metrics.get(self.metric)) if new else None,
                staleness_mean=progress.staleness_mean,
                staleness_max=progress.staleness_max,
                per_s=sum(rates.values()),
            )
        )

    def _add_last_metrics(self, ended: events.RunEnded) -> None:
        """Put the metrics of the trained model at the end of the curve."""
        self.evaluated = {name: value for name, value in ended.metrics.items() if value is not None} or self.evaluated
        if self.curve.points and (last := finite(ended.metrics.get(self.metric))) is not None:
            self.curve.points[-1] = self.curve.points[-1]._replace(metric=last)

    def _add_column(self, nodes: events.NodesMeasured) -> None:
        before, began_s, last = self.nodes, self.so_far.training.began_s, self.so_far.last
        self.nodes = nodes
        if last is not None and self.curve.points:  # it comes after the Progress event of this moment
            self.curve.points[-1] = self.curve.points[-1]._replace(updates=self.updates_of(last))
        old = totals(before) if before else {}
        begin_s = before.at_s if before else began_s if began_s is not None else 0.0
        if nodes.at_s <= begin_s:
            return
        zero = Shares()
        shares = {
            worker: new.since(old.get(worker, zero))
            for worker, new in totals(nodes).items()
            if (before is None or worker in old) and not self._is_gone(worker, new, old.get(worker, zero))
        }
        self.strips.add(Column(begin_s, nodes.at_s, shares))

    def _is_gone(self, worker: int, now: Shares, before: Shares) -> bool:
        """Return True for a lost worker that has done nothing any more: it neither computes nor waits."""
        return now == before and f"worker {worker}" in self.so_far.lost


def totals(nodes: events.NodesMeasured) -> dict[int, Shares]:
    """Return the work of each worker so far."""
    return {
        worker: Shares(nodes.missed[k], sum(nodes.staleness[k]), nodes.waited_s[k], nodes.samples[k])
        for k, worker in enumerate(nodes.workers)
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def main_metric(names: Iterable[str]) -> str:
    """Return the first metric besides the loss, or the loss if it is the only one; "": there is none."""
    names = list(names)
    return next((name for name in names if name != "loss"), names[0] if names else "")


class RunFile:
    """The events of a run's directory, read in slices from where the last one ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "events.jsonl"
        self.folded = Folded()
        self.offset = 0
        self.slice_bytes = SLICE_BYTES
        self.unreadable = 0

    def read_slice(self) -> bool:
        """Read some more lines; return True if there may be others."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.slice_bytes)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1  # a line may be incomplete
        full = len(data) == self.slice_bytes
        if full and not end:
            self.slice_bytes *= 2
            return self.slice_bytes <= MAX_LINE_BYTES
        for line in data[:end].split(b"\n")[:-1]:
            self._absorb_line(line)
            self.offset += len(line) + 1
        return full

    def _absorb_line(self, line: bytes) -> None:
        try:
            event = _decode(line)
        except msgspec.MsgspecError:
            self.unreadable += bool(line.strip())
        else:
            self.folded.absorb(event, self.offset)

    def read(self) -> Folded:
        """Read all that is there."""
        while self.read_slice():
            pass
        return self.folded

    @property
    def share_read(self) -> float:
        try:
            size = self.path.stat().st_size
        except OSError:
            return 1.0
        return min(1.0, self.offset / size) if size else 1.0

    @property
    def state(self) -> str:
        """Return starting, running, finished, stopped or failed; killed if it ended without its last event."""
        if self.folded.so_far.ended is not None:
            return self.folded.so_far.ended.outcome
        if is_locked(self.path):
            return "running"
        return "killed" if self.path.exists() else "starting"

    @property
    def is_over(self) -> bool:
        return self.state not in ("starting", "running")


def log_before(path: Path, offset: int, number: int) -> list[LogLine]:
    """Return the last lines of the log that begin before this byte of events.jsonl."""
    found: list[LogLine] = []
    with path.open("rb") as file:
        end, rest = offset, b""
        while end > 0 and len(found) < number:
            begin = max(0, end - SLICE_BYTES)
            file.seek(begin)
            data = file.read(end - begin) + rest
            head, newline, body = data.partition(b"\n") if begin else (b"", b"", data)
            rest = head + newline
            if len(rest) > MAX_LINE_BYTES:
                break
            lines = body.split(b"\n")
            at = begin + len(rest) + len(body)
            found += islice(_log_lines_backward(lines, at), number - len(found))
            end = begin
    return found[::-1]


def _log_lines_backward(lines: list[bytes], end: int) -> Iterable[LogLine]:
    """Yield the log lines among these lines of events.jsonl, the last one first; `end`: where the last one ends."""
    for line in reversed(lines):
        begin = end - len(line)
        end = begin - 1
        try:
            event = _decode(line)
        except msgspec.MsgspecError:
            continue
        if not isinstance(event, REGULAR):
            yield LogLine(begin, event.at_s, type(event).__name__, one_line(event)[:MAX_LOG_TEXT])
