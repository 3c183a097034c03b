"""What the processes of a real run do besides computing, copying and applying: taken from a short run, for a model.

Each process notes the processor's time of its pieces of work, and of everything; what is not in a piece is spent on
messages: packing and reading them, waking up, the coroutine that goes on.
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

COMPUTE, PIECE, MESSAGE, ALL = range(4)
WARM_UP = 5  # steps that are not counted: allocators, caches
Note = tuple[int, float]  # what it is, seconds
_NOTE = struct.Struct("<Bd")


class CostRecorder(Observer):
    """Writes the processor time of one process's work; each note at once, because a process may end at any moment."""

    def __init__(self, directory: str, name: str) -> None:
        self.fd = os.open(Path(directory) / f"{name}.pieces", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.began_s: list[float] = []  # of each piece of work that has not ended; they nest

    def note(self, kind: int, seconds: float) -> None:
        os.write(self.fd, _NOTE.pack(kind, seconds))

    def _end(self, kind: int) -> None:
        self.note(kind, time.thread_time() - self.began_s.pop())

    def sent(self, message: Message) -> None:
        self.note(MESSAGE, 0.0)

    def receiving(self, message: Message) -> None:
        self.note(MESSAGE, 0.0)


class WorkerCost(CostRecorder):
    """Of a worker: gradients, and what it does besides."""

    def computing(self, worker: ModuleWorker, batch: Batch) -> None:
        self.note(ALL, time.process_time())
        self.began_s.append(time.thread_time())

    def computed(self, worker: ModuleWorker, batch: Batch) -> None:
        self._end(COMPUTE)

    def began(self, work: TimedWork) -> None:
        self.began_s.append(time.thread_time())

    def ended(self, work: TimedWork) -> None:
        self._end(PIECE)


class ServerCost(CostRecorder):
    """Of a server: pushes."""

    def receiving(self, message: Message) -> None:
        super().receiving(message)
        self.note(ALL, time.process_time())
        self.began_s.append(time.thread_time())

    def received(self, message: Message) -> None:
        if isinstance(message, Push):
            self._end(PIECE)
        else:
            self.began_s.pop()


class MessageCost(NamedTuple):
    """Seconds that a message costs a worker and a server besides their work, where a gradient took so long."""

    worker_s: float
    server_s: float
    compute_s: float


def besides(directory: str) -> MessageCost:
    """What the notes of a run come to."""
    worker = _read(Path(directory) / "worker-0.pieces")
    server = _read(Path(directory) / "server-0.pieces")
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
    work_s = sum(seconds for kind, seconds in inside if kind in (COMPUTE, PIECE))
    messages = sum(kind == MESSAGE for kind, _ in inside)
    return max(0.0, moments[-1] - moments[0] - work_s) / max(1, messages)


def _read(file: Path) -> list[Note]:
    return list(_NOTE.iter_unpack(file.read_bytes()))
