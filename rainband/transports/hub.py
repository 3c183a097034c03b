"""A node's network loop, on one thread: accepts and authenticates connections, delivers and sends messages."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from rainband.errors import HandshakeFailed
from rainband.protocol.messages import Message, Peer
from rainband.transports.auth import Identity, ServerHandshake
from rainband.transports.connect import is_loopback, keep_alive, user_of
from rainband.transports.connection import Connection, ReadNow
from rainband.transports.frames import BadFrame, BodyMemory
from rainband.transports.tls.certificate import Certificate, server_context
from rainband.transports.tls.tls_socket import TlsSocket, unread

log = logging.getLogger("rainband")

MAX_UNKNOWN = 256  # unauthenticated connections; if there are more, the oldest is closed
MAX_UNKNOWN_PER_HOST = 64  # of these, from one address
FRAMES_BEFORE_FLUSH = 4  # early enough for the sender to go on, rarely enough to save system calls


class Handler(Protocol):
    """The functions of a node that the hub calls for messages and lost peers."""

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None: ...

    def lost(self, peer: Peer) -> None: ...


class Hub:
    """All connections of one node."""

    def __init__(
        self,
        me: Peer,
        keys: Mapping[str, bytes],
        run_id: bytes,
        handler: Handler,
        max_body_bytes: int,
        handshake_timeout_s: float = 5.0,
        read_now: ReadNow | None = None,
        body_memory: BodyMemory | None = None,
    ) -> None:
        """`keys`: those of the roles that may connect.

        `body_memory`: returns the memory in which the body of a frame is received, given its header and length.
        """
        self.me = Identity(me.role, me.index, me.incarnation)
        self.keys = keys
        self.run_id = run_id
        self.handler = handler
        self.max_body_bytes = max_body_bytes
        self.handshake_timeout_s = handshake_timeout_s
        self.read_now = read_now
        self.body_memory = body_memory
        self.epoll = select.epoll()
        self.listeners: dict[int, socket.socket] = {}
        self.connections: dict[int, Connection] = {}
        self.peers: dict[Peer, Connection] = {}
        self.watched: dict[int, Callable[[], None]] = {}
        self.unflushed: dict[int, Connection] = {}
        self.unread: dict[int, Connection] = {}  # their sockets hold bytes that epoll does not show
        self.contexts: dict[int, ssl.SSLContext] = {}  # of the listeners that encrypt
        self.spare = socket.socket()  # released when no file descriptor is left: see _turn_away
        self.closed_quietly = 0
        self.last_complaint_at = -1e9

    def listen(self, sock: socket.socket, certificate: Certificate | None = None) -> None:
        """Accept connections; those that come from other machines are encrypted, with this certificate."""
        if certificate is not None:
            self.contexts[sock.fileno()] = server_context(certificate)
        elif not is_loopback(sock):
            raise ValueError("a node that other machines can reach needs a certificate.")
        sock.setblocking(False)
        self.listeners[sock.fileno()] = sock
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def adopt(self, sock: socket.socket, peer: Identity, key: int) -> Connection:
        """Add a connection that this node opened itself."""
        connection = self._add(sock, Connection(sock, self.max_body_bytes, None, float("inf"), self.body_memory))
        connection.opened(peer, key)
        self.peers[connection.peer] = connection
        return connection

    def detach(self, peer: Peer) -> socket.socket:
        """Return the connection of an authenticated peer, which the hub no longer serves."""
        connection = self.peers.pop(peer)
        fd = connection.sock.fileno()
        del self.connections[fd]
        self.unflushed.pop(fd, None)
        self.epoll.unregister(fd)
        return connection.sock

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back when another file descriptor is readable."""
        self.watched[fd] = callback
        self.epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self.watched.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def send(self, to: Peer, message: Message, body: memoryview | bytes | None = None) -> None:
        """Queue a message; drop it if the peer is lost."""
        connection = self.peers.get(to)
        if connection is not None:
            connection.send(message, body)
            self.unflushed[connection.sock.fileno()] = connection

    def run_once(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for events, and handle them."""
        self.flush()
        events = self.epoll.poll(0.0 if self.unread else timeout_s)
        polled_at = time.monotonic()
        unread, self.unread = self.unread, {}
        for fd, event in events:
            unread.pop(fd, None)
            if fd in self.watched:
                self.watched[fd]()
            elif fd in self.listeners:
                self._accept(self.listeners[fd])
            elif fd in self.connections:
                connection = self.connections[fd]
                if event & select.EPOLLOUT:
                    self.unflushed[fd] = connection
                if event & ~select.EPOLLOUT:
                    self._read(connection)
        for fd, connection in unread.items():
            if self.connections.get(fd) is connection:
                self._read(connection)
        self.flush()
        self._drop_the_slow(polled_at)

    def close(self) -> None:
        """Send what can be sent at once, and close everything."""
        self.flush()
        for connection in list(self.connections.values()):
            connection.sock.close()
        for listener in self.listeners.values():
            listener.close()
        self.epoll.close()
        self.spare.close()

    def _add(self, sock: socket.socket, connection: Connection) -> Connection:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            keep_alive(sock)
        self.connections[sock.fileno()] = connection
        self.epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        return connection

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, host = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._complain("no file descriptor is left for a new connection (see ulimit -n)")
                self._turn_away(listener)
            return
        if sock.family == socket.AF_UNIX and (user := user_of(sock)) != os.geteuid():  # before it costs anything
            self._complain(f"closed a connection of another user of this machine (user ID {user})")
            sock.close()
            return
        self._make_room_for("" if sock.family == socket.AF_UNIX else host[0])
        connection = self.accept(sock, self.contexts.get(listener.fileno()))
        connection.host = "" if sock.family == socket.AF_UNIX else host[0]

    def accept(self, sock: socket.socket, context: ssl.SSLContext | None, received: bytes = b"") -> Connection:
        """Let the other end of a connection say who it is; `received`: what was read from it already."""
        if context is not None:
            sock = TlsSocket(sock, context, server_side=True, received=received)
        shake = ServerHandshake(self.keys, self.run_id, self.me)
        connection = Connection(sock, self.max_body_bytes, shake, self._handshake_deadline(), self.body_memory)
        self._add(sock, connection)
        if unread(sock):
            self.unread[sock.fileno()] = connection
        return connection

    def _make_room_for(self, host: str) -> None:
        """Close the oldest connection that has not authenticated, if there are too many; a node needs milliseconds."""
        unknown = [c for c in self.connections.values() if c.reader is None]
        of_host = [c for c in unknown if host and c.host == host]
        if len(of_host) >= MAX_UNKNOWN_PER_HOST:
            self._complain(f"too many connections from {host} that do not say who they are")
            self._drop(of_host[0])
        elif len(unknown) >= MAX_UNKNOWN:
            self._complain("too many connections that do not say who they are")
            self._drop(unknown[0])

    def _handshake_deadline(self) -> float:
        return time.monotonic() + self.handshake_timeout_s

    def _turn_away(self, listener: socket.socket) -> None:
        """Accept and close one connection with the spare descriptor: left waiting, it would wake the loop forever."""
        self.spare.close()
        with suppress(OSError):
            listener.accept()[0].close()
        self.spare = socket.socket()

    def _read(self, connection: Connection) -> None:
        was_known = connection.reader is not None
        try:
            received = connection.receive()
        except BlockingIOError:
            return
        except (BadFrame, HandshakeFailed) as error:
            self._complain(f"closed a connection: {error}")
            return self._drop(connection)
        except ssl.SSLError as error:
            self._complain(f"closed a connection that does not speak TLS as this run does: {error.reason}")
            return self._drop(connection)
        except OSError:
            return self._drop(connection)
        if received is None:
            return self._drop(connection)
        if not was_known and connection.reader is not None:
            self._welcome(connection)
        elif not was_known and connection.shake is not None and connection.shake.step_done:
            connection.deadline = self._handshake_deadline()
        if unread(connection.sock):
            self.unread[connection.sock.fileno()] = connection
        for number, (message, body) in enumerate(received, 1):
            self.handler.receive(connection, message, body)
            if number % FRAMES_BEFORE_FLUSH == 0:
                self.flush()

    def _welcome(self, connection: Connection) -> None:
        older = self.peers.get(connection.peer)
        if older is not None:
            self._drop(older)
        self.peers[connection.peer] = connection

    def refuse(self, connection: Connection, why: str) -> None:
        """Close a connection whose peer violates the protocol."""
        self._complain(f"closed the connection of {connection.peer}: {why}")
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        if self.connections.pop(fd, None) is None:
            return
        self.epoll.unregister(fd)
        self.unflushed.pop(fd, None)
        connection.sock.close()
        for left in connection.fds:
            os.close(left)
        connection.fds = []
        if self.peers.get(connection.peer) is connection:
            del self.peers[connection.peer]
            self.handler.lost(connection.peer)

    def _drop_the_slow(self, polled_at: float) -> None:
        """Close connections that were late at the last poll: since then this node itself may have been busy."""
        if any(c.reader is None for c in self.connections.values()):
            for connection in [c for c in self.connections.values() if c.reader is None and polled_at > c.deadline]:
                self._complain("closed a connection that did not say who it is")
                self._drop(connection)

    def flush(self) -> None:
        """Send what is queued, as much as the sockets take."""
        if not self.unflushed:
            return
        for fd, connection in list(self.unflushed.items()):
            try:
                left = connection.flush(self.read_now)
            except OSError:
                self._drop(connection)
                continue
            del self.unflushed[fd]
            wanted = select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if left else 0)
            if left != connection.wants_out:
                connection.wants_out = left
                self.epoll.modify(fd, wanted)

    def want_room(self, connection: Connection) -> None:
        """Wake up when this connection is writable again, even if nothing is queued for it."""
        connection.wants_out = True
        self.epoll.modify(connection.sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLOUT)

    def queue(self, connection: Connection) -> None:
        """Flush this connection in the next `flush`."""
        if connection.sock.fileno() >= 0:  # otherwise an earlier message has closed it
            self.unflushed[connection.sock.fileno()] = connection

    def _complain(self, what: str) -> None:
        """Log a warning, at most one per second: a port scan must not fill the disk."""
        now = time.monotonic()
        if now - self.last_complaint_at < 1.0:
            self.closed_quietly += 1
            return
        more = f" ({self.closed_quietly} more like it)" if self.closed_quietly else ""
        self.last_complaint_at, self.closed_quietly = now, 0
        log.warning("%s: %s%s", self.me.role, what, more)
