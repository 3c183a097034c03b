"""A worker's connection to the coordinator; its thread also sends heartbeats."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from rainband.errors import CoordinatorLost, RainbandError
from rainband.protocol.messages import Message, decode, encode
from rainband.protocol.worker_stats import Stats
from rainband.transports.connect import process_usage
from rainband.transports.event_loop import EventLoop, readable_within
from rainband.transports.frames import Frame, pack
from rainband.transports.link import ThreadedLink

EARLY_HEARTBEATS_S = (0.05, 0.05, 0.1, 0.2, 0.4)  # after a worker's first step
LOOK_EVERY_S = 0.05  # for the first step
MAX_BODY_BYTES = 1 << 40  # of a worker's buffers, which both ends have in memory: no limit in practice

Deliver = Callable[[Message, memoryview | None], None]


class CoordinatorLink(ThreadedLink):
    """Delivers the coordinator's messages to the thread that waits; any thread may send."""

    def __init__(
        self, sock: socket.socket, key: int, event_loop: EventLoop, deliver: Deliver, stats: Stats, heartbeat_s: float
    ) -> None:
        super().__init__("coordinator", sock, key, event_loop, MAX_BODY_BYTES)
        self.deliver = deliver
        self.stats = stats
        self.heartbeat_s = heartbeat_s
        self.heartbeat_at = time.monotonic()
        self.early = list(EARLY_HEARTBEATS_S)
        stats.usage = process_usage
        self.sending = threading.Lock()  # the worker's thread and the heartbeats both send
        self.start_receiving()

    def send(self, message: Message, body: bytes | None = None) -> None:
        view = memoryview(body) if body else None
        data = pack(encode(message), view, self.key)
        try:
            with self.sending:
                self.sock.sendall(data)
                if view is not None:
                    self.sock.sendall(view)
        except OSError as error:
            raise CoordinatorLost("the coordinator", f"sending to it ({error.strerror})") from None

    def wait_readable(self) -> None:
        """Send a heartbeat whenever one is due, until there is something to receive."""
        while True:
            left_s = self.heartbeat_at + self._interval_s() - time.monotonic()
            if left_s <= 0:
                self.heartbeat_at = time.monotonic()
                self.early = self.early[1:] if self.stats.steps else self.early
                self.send(self.stats.heartbeat())
            elif readable_within(self.sock, left_s if self.stats.steps else min(left_s, LOOK_EVERY_S)):
                return

    def _interval_s(self) -> float:
        """Return the seconds between two heartbeats: short ones after the first step, as a run may be short."""
        return min(self.heartbeat_s, self.early[0]) if self.stats.steps and self.early else self.heartbeat_s

    def frame_received(self, frame: Frame) -> None:
        message = decode(frame.header)
        body = None if frame.body is None else memoryview(bytes(frame.body))
        self.event_loop.post(lambda: self.deliver(message, body))

    def lost(self, reason: str) -> RainbandError:
        return CoordinatorLost("the coordinator", f"waiting for its messages ({reason})")
