"""A connection between two ranks of a group: headers, bodies, and reports about lost ranks."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from rainband.transports.connect import SOCKET_BUFFER_BYTES

HEADER = struct.Struct("<BBHIQ")  # kind, attempt, magic, round, length of the body
MAGIC = 0x5242
DATA, DONE, REPORT, COMMITTED, PING = range(1, 6)
MASKS = struct.Struct("<32s32s")
JUNK_BYTES = 1 << 16


class Head(NamedTuple):
    """A received header."""

    kind: int
    attempt: int
    magic: int
    round: int
    num_bytes: int


class LossReport(NamedTuple):
    """A rank's knowledge about an attempt in which a rank was lost."""

    round: int
    attempt: int
    lost: int  # bit mask: the ranks that it knows to be lost
    done: int  # bit mask: the ranks that it knows to have done their parts


class RankLink:
    """The connection to one rank, with what is being sent and received. A broken connection raises OSError."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.sock = sock
        self.sending: list[memoryview] = []  # the rest of a message
        self.has_begun = False  # a part of it was sent
        self.later: deque[list[memoryview]] = deque()
        self.header = memoryview(bytearray(HEADER.size))
        self.head: Head | None = None  # of the message whose body is being received
        self.got = 0  # bytes of the header, or of the body
        self.is_held = False  # the message must wait: the connection is not read meanwhile
        self.scratch = memoryview(bytearray(0))
        self.masks = memoryview(bytearray(MASKS.size))
        self.report: LossReport | None = None  # the last one
        self.heard_at = 0.0  # when something arrived
        self.committed = 0  # the last round that the other rank is known to have finished

    # ---- out --------------------------------------------------------------------------------------------------------

    def queue(self, kind: int, round_number: int, attempt: int, body: memoryview | None = None) -> None:
        num_bytes = 0 if body is None else len(body)
        message = [memoryview(HEADER.pack(kind, attempt, MAGIC, round_number, num_bytes))]
        if body is not None and num_bytes:
            message.append(body)
        if self.sending:
            self.later.append(message)
        else:
            self.sending = message

    def queue_report(self, report: LossReport) -> None:
        masks = MASKS.pack(report.lost.to_bytes(32, "little"), report.done.to_bytes(32, "little"))
        self.queue(REPORT, report.round, report.attempt, memoryview(masks))

    def flush(self) -> bool:
        """Send what the socket takes; return True if something was sent."""
        moved = False
        while self.sending:
            try:
                sent = self.sock.sendmsg(self.sending)
            except BlockingIOError:
                return moved
            moved = self.has_begun = True
            while self.sending and sent >= len(self.sending[0]):
                sent -= len(self.sending.pop(0))
            if self.sending:
                self.sending[0] = self.sending[0][sent:]
            else:
                self.has_begun = False
                self.sending = self.later.popleft() if self.later else []
        return moved

    def drop_unsent(self) -> None:
        """Drop queued messages; the rest of one that was sent in part must follow."""
        self.later.clear()
        if not self.has_begun:
            self.sending = []

    # ---- in ---------------------------------------------------------------------------------------------------------

    def read_head(self) -> Head | None:
        """Return the header of the message that is being received, once it has arrived."""
        if self.head is None:
            self.got += self._receive(self.header[self.got :])
            if self.got < HEADER.size:
                return None
            head = Head(*HEADER.unpack(self.header))
            if head.magic != MAGIC or not DATA <= head.kind <= PING:
                raise ConnectionError("it does not send messages of a group")
            self.head, self.got = head, 0
        return self.head

    def read_body(self, body: memoryview) -> bool:
        """Receive into `body`; return True when the message is complete."""
        while self.got < len(body):
            got = self._receive(body[self.got :])
            if not got:
                return False
            self.got += got
        self.head, self.got = None, 0
        return True

    def read_report(self) -> bool:
        """Receive a report; return True when it is complete."""
        assert self.head is not None
        head, space = self.head, self.masks
        if head.num_bytes != MASKS.size:
            raise ConnectionError("its report has a wrong length")
        if not self.read_body(space):
            return False
        lost, done = (int.from_bytes(mask, "little") for mask in MASKS.unpack(space))
        self.report = LossReport(head.round, head.attempt, lost, done)
        return True

    def discard(self) -> bool:
        """Drop the body of this message; return True when all of it has arrived."""
        assert self.head is not None
        while left := self.head.num_bytes - self.got:
            got = self._receive(self.scratch_of(JUNK_BYTES)[: min(left, JUNK_BYTES)])
            if not got:
                return False
            self.got += got
        self.head, self.got = None, 0
        return True

    def scratch_of(self, num_bytes: int) -> memoryview:
        """Return memory for a body; a smaller one before is kept in place."""
        if len(self.scratch) < num_bytes:
            self.scratch = memoryview(np.empty(num_bytes, np.uint8))  # type: ignore[arg-type]
        return self.scratch[:num_bytes]

    def _receive(self, space: memoryview) -> int:
        try:
            got = self.sock.recv_into(space)
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionError("its connection is closed")
        self.heard_at = time.monotonic()
        return got
