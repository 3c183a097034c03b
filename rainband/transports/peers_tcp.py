"""Links between workers by TCP: one thread serves all of them, so that transfers overlap computing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping

from rainband.errors import PeerLost
from rainband.protocol.messages import Hello, Message, Peer, PeerValue
from rainband.protocol.peer_inbox import Inbox, Tag
from rainband.transports.auth import Identity
from rainband.transports.connect import Dialed
from rainband.transports.connection import Connection
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import BadFrame
from rainband.transports.hub import Hub
from rainband.transports.pytrees import Outgoing, as_tensor, fresh_memory, incoming
from rainband.transports.tls.certificate import Certificate, server_context

MAX_BODY_BYTES = 1 << 32
ROOM_BYTES = 64 << 20  # the sender waits while more than this is unsent
TICK_S = 1.0  # how often unauthenticated connections are checked


class TcpPeerLinks:
    """All links of one worker to workers anywhere.

    The hub and what belongs to it are the thread's; the computing thread leaves messages in `outbox` and wakes it.
    """

    def __init__(
        self,
        me: Peer,
        keys: Mapping[str, bytes],
        run_id: bytes,
        event_loop: EventLoop,
        inbox: Inbox,
        timeout_s: float,
        certificate: Certificate | None = None,
    ) -> None:
        self.event_loop = event_loop
        self.inbox = inbox
        self.timeout_s = timeout_s
        # Values are received in their final memory: nothing is copied again.
        self.hub = Hub(me, keys, run_id, self, MAX_BODY_BYTES, timeout_s, body_memory=lambda _, n: fresh_memory(n))
        self.connections: dict[int, Connection] = {}
        self.outbox: deque[tuple[int, PeerValue, memoryview | None]] = deque()
        self.adopted: deque[tuple[socket.socket, Identity, int]] = deque()
        self.accepted: deque[Dialed] = deque()
        self.context = server_context(certificate) if certificate is not None else None  # of tunnels
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.hub.watch(self.wake_fd, self._woken)
        self.given_bytes = 0  # handed over; written by the computing thread only
        self.taken_bytes = 0  # from the outbox; this and the next are written by the other thread only
        self.left_bytes = 0  # sent, or dropped because the peer is lost
        self.wants_room = False
        self.closing_at = float("inf")
        self.thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        self.thread.start()

    # ---- the computing thread ---------------------------------------------------------------------------------------

    def adopt(self, sock: socket.socket, peer: Identity, key: int) -> None:
        """Add a connection that this worker opened."""
        self.adopted.append((sock, peer, key))
        self._wake()

    def accept(self, dialed: Dialed) -> None:
        """Add a connection that another worker has opened, and that did not come by the listening socket."""
        self.accepted.append(dialed)
        self._wake()

    def send(self, to: int, tag: Tag, pytree: Outgoing) -> None:
        """Queue a copy; handle arriving messages while waiting for room."""
        self.wants_room = True
        while self.given_bytes - self.left_bytes > ROOM_BYTES:
            self.event_loop.wait()
            if to in self.inbox.lost:
                raise PeerLost(f"worker {to}", "sending to it")
        self.wants_room = False
        self.given_bytes += pytree.num_bytes
        self.outbox.append((to, PeerValue(tag, pytree.structure), pytree.copied()))
        self._wake()

    def close(self) -> None:
        """Close the links after all sent values have left, within the timeout."""
        self.closing_at = time.monotonic() + self.timeout_s
        self._wake()
        self.thread.join()
        self.hub.close()
        os.close(self.wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while time.monotonic() < self.closing_at and not (self.closing_at < float("inf") and self._all_left()):
                self.hub.run_once(min(TICK_S, max(0.0, self.closing_at - time.monotonic())))
                self._count()
        except Exception as error:
            failure = error

            def fail() -> None:
                raise failure

            self.event_loop.post(fail)

    def _all_left(self) -> bool:
        return (
            not self.outbox
            and self.left_bytes == self.taken_bytes
            and not any(connection.out for connection in self.connections.values())
        )

    def _woken(self) -> None:
        os.eventfd_read(self.wake_fd)
        while self.adopted:
            connection = self.hub.adopt(*self.adopted.popleft())
            self._open(connection)
            self.hub.send(connection.peer, Hello())
        while self.accepted:
            sock, received = self.accepted.popleft()
            self.hub.accept(sock, self.context, received)
        while self.outbox:
            to, message, body = self.outbox.popleft()
            self.taken_bytes += 0 if body is None else len(body)
            known = self.connections.get(to)
            if known is not None:  # otherwise the peer is lost, which the sender learns from the inbox
                known.send(message, body)
                known.num_kept = len(known.out)  # they are copies already
                self.hub.queue(known)

    def _count(self) -> None:
        self.left_bytes = self.taken_bytes - sum(connection.out_bytes for connection in self.connections.values())
        if self.wants_room and self.given_bytes - self.left_bytes <= ROOM_BYTES:
            self.event_loop.post(lambda: None)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        index = connection.peer.index
        if self.connections.get(index) is not connection:
            if isinstance(message, Hello) and connection.peer.role == "worker":
                return self._open(connection)
            return self.hub.refuse(connection, f"it is no worker that says hello, but says {type(message).__name__}")
        try:
            if not isinstance(message, PeerValue) or message.segment >= 0:
                raise BadFrame(f"it sends {type(message).__name__}, which is not for a worker to say.")
            payload = incoming(message.pytree, as_tensor(body), copy=False)
        except BadFrame as error:
            return self.hub.refuse(connection, str(error))
        self.event_loop.post(lambda: self.inbox.arrived(index, message.tag, payload))

    def lost(self, peer: Peer) -> None:
        connection = self.connections.get(peer.index)
        if connection is not None and connection.peer == peer:
            del self.connections[peer.index]
            self.event_loop.post(lambda: self.inbox.closed(peer.index, "its connection is gone"))

    def _open(self, connection: Connection) -> None:
        index = connection.peer.index
        self.connections[index] = connection
        self.event_loop.post(lambda: self.inbox.opened(index))
