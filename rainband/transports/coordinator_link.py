"""A worker's connection to the coordinator: a thread that receives, and says that the worker is alive."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from rainband.errors import CoordinatorLost
from rainband.protocol.messages import Message, decode, encode
from rainband.protocol.worker_stats import Stats
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import BadFrame, FrameReader, pack

MAX_BODY_BYTES = 1 << 28

Deliver = Callable[[Message, memoryview | None], None]


class CoordinatorLink:
    """Messages come in on a thread and are handed to the one that waits; anyone may send."""

    def __init__(
        self, sock: socket.socket, key: int, event_loop: EventLoop, deliver: Deliver, stats: Stats, every_s: float
    ) -> None:
        self.sock = sock
        self.key = key
        self.event_loop = event_loop
        self.deliver = deliver
        self.stats = stats
        self.every_s = every_s
        self.sending = threading.Lock()  # the computing thread and the heartbeat both send
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def send(self, message: Message, body: bytes | None = None) -> None:
        view = memoryview(body) if body else None
        data = pack(encode(message), view, self.key)
        try:
            with self.sending:
                self.sock.sendall(data)
                if view is not None:
                    self.sock.sendall(view)
        except OSError as error:
            raise CoordinatorLost("the coordinator", f"telling it something ({error.strerror})") from None

    def _run(self) -> None:
        reader = FrameReader(MAX_BODY_BYTES, self.key)
        heartbeat_at = time.monotonic()
        try:
            while True:
                left_s = heartbeat_at + self.every_s - time.monotonic()
                if left_s <= 0:
                    heartbeat_at = time.monotonic()
                    self.send(self.stats.heartbeat())
                    continue
                if not select.select([self.sock], [], [], left_s)[0]:
                    continue
                count = self.sock.recv_into(reader.space())
                if count == 0:
                    raise CoordinatorLost("the coordinator", "waiting for it")
                for frame in reader.received(count):
                    message = decode(frame.header)
                    body = None if frame.body is None else memoryview(bytes(frame.body))
                    self.event_loop.post(lambda m=message, b=body: self.deliver(m, b))  # type: ignore[misc]
        except (OSError, BadFrame, msgspec.DecodeError, CoordinatorLost) as error:
            lost = error if isinstance(error, CoordinatorLost) else CoordinatorLost("the coordinator", str(error))
            self._fail(lost)

    def _fail(self, error: CoordinatorLost) -> None:
        def fail() -> None:
            raise error

        self.event_loop.post(fail)
