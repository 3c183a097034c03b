"""What the processes of a real run do besides computing, copying and applying: taken from a short run, for a model.

Each process notes the processor's time of its pieces of work, and of everything; what is not in a piece is spent on
messages: packing and reading them, waking up, the coroutine that goes on.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rainband.protocol.messages import Push
from rainband.server.server import Server
from rainband.worker.worker import ModuleWorker

COMPUTE, PIECE, MESSAGE, ALL = range(4)
WARM_UP = 5  # steps that are not counted: allocators, caches
Note = tuple[int, float]  # what it is, seconds
_NOTE = struct.Struct("<Bd")


class Pieces:
    """Written at once: a process may end at any moment."""

    def __init__(self, directory: str, name: str) -> None:
        self.fd = os.open(Path(directory) / f"{name}.pieces", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, kind: int, seconds: float) -> None:
        os.write(self.fd, _NOTE.pack(kind, seconds))

    def timed(self, work: Callable[..., Any], kind: int) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            if kind == COMPUTE:
                self.note(ALL, time.process_time())
            began = time.thread_time()
            result = work(*args, **named)
            self.note(kind, time.thread_time() - began)
            return result

        return timed

    def counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.note(MESSAGE, 0.0)
            return work(*args, **named)

        return counted

    def watch_worker(self, worker: ModuleWorker) -> None:
        client = worker.client
        worker.compute = self.timed(worker.compute, COMPUTE)  # type: ignore[method-assign]
        client.take = self.timed(client.take, PIECE)  # type: ignore[method-assign]
        client._push = self.timed(client._push, PIECE)  # type: ignore[method-assign]
        worker.params.step = self.timed(worker.params.step, PIECE)  # type: ignore[method-assign]
        client.receive = self.counted(client.receive)  # type: ignore[method-assign]
        for port in client.ports:
            port.send = self.counted(port.send)  # type: ignore[method-assign]
            port.push = self.counted(port.push)  # type: ignore[method-assign]

    def watch_server(self, server: Server) -> None:
        receive = server.receive
        apply = self.timed(receive, PIECE)

        def watched(sender: Any, message: Any, *rest: Any) -> Any:
            self.note(MESSAGE, 0.0)
            self.note(ALL, time.process_time())
            return (apply if isinstance(message, Push) else receive)(sender, message, *rest)

        server.receive = watched  # type: ignore[method-assign,assignment]


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
