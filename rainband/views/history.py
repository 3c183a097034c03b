"""The state of a run, computed from its events: of one that runs, or of one read back from its directory."""

from __future__ import annotations

import fcntl
import math
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.views.training_time import TrainingTime

WINDOW = 6  # Progress events over which rates are averaged
MOST_LIVE = 2000  # Progress events that a live view keeps
SLOW = 0.6  # of the others' median rate; a worker below is slow
LOCK_STEP = 0.9  # lowest rate / highest rate; above, the workers wait for each other
MUCH_WAITING = 0.2  # of the time; workers that wait more are held up by another one


@dataclass(frozen=True)
class WorkerNow:
    """One worker's rate and waiting time over the last seconds."""

    index: int
    per_s: float  # samples, or steps where only those are known
    waited_s: float
    waiting: float  # the fraction of the last seconds that it spent waiting
    slow: bool
    lost: events.Lost | None  # none: it takes part


# size: one attribute for each kind of event that says what a run is like now
@dataclass
class RunSoFar:
    """The state of a run after some of its events."""

    at_s: float = 0.0
    phase: str = "forming"
    stopping: str = ""  # why it ends early
    started: events.RunStarted | None = None
    plan: events.PlanMade | None = None
    predicted: events.PipelinePredicted | None = None  # of a model-parallel run
    joined: set[str] = field(default_factory=set)
    linked: dict[int, events.Linked] = field(default_factory=dict)  # worker -> its machine and its transports
    tunneled: dict[tuple[int, int], int] = field(default_factory=dict)  # two workers -> bytes through the run's machine
    lost: dict[str, events.Lost] = field(default_factory=dict)  # of nodes that take no part now
    num_lost: int = 0  # events of that kind so far
    copied: set[int] = field(default_factory=set)  # servers that have a copy now
    reassigned: int = 0
    training: TrainingTime = field(default_factory=TrainingTime)
    progress: list[events.Progress] = field(default_factory=list)
    most_progress: int | None = None  # Progress events to keep; None: all
    num_progress: int = 0
    every: int = 1  # of the Progress events before the last ones, this fraction is kept: 1 / every
    last_iteration: events.IterationDone | None = None  # of a full-batch strategy
    restored_samples: int = 0  # of the checkpoint from which the run continues
    target: events.TargetReached | None = None
    error: events.UserError | None = None
    ended: events.RunEnded | None = None

    @classmethod
    def from_events(cls, events: Iterable[AnyEvent]) -> RunSoFar:
        """Return the state after these events, which begin with the run's first."""
        so_far = cls()
        for event in events:
            so_far.absorb(event)
        return so_far

    def absorb(self, event: AnyEvent) -> None:
        """Update the state by the next event."""
        self.at_s = max(self.at_s, event.at_s)
        self.training.absorb(event)
        match event:
            case events.RunStarted():
                self.started = event
            case events.PlanMade():
                self.plan = event
            case events.Restored(repeated=None):
                self.restored_samples = event.samples
            case events.PipelinePredicted():
                self.predicted = event
            case events.PhaseChanged():
                self.phase, self.stopping = event.phase, event.reason
            case events.Joined():
                self.joined.add(event.node)
                self.lost.pop(event.node, None)
            case events.Linked():
                self.linked[event.worker] = event
            case events.Tunneled():
                self.tunneled[event.workers] = self.tunneled.get(event.workers, 0) + event.num_bytes
            case events.Lost():
                self._lose(event)
            case events.ServerCopied():
                self.copied.add(event.server)
            case events.ServerReplaced():
                self.copied.discard(event.server)
                self.lost.pop(f"server {event.server}", None)
            case events.Returned():
                self.lost.pop(event.node, None)
            case events.BatchesReassigned():
                self.reassigned += 1
            case events.Progress():
                self.progress.append(event)
                self.num_progress += 1
                if self.most_progress is not None:
                    self._thin_progress(self.most_progress)
            case events.IterationDone():
                self.last_iteration = event
            case events.TargetReached():
                self.target = event
            case events.UserError():
                self.error = self.error or event
            case events.RunEnded():
                self.ended = event
            case events.ProcessOutput():
                pass

    def _lose(self, lost: events.Lost) -> None:
        self.num_lost += 1
        if lost.node.startswith("copy of server "):
            self.copied.discard(int(lost.node.rpartition(" ")[2]))
        else:
            self.lost[lost.node] = lost

    @property
    def degraded(self) -> list[int]:
        """Return the servers whose loss would end the run, although it was started with copies."""
        if self.started is None or self.started.copies == 1 or self.phase != "running":
            return []
        return [server for server in range(self.started.num_servers) if server not in self.copied]

    def _thin_progress(self, most: int) -> None:
        """Keep the last events, and a fraction of the earlier ones: enough for a curve, in constant memory."""
        if len(self.progress) > WINDOW and (self.num_progress - WINDOW - 1) % self.every:
            del self.progress[-WINDOW - 1]
        if len(self.progress) > most:
            self.progress[:-WINDOW] = self.progress[:-WINDOW:2]
            self.every *= 2

    @property
    def last(self) -> events.Progress | None:
        return self.progress[-1] if self.progress else None

    @property
    def samples(self) -> int:
        """Return the number of samples in the whole run, or 0 while it is unknown."""
        if self.plan is not None:
            return self.plan.num_samples * self.plan.epochs
        return self.last.samples if self.last else 0

    @property
    def samples_done(self) -> int:
        if self.ended is not None:
            return self.ended.samples
        return self.last.samples_done if self.last else 0

    @property
    def loss(self) -> float | None:
        """Return the last known training loss."""
        if self.last_iteration is not None:
            return self.last_iteration.loss
        return next((p.loss for p in reversed(self.progress) if p.loss is not None), None)

    @property
    def is_virtual(self) -> bool:
        """Return True if its seconds are those of a simulation, which has no calendar time."""
        return self.started is not None and not self.started.started_at

    @property
    def unit(self) -> str:
        """Return what is counted: "step" for custom training loops with their own data loaders, else "sample"."""
        steps = self.plan is None and self.last is not None and self.last.batches_done and not self.last.samples_done
        return "step" if steps else "sample"

    @property
    def done(self) -> int:
        """Return the number of samples done, or of steps where only those are known."""
        if self.unit == "sample" or self.last is None:
            return self.samples_done
        accounting: Mapping[str, Any] = self.ended.accounting if self.ended else {}
        return int(accounting.get("untracked_pushes", self.last.batches_done))

    @property
    def per_s(self) -> float:
        """Return the samples or steps per second of all workers together, over the last few seconds."""
        steps = self.unit == "step"
        points = [(p.at_s, p.batches_done if steps else p.samples_done) for p in self.progress[-WINDOW:]]
        if len(points) < 3 and self.training.began_s is not None:
            points.insert(
                0, (self.training.began_s, self.restored_samples)
            )  # one or two reports alone do not give a rate
        if len(points) < 2:
            return 0.0
        (first_s, before), (last_s, now) = points[0], points[-1]
        return (now - before) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Return the seconds left at the rate of the last few seconds; None while the rate is unknown."""
        rate = self.per_s
        return (self.samples - self.samples_done) / rate if rate > 0 and self.samples else None

    def workers(self, only: Collection[int] | None = None) -> list[WorkerNow]:
        """Return every worker that has joined so far, by number; or only these."""
        if self.last is None:
            return []
        rates = self.last.steps_per_s if self.unit == "step" else self.last.samples_per_s
        shares = self._waiting_shares()
        slow = self._slow(rates, shares)
        known = set(only or ())
        if only is None:
            known = {int(node.split()[1]) for node in self.joined if node.startswith("worker ")} | set(rates)
        return [
            WorkerNow(
                index=i,
                per_s=rates.get(i, 0.0),
                waited_s=self.last.waited_s.get(i, 0.0),
                waiting=shares.get(i, 0.0),
                slow=i in slow,
                lost=self.lost.get(f"worker {i}"),
            )
            for i in sorted(known)
        ]

    def _waiting_shares(self) -> dict[int, float]:
        first, last = self.progress[-WINDOW:][0], self.progress[-1]
        span_s = last.at_s - first.at_s
        if span_s <= 0:
            return {}
        waited = {i: waited_s - first.waited_s.get(i, 0.0) for i, waited_s in last.waited_s.items()}
        return {i: min(1.0, max(0.0, waited_s / span_s)) for i, waited_s in waited.items()}

    def _slow(self, rates: dict[int, float], shares: dict[int, float]) -> set[int]:
        """Return the workers that hold the others up or are much slower; none in the first seconds."""
        active = {i: rate for i, rate in rates.items() if f"worker {i}" not in self.lost}
        if len(active) < 2 or len(self.progress) < 3 or self.phase != "running":
            return set()
        in_step = min(active.values()) > LOCK_STEP * max(active.values())
        all_rates, all_shares = sorted(active.values()), sorted(shares.get(i, 0.0) for i in active)
        slow = set()
        for i, rate in active.items():
            share = shares.get(i, 0.0)
            others_wait = _middle_without(share, all_shares)
            waited_for = in_step and others_wait > MUCH_WAITING and share < others_wait / 3
            if waited_for or rate < SLOW * _middle_without(rate, all_rates):
                slow.add(i)
        return slow


def _middle_without(value: float, ordered: list[float]) -> float:
    """Return the median of the other values, of which there is at least one."""
    index, others = bisect_left(ordered, value), len(ordered) - 1
    low, high = (others - 1) // 2, others // 2
    return (ordered[low + (low >= index)] + ordered[high + (high >= index)]) / 2


@dataclass(frozen=True)
class PastRun:
    """The contents of a run's directory; a killed run has no end, and its last line may be truncated."""

    directory: Path
    config: dict[str, Any]  # {} where it cannot be read
    events: list[AnyEvent]
    unreadable: int  # lines of events.jsonl that are truncated or of another version
    alive: bool  # its launcher still runs

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def so_far(self) -> RunSoFar:
        return RunSoFar.from_events(self.events)

    @property
    def state(self) -> str:
        """Return running, finished, stopped or failed; killed if it ended without its last event."""
        if self.so_far.ended is not None:
            return self.so_far.ended.outcome
        return "running" if self.alive else "killed"

    @property
    def model(self) -> Path | None:
        path = self.directory / "model.safetensors"
        return path if path.is_file() else None


def read_run(directory: Path) -> PastRun:
    """Read a run's directory, complete or not."""
    events, unreadable = _read_events(directory / "events.jsonl")
    return PastRun(
        directory=directory,
        config=_read_config(directory / "config.json"),
        events=events,
        unreadable=unreadable,
        alive=is_locked(directory / "events.jsonl"),
    )


def list_runs(root: Path) -> list[Path]:
    """Return the directories of runs under `root`, newest first."""
    if not root.is_dir():
        return []
    runs = [path for path in root.iterdir() if is_run(path)]
    return sorted(runs, key=lambda path: (_started_at(path), path.name), reverse=True)


def is_run(path: Path) -> bool:
    """Return True if the directory is that of a run; a name that is too long or has a zero byte is none."""
    return os.path.isfile(path / "config.json") or os.path.isfile(path / "events.jsonl")


def find_run(root: Path, word: str) -> Path:
    """Find a run by its directory, its name, the beginning of its name, or `last`."""
    runs = list_runs(root)
    names = [path.name for path in runs]
    if word in names:
        return root / word
    if is_run(Path(word)):
        return Path(word)
    if not runs:
        raise ValueError(
            f"there are no runs in {root}: start one (rainband train digits), or give their directory with --runs."
        )
    if word == "last":
        return runs[0]
    matching = [name for name in names if name.startswith(word)]
    if len(matching) == 1:
        return root / matching[0]
    if matching:
        raise ValueError(f"{word} is the beginning of {len(matching)} runs ({_some(matching)}): type more of it.")
    raise ValueError(f"no run named {word} in {root}: choose from {_some(names)}, or type last.")


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def _read_events(path: Path) -> tuple[list[AnyEvent], int]:
    events, unreadable = [], 0
    for line in _lines(path):
        try:
            events.append(_decoder.decode(line))
        except msgspec.MsgspecError:
            unreadable += 1
    return events, unreadable


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError:
        return


def _started_at(directory: Path) -> str:
    """Return the start time in its first event, or else the time of its oldest file."""
    for line in _lines(directory / "events.jsonl"):
        try:
            event = _decoder.decode(line)
        except msgspec.MsgspecError:
            break
        if isinstance(event, events.RunStarted) and event.started_at:
            return event.started_at
        break
    files = [directory / "config.json", directory / "events.jsonl"]
    oldest_s = min(file.stat().st_mtime for file in files if file.is_file())
    return datetime.fromtimestamp(oldest_s, UTC).isoformat(timespec="milliseconds")


def is_locked(path: Path) -> bool:
    """Return True while the run's launcher lives: it holds a lock, which the kernel releases when it ends."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def loss_curve(progress: Iterable[events.Progress], over_time: bool = False) -> list[tuple[float, float]]:
    """Return pairs of samples done (or seconds) and loss, where the loss is known and finite."""
    known = [(p, p.loss) for p in progress if p.loss is not None and math.isfinite(p.loss)]
    return [(p.at_s if over_time else p.samples_done, loss) for p, loss in known]
