"""A run's directory: its configuration, events and model. Two runs never share one."""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rainband.options import OptionError, opt
from rainband.protocol.events import AnyEvent, Progress, RunEnded
from rainband.runtimes.config import RunConfig
from rainband.views.sinks import SafeSink
from rainband.views.sinks.sqlite import Sqlite
from rainband.views.training_time import TrainingTime

log = logging.getLogger("rainband")

MAX_LINES = 20  # shown of the output between two checks: the last ones; the rest is in output.log
CHUNK_BYTES = 1 << 20  # read at one check; the rest at the next one
MAX_LINE_CHARS = 500


def new_directory(root: Path, task: str, strategy: str) -> Path:
    """Make a new directory named after the time, the task and the strategy, with a number if that name exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{_plain(task)}-{_plain(strategy)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = root / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise OptionError(f"{opt('runs', root)}: {error.strerror}. Use a folder that can be written to.") from None
    raise OptionError(
        f"{opt('runs', root)}: too many runs were started there in this second. Wait, or use another folder."
    )


@contextmanager
def removed_if_refused(directory: Path) -> Iterator[None]:
    """Remove a new directory if an error occurs inside before anything is written to it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty
            directory.rmdir()
        raise


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.rpartition(":")[2])


def calendar_time() -> str:
    """Return the time now in UTC, to the millisecond; such times sort as text."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def write_config(directory: Path, config: RunConfig) -> None:
    """Write config.json, which is enough to repeat the run."""
    data = msgspec.json.encode(config)
    (directory / "config.json").write_bytes(msgspec.json.format(data, indent=2) + b"\n")


def read_config(path: Path) -> RunConfig:
    """Read the configuration of an earlier run from its config.json or its directory."""
    path = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Use the config.json of a run.") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not the configuration of a run: {error}.") from None


class EventLog:
    """Writes events as lines of JSON. Each line is written at once, so the file is readable after a crash.

    The file is locked while the run lasts. The kernel releases the lock when the process ends in any way, so a
    reader can distinguish a run in progress from one that was killed. Lines for which the disk has no room are left
    out: that does not end the run.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.file = (directory / "events.jsonl").open("xb", buffering=0)
        except FileExistsError:
            raise ValueError(f"{directory} already holds a run: use another directory.") from None
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.end = 0  # of the last whole line
        self.has_complained = False
        self.encoder = msgspec.json.Encoder()
        self.training = TrainingTime()
        self.metrics = SafeSink(lambda: Sqlite(directory), log.warning)

    def write(self, event: AnyEvent) -> None:
        self.training.absorb(event)
        self._append(self.encoder.encode(event) + b"\n")
        if isinstance(event, Progress | RunEnded):
            self.metrics.write(event)

    def _append(self, line: bytes) -> None:
        """Write a line, or nothing of it."""
        why = "no room for a whole line"
        try:
            if self.file.write(line) == len(line):
                self.end += len(line)
                return
        except OSError as error:
            why = error.strerror or str(error)
        with suppress(OSError):  # the disk does not answer at all
            self.file.truncate(self.end)
            self.file.seek(self.end)
        if not self.has_complained:
            self.has_complained = True
            log.warning("events.jsonl lacks events (%s); the run continues.", why)

    def close(self) -> None:
        self.metrics.close()
        self.file.close()


class OutputLog:
    """The output of a run's processes, in output.log, so that it does not disturb the progress view."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "output.log"
        self.file = self.path.open("ab+", buffering=0)
        self.read_to = 0
        self.rest = b""  # of a line without its end

    def new_lines(self, to_the_end: bool = False) -> tuple[list[str], int]:
        """Return the last whole lines since the last call, and how many lines before them are left out."""
        data = self.rest + self._unread(to_the_end)
        self.read_to += len(data) - len(self.rest)
        whole, newline, self.rest = data.rpartition(b"\n")
        if to_the_end or len(self.rest) > MAX_LINE_CHARS:
            whole, self.rest = whole + newline + self.rest, b""
        lines = [line for line in whole.decode(errors="replace").splitlines() if line.strip()]
        # The last ones: a traceback ends with the error.
        return [line[:MAX_LINE_CHARS] for line in lines[-MAX_LINES:]], max(0, len(lines) - MAX_LINES)

    def _unread(self, to_the_end: bool) -> bytes:
        data = chunk = os.pread(self.file.fileno(), CHUNK_BYTES, self.read_to)
        while to_the_end and chunk:
            chunk = os.pread(self.file.fileno(), CHUNK_BYTES, self.read_to + len(data))
            data += chunk
        return data

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        empty = os.fstat(self.file.fileno()).st_size == 0
        self.file.close()
        if empty:
            self.path.unlink(missing_ok=True)
