"""The runs that run now on this machine, and their processes, as the kernel lists them.

There is no list of runs that could be out of date: a run is a process that writes an events.jsonl, and workers and
servers are its descendants, known by their titles.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

EVENTS = "events.jsonl"
TITLE = re.compile(r"rainband ((?:worker|server) \d+)")
PROC = Path("/proc")


@dataclass(frozen=True)
class RunningRun:
    """A run, and the process that launched it and writes its events."""

    directory: Path
    pid: int

    @property
    def name(self) -> str:
        return self.directory.name


@dataclass(frozen=True)
class NodeProcess:
    """A worker's or a server's process on this machine."""

    node: str  # worker 2
    pid: int
    memory_bytes: int
    is_stopped: bool  # by a signal such as SIGSTOP
    started_at: float  # with the pid, this identifies a process


def running_runs() -> list[RunningRun]:
    """Return this user's runs on this machine, the newest first."""
    if not PROC.is_dir():
        raise ValueError("finding the runs of this machine needs /proc, which only Linux has.")
    found: dict[Path, tuple[float, RunningRun]] = {}
    for process in psutil.process_iter():
        for path in _written_by(process.pid):
            try:
                started_at = process.create_time()
            except psutil.Error:
                continue
            known = found.get(path.parent)
            if known is None or started_at < known[0]:  # a process that it has forked has the same open files
                found[path.parent] = started_at, RunningRun(path.parent, process.pid)
    return [run for _, run in sorted(found.values(), key=lambda pair: (pair[0], pair[1].name), reverse=True)]


def _written_by(pid: int) -> list[Path]:
    """Return the events.jsonl files of runs that a process has open to write."""
    folder, paths = PROC / str(pid) / "fd", []
    try:
        fds = os.listdir(folder)
    except OSError:  # of another user, or ended
        return []
    for fd in fds:
        try:
            path = os.readlink(folder / fd)
            if os.path.basename(path) == EVENTS and _is_writable(pid, fd) and Path(path).is_file():
                paths.append(Path(path))
        except OSError:
            continue
    return paths


def _is_writable(pid: int, fd: str) -> bool:
    for line in (PROC / str(pid) / "fdinfo" / fd).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def find_running(word: str, runs: list[RunningRun], root: Path) -> RunningRun | None:
    """Return the run with this directory; or, of the runs in `root`, that with this name or beginning of its name.

    `last` is the newest in `root` that runs. Runs of other folders are found by their directory only, so that no short
    word ever means the run of someone else. None: no such run runs.
    """
    by_directory = [run for run in runs if Path(word).resolve() == run.directory]
    if by_directory:
        return by_directory[0]
    here = [run for run in runs if run.directory.parent == root.resolve()]
    if word == "last":
        return here[0] if here else None
    matching = [run for run in here if word == run.name] or [run for run in here if run.name.startswith(word)]
    if len(matching) > 1:
        raise ValueError(f"{word} is {len(matching)} running runs: {', '.join(run.name for run in matching)}.")
    return matching[0] if matching else None


def processes_of(run: RunningRun) -> dict[str, NodeProcess]:
    """Return the processes of a run's workers and servers on this machine, by node."""
    try:
        below = psutil.Process(run.pid).children(recursive=True)
    except psutil.Error:
        return {}
    found = {}
    for process in below:
        try:
            words, state = process.cmdline(), process.status()
            title = TITLE.fullmatch(words[0].strip()) if words else None
            if title is not None and state != psutil.STATUS_ZOMBIE:
                memory = process.memory_info()
                private = memory.rss - getattr(memory, "shared", 0)
                stopped = state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                found[title[1]] = NodeProcess(title[1], process.pid, private, stopped, process.create_time())
        except psutil.Error:  # it has just ended
            continue
    return dict(sorted(found.items(), key=lambda item: (item[0].split()[0], int(item[0].split()[1]))))


def interrupt(run: RunningRun) -> None:
    """Do to a run what Ctrl-C does in its terminal."""
    caught = 0
    for line in (PROC / str(run.pid) / "status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            caught = int(line.split()[1], 16)
    if not caught & (1 << (signal.SIGINT - 1)):  # in the background, a shell lets programs ignore Ctrl-C
        os.kill(run.pid, signal.SIGTERM)
    else:
        os.kill(run.pid, signal.SIGINT)
