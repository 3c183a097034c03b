"""Links between workers through shared memory: values lie in lent segments that small messages refer to.

Everything happens on the computing thread: it has to do the copying anyway. A segment belongs to the receiver from the
message that names it until it is given back, never to a timer. The receiver copies on arrival, so a segment comes back
as soon as the other side waits for anything.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from rainband.errors import PeerLost
from rainband.protocol.messages import GiveBack, Hello, Lend, Message, Peer, PeerValue
from rainband.protocol.peer_inbox import Inbox, Tag
from rainband.transports.auth import Identity
from rainband.transports.connection import Connection
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import BadFrame
from rainband.transports.hub import Hub
from rainband.transports.pytrees import Outgoing, as_tensor, incoming
from rainband.transports.shared_memory import PAGE, SharedSegment

MAX_SEGMENTS = 64  # per link; each is an open file at both ends
MAX_SEGMENT_BYTES = 1 << 34
INLINE_BYTES = PAGE  # smaller values are sent with the message: cheaper than a segment
MAX_BODY_BYTES = 1 << 16


@dataclass
class Link:
    """A link to one worker on this machine, with the segments lent to it and borrowed from it."""

    connection: Connection
    lent: dict[int, SharedSegment] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)  # lent segments that were given back, the latest at the end
    borrowed: dict[int, SharedSegment] = field(default_factory=dict)

    def best_free(self, num_bytes: int) -> int | None:
        """Return the smallest free segment that is large enough, else the largest; of equals the one used last.

        None: the other side has them all.
        """

        def size(number: int) -> int:
            return len(self.lent[number].bytes)

        fitting = [number for number in self.free if size(number) >= num_bytes]
        if fitting:
            return min(reversed(fitting), key=size)
        return max(reversed(self.free), key=size, default=None)


class SharedPeerLinks:
    """All links of one worker to workers on its own machine."""

    def __init__(
        self, me: Peer, keys: Mapping[str, bytes], run_id: bytes, event_loop: EventLoop, inbox: Inbox, timeout_s: float
    ) -> None:
        self.event_loop = event_loop
        self.inbox = inbox
        self.hub = Hub(me, keys, run_id, self, MAX_BODY_BYTES, timeout_s)
        self.links: dict[int, Link] = {}
        # An epoll can be watched like a socket: the thread that waits also serves the hub's connections.
        event_loop.watch(self.hub.epoll.fileno(), lambda: self.hub.run_once(0.0))

    def adopt(self, sock: socket.socket, peer: Identity, key: int) -> None:
        """Add a connection that this worker opened."""
        connection = self.hub.adopt(sock, peer, key)
        self._open(connection)
        connection.send(Hello())  # with the first message the other side makes its link
        self._flush(peer.index, connection)

    def send(self, to: int, tag: Tag, pytree: Outgoing) -> None:
        """Send a value; handle arriving messages while waiting for room."""
        link = self.links[to]
        if pytree.num_bytes <= INLINE_BYTES:
            link.connection.send(PeerValue(tag, pytree.structure), pytree.copied())
        else:
            number = self._segment(to, link, pytree.num_bytes)
            pytree.fill(link.lent[number].bytes)
            link.connection.send(PeerValue(tag, pytree.structure, number))
        self._flush(to, link.connection)

    def close(self) -> None:
        self.event_loop.unwatch(self.hub.epoll.fileno())
        self.hub.close()
        self.links.clear()

    # ---- out -------------------------------------------------------------------------------------------------------

    def _segment(self, to: int, link: Link, num_bytes: int) -> int:
        """Return a segment to write to; it belongs to the other side when it is named in a message."""
        while not link.free and len(link.lent) >= MAX_SEGMENTS:
            self._wait(to, link.connection)
        number = link.best_free(num_bytes)
        if number is None:
            number = len(link.lent)
        else:
            link.free.remove(number)
        if number not in link.lent or len(link.lent[number].bytes) < num_bytes:
            self._lend(to, link, number, max(PAGE, 1 << (num_bytes - 1).bit_length()))
        return number

    def _lend(self, to: int, link: Link, number: int, num_bytes: int) -> None:
        segment = SharedSegment.create("rainband values", num_bytes)
        while True:
            self._flush(to, link.connection)  # a descriptor is sent with the first byte of its message
            try:
                link.connection.send_with_fd(Lend(number, num_bytes), segment.fd)
                break
            except BlockingIOError:
                self.hub.want_room(link.connection)
                self._wait(to, link.connection)
            except OSError:
                raise PeerLost(f"worker {to}", "sending to it") from None
        os.close(segment.fd)  # the mapping stays
        link.lent[number] = segment

    def _flush(self, to: int, connection: Connection) -> None:
        """Wait until everything is sent: the computing thread may be busy for long afterwards."""
        self.hub.queue(connection)
        self.hub.flush()
        while connection.out:
            self._wait(to, connection)

    def _wait(self, to: int, connection: Connection) -> None:
        if connection.sock.fileno() >= 0:
            self.event_loop.wait()
        if connection.sock.fileno() < 0:
            raise PeerLost(f"worker {to}", "sending to it")

    # ---- in --------------------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        index = connection.peer.index
        link = self.links.get(index)
        if link is None or link.connection is not connection:
            return self._greet(connection, message)
        try:
            match message:
                case PeerValue():
                    self._take(index, link, message, body)
                case Lend():
                    self._borrow(link, message)
                case GiveBack() if message.segment in link.lent and message.segment not in link.free:
                    link.free.append(message.segment)
                case _:
                    raise BadFrame(f"it sends {type(message).__name__}, which is not for a worker to say.")
        except (BadFrame, ValueError) as error:
            self.hub.refuse(connection, str(error))

    def lost(self, peer: Peer) -> None:
        link = self.links.get(peer.index)
        if link is not None and link.connection.peer == peer:
            del self.links[peer.index]
            self.inbox.closed(peer.index, "its connection is gone")

    def _greet(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Hello) and connection.peer.role == "worker":
            self._open(connection)
        else:
            self.hub.refuse(connection, f"it is no worker that says hello, but says {type(message).__name__}")

    def _open(self, connection: Connection) -> None:
        self.links[connection.peer.index] = Link(connection)
        self.inbox.opened(connection.peer.index)

    def _take(self, index: int, link: Link, message: PeerValue, body: memoryview | None) -> None:
        if message.segment < 0:
            return self.inbox.arrived(index, message.tag, incoming(message.pytree, as_tensor(body)))
        if message.segment not in link.borrowed:
            raise BadFrame(f"it names segment {message.segment}, which it has not lent.")
        payload = incoming(message.pytree, link.borrowed[message.segment].bytes)
        link.connection.send(GiveBack(message.segment))
        self.hub.queue(link.connection)
        self.inbox.arrived(index, message.tag, payload)

    def _borrow(self, link: Link, message: Lend) -> None:
        fds = link.connection.fds
        if not fds or not 0 <= message.segment < MAX_SEGMENTS or not 0 < message.num_bytes <= MAX_SEGMENT_BYTES:
            raise BadFrame(f"it lends segment {message.segment} of {message.num_bytes} bytes with {len(fds)} files.")
        link.borrowed[message.segment] = SharedSegment.open(fds.pop(0), message.num_bytes, writable=False)
