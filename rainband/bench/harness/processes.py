"""Start measuring processes and collect what they report through pipes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.connect import listen_tcp
from rainband.transports.event_loop import readable_within

PRELOAD = (
    "torch",
    "torch._dynamo",
    "rainband.runtimes.processes.worker_main",
    "rainband.runtimes.processes.server_process",
    "rainband.bench.baselines.data_parallel",
)


class BenchProcess:
    """A process that reports through a pipe."""

    def __init__(self, zygote: Zygote, entry: str, order: msgspec.Struct, title: str, fds: Sequence[int] = ()) -> None:
        self.reader, writer = os.pipe()
        self.token = zygote.spawn(entry, msgspec.msgpack.encode(order), title, [writer, *fds], 1)
        os.close(writer)

    def read_byte(self, idle: Callable[[], object] | None = None) -> bytes:
        self._wait(idle)
        return os.read(self.reader, 1)

    def result(self, type_: Any = list[float], idle: Callable[[], object] | None = None) -> Any:
        """Return what the process reports at its end; call `idle` repeatedly while waiting."""
        parts = []
        while True:
            self._wait(idle)
            part = os.read(self.reader, 1 << 16)
            if not part:
                break
            parts.append(part)
        os.close(self.reader)
        if not parts:
            raise RuntimeError("a measuring process ended without a result: see its output above.")
        return msgspec.msgpack.decode(b"".join(parts), type=type_)

    def _wait(self, idle: Callable[[], object] | None) -> None:
        if idle is None:
            return
        while not readable_within(self.reader, 0.02):
            idle()


def free_port() -> int:
    with listen_tcp("127.0.0.1") as sock:
        port: int = sock.getsockname()[1]
        return port
