"""Measure the processor time per message beyond computing, copying and applying, in a short real run.

Each process writes the processor time of its work, and its total; the difference is the cost of its messages: packing
and reading them, waking up, resuming the coroutine.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rainband.observer import Observer, TimedWork
from rainband.protocol.messages import Push

if TYPE_CHECKING:
    from rainband.protocol.messages import Message
    from rainband.strategy import Batch
    from rainband.worker.worker import ModuleWorker

COMPUTE, WORK, MESSAGE, ALL = range(4)  # kinds of notes; ALL: the processor time of the process so far
WARM_UP = 5  # steps that are not counted: allocators and caches warm up
Note = tuple[int, float]  # kind, seconds
_NOTE = struct.Struct("<Bd")


class CostRecorder(Observer):
    """Writes the processor time of one process's work; unbuffered, because a process may end at any moment."""

    def __init__(self, directory: str, name: str) -> None:
        self.fd = os.open(Path(directory) / f"{name}.cost", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.began_s: list[float] = []  # of each kind of work that has not ended, the innermost last

    def note(self, kind: int, seconds: float) -> None:
        os.write(self.fd, _NOTE.pack(kind, seconds))

    def _end(self, kind: int) -> None:
        self.note(kind, time.thread_time() - self.began_s.pop())

    def sent(self, message: Message) -> None:
        self.note(MESSAGE, 0.0)

    def receiving(self, message: Message) -> None:
        self.note(MESSAGE, 0.0)


class WorkerCost(CostRecorder):
    """Writes the cost of a worker."""

    def computing(self, worker: ModuleWorker, batch: Batch) -> None:
        self.note(ALL, time.process_time())
        self.began_s.append(time.thread_time())

    def computed(self, worker: ModuleWorker, batch: Batch) -> None:
        self._end(COMPUTE)

    def began(self, work: TimedWork) -> None:
        self.began_s.append(time.thread_time())

    def ended(self, work: TimedWork) -> None:
        self._end(WORK)


class ServerCost(CostRecorder):
    """Writes the cost of a server."""

    def receiving(self, message: Message) -> None:
        super().receiving(message)
        self.note(ALL, time.process_time())
        self.began_s.append(time.thread_time())

    def received(self, message: Message) -> None:
        if isinstance(message, Push):
            self._end(WORK)
        else:
            self.began_s.pop()


class MessageCost(NamedTuple):
    """Seconds that a message costs a worker and a server, and that a gradient took meanwhile."""

    worker_s: float
    server_s: float
    compute_s: float


def message_cost(directory: str) -> MessageCost:
    """Read the notes of a run; returns the cost of its messages."""
    worker = _read(Path(directory) / "worker-0.cost")
    server = _read(Path(directory) / "server-0.cost")
    begins = [at for at, (kind, _) in enumerate(worker) if kind == ALL]
    if len(begins) < 2 * WARM_UP:
        raise ValueError(f"a worker made only {len(begins)} steps of the short run: try twice as many with --steps.")
    counted = worker[begins[WARM_UP] : begins[-1] + 1]
    computed = [seconds for kind, seconds in counted if kind == COMPUTE]
    computed_s = sum(computed)
    return MessageCost(_per_message(counted), _per_message(server[len(server) // 4 :]), computed_s / len(computed))


def _per_message(notes: Sequence[Note]) -> float:
    moments = [seconds for kind, seconds in notes if kind == ALL]
    within = [at for at, (kind, _) in enumerate(notes) if kind == ALL]
    inside = notes[within[0] : within[-1]]
    work_s = sum(seconds for kind, seconds in inside if kind in (COMPUTE, WORK))
    messages = sum(kind == MESSAGE for kind, _ in inside)
    return max(0.0, moments[-1] - moments[0] - work_s) / max(1, messages)


def _read(file: Path) -> list[Note]:
    return list(_NOTE.iter_unpack(file.read_bytes()))
