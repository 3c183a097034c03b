"""One authenticated, non-blocking connection. Parameters for replies are read when the reply leaves."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from rainband.errors import HandshakeFailed
from rainband.protocol.messages import Message, Params, Peer, decode, encode
from rainband.transports.auth import Handshake, Identity
from rainband.transports.frames import BadFrame, BodyMemory, FrameReader, pack
from rainband.transports.tls.tls_socket import TlsSocket, unsent

ROOM_BYTES = 4 << 20  # replies wait while more than this is queued

ReadNow = Callable[[Message], tuple[Message, memoryview | None]]


class Connection:
    """A connection to one peer: receives frames, queues and sends messages."""

    def __init__(
        self,
        sock: socket.socket,
        max_body_bytes: int,
        shake: Handshake | None,
        deadline: float,
        body_memory: BodyMemory | None = None,
    ) -> None:
        self.sock = sock
        self.max_body_bytes = max_body_bytes
        self.body_memory = body_memory
        self.shake = shake
        self.host = ""  # the address of the peer; "": it is on this machine
        self.deadline = deadline  # the handshake must be done by then
        self.peer = Peer("unknown", -1)
        self.key = 0
        self.reader: FrameReader | None = None
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0
        self.reads: deque[Message] = deque()
        self.num_kept = 0  # entries at the front of `out` that are private copies
        self.fds: list[int] = []
        self.wants_out = False  # the loop waits until it can be written to again
        self.takes_fds = sock.family == socket.AF_UNIX and not isinstance(sock, TlsSocket)
        self.mailbox: Any = None  # with the payloads of its pushes, if memory is shared

    def opened(self, peer: Identity, key: int) -> None:
        self.peer = Peer(peer.role, peer.index, peer.incarnation)
        self.key = key
        self.reader = FrameReader(self.max_body_bytes, key, self.body_memory)

    def receive(self) -> list[tuple[Message, memoryview | None]] | None:
        """Return the messages that have arrived, or None at the end. Raises BadFrame or HandshakeFailed."""
        if self.reader is None:
            return self._shake_hands()
        space = self.reader.space()
        count = self._receive_with_fds(space) if self.takes_fds else self.sock.recv_into(space)
        if count == 0:
            return None
        try:
            return [(decode(frame.header), frame.body) for frame in self.reader.received(count)]
        except msgspec.DecodeError as error:
            raise BadFrame(f"the header is no message: {error}") from None

    def _receive_with_fds(self, space: memoryview) -> int:
        count, ancillary, _, _ = self.sock.recvmsg_into([space], socket.CMSG_SPACE(4 * 4))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds += memoryview(data).cast("i").tolist()
        return count

    def _shake_hands(self) -> list[tuple[Message, memoryview | None]] | None:
        assert self.shake is not None
        data = self.sock.recv(self.shake.need)
        if not data:
            return None
        try:
            self.shake.feed(data)
        except HandshakeFailed:
            self.sock.send(self.shake.outgoing)
            raise
        if self.shake.outgoing:
            self.sock.send(self.shake.outgoing)  # under 200 bytes: they fit the empty socket buffer
        if self.shake.done:
            self.opened(self.shake.peer, self.shake.key)
            if isinstance(self.sock, TlsSocket):
                self.sock.trusted()
        return []

    def send(self, message: Message, body: memoryview | bytes | None = None) -> None:
        """Queue a message; `flush` sends it. The body must not change until then."""
        view = None if body is None else memoryview(body).cast("B")
        head = pack(encode(message), view, self.key)
        self.out.append(memoryview(head))
        self.out_bytes += len(head)
        if view is not None:
            self.out.append(view)
            self.out_bytes += len(view)

    def send_with_fd(self, message: Message, fd: int) -> None:
        """Send a small message at once, with a file descriptor."""
        assert not self.out, "a descriptor travels with the first bytes of its message"
        socket.send_fds(self.sock, [pack(encode(message), None, self.key)], [fd])

    def flush(self, read_now: ReadNow | None = None) -> bool:
        """Send as much as the socket takes; return True if something is left."""
        while True:
            while self.reads and self.out_bytes < ROOM_BYTES and read_now is not None:
                message, values = read_now(self.reads.popleft())
                # With shared memory, the reader copies the block itself.
                shared = self.mailbox is not None and isinstance(message, Params)
                self.send(message, None if values is None or shared else values)
            if not self.out:
                return unsent(self.sock)
            try:
                sent = self.sock.sendmsg([*self.out] if len(self.out) <= 64 else [self.out[i] for i in range(64)])
            except BlockingIOError:
                self._copy_unsent()
                return True
            self._sent(sent)

    def _copy_unsent(self) -> None:
        """Copy what could not be sent at once, because blocks go on changing."""
        for number in range(self.num_kept, len(self.out)):
            self.out[number] = memoryview(bytes(self.out[number]))
        self.num_kept = len(self.out)

    def _sent(self, sent: int) -> None:
        self.out_bytes -= sent
        while sent:
            first = self.out[0]
            if sent < len(first):
                self.out[0] = first[sent:]
                return
            sent -= len(first)
            self.out.popleft()
            self.num_kept = max(0, self.num_kept - 1)
