"""A worker's ways to a server: through shared memory on its own machine, by TCP to any other."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from rainband.errors import RainbandError, ServerLost
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Ack,
    BlockReady,
    Hello,
    InitBlock,
    Message,
    Opened,
    Params,
    Peer,
    Push,
    StatePart,
    decode,
    encode,
)
from rainband.protocol.ports import BlockValues, Settling
from rainband.protocol.worker_stats import Stats
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import (
    PREFIX_BYTES,
    BadFrame,
    FrameReader,
    check_body,
    check_header,
    pack,
    unpack_prefix,
)
from rainband.transports.shared_memory import Mailbox, Published

Deliver = Callable[[Message, Tensor | None], None]
MAILBOX_SLOTS = 8  # few, so that they stay in the cache between the two processes
OUTBOX_BUFFERS = 8  # likewise, where the sender waits for the answers anyway
MAX_BODY_BYTES = 1 << 26


class SharedPort:
    """To a server on this machine: copy into a mailbox slot, ring, read the answer from the published memory.

    No thread: the computing thread has to do the copying anyway. A slot belongs to the server from the ring until
    its answer, never to a timer.
    """

    direct = True

    def __init__(
        self,
        peer: Peer,
        sock: socket.socket,
        key: int,
        specs: Sequence[BlockSpec],
        event_loop: EventLoop,
        deliver: Deliver,
        stats: Stats,
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.key = key
        self.event_loop = event_loop
        self.deliver = deliver
        self.stats = stats
        self.reader = FrameReader(MAX_BODY_BYTES, key)
        slot_bytes = max((-(-spec.num_bytes // 64) * 64 for spec in specs), default=64)
        self.mailbox = Mailbox.create(min(MAILBOX_SLOTS, max(1, len(specs))), slot_bytes)
        self.free = deque(range(self.mailbox.slots))
        hello = Hello(self.mailbox.slots, slot_bytes)
        socket.send_fds(sock, [pack(encode(hello), None, key)], [self.mailbox.segment.fd])
        opened, fds = self._receive_opened()
        self.published = Published.open(fds[0], specs, opened.buffers)
        _close_in_children(sock)
        event_loop.watch(sock.fileno(), self._readable)

    def _receive_opened(self) -> tuple[Opened, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.sock, PREFIX_BYTES + 1024, 1)
        space = self.reader.space()
        space[: len(data)] = data
        for frame in self.reader.received(len(data)):
            message = decode(frame.header)
            if isinstance(message, Opened) and fds:
                return message, list(fds)
        raise ServerLost(str(self.peer), "opening the shared memory")

    def send(self, message: Message) -> None:
        self._send(message)

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        if not self.free:
            self._wait_for_room()
        slot = self.free.pop()  # the one used last: it is still in the cache
        values.write(self.mailbox.tensor(slot, message.dtype, message.numel))
        self._send(msgspec.structs.replace(message, slot=slot))

    def _wait_for_room(self) -> None:
        """The server is slower than we copy: that is waiting like any other, though for nobody by name."""
        stats, started = self.stats, time.monotonic()
        stats.waiting = True
        while not self.free:
            self.event_loop.wait()
        stats.waiting = False
        held_by, stats.held_by = stats.held_by, None
        stats.waited(time.monotonic() - started)
        stats.held_by = held_by

    def _send(self, message: Message) -> None:
        try:
            self.sock.sendall(pack(encode(message), None, self.key))
        except OSError as error:
            raise ServerLost(str(self.peer), f"pushing to it ({error.strerror})") from None

    def _readable(self) -> None:
        try:
            count = self.sock.recv_into(self.reader.space())
        except OSError:
            count = 0
        if count == 0:
            self.event_loop.unwatch(self.sock.fileno())  # say it once
            raise ServerLost(str(self.peer), "waiting for its answers")
        for frame in self.reader.received(count):
            message = decode(frame.header)
            if isinstance(message, Ack | BlockReady) and message.slot >= 0:
                self.free.append(message.slot)
            body = None if frame.body is None else torch.frombuffer(bytearray(frame.body), dtype=torch.uint8)
            self.deliver(message, body)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        if at_version >= 0:
            return at_version if self.published.read_round(spec.index, at_version, out) else None
        version, torn = self.published.read(spec.index, out)
        self.stats.torn_reads += torn
        return version


class TcpPort:
    """To a server anywhere: one thread sends, one receives, so that traffic overlaps computing.

    Payloads are copied once into a pooled buffer, which is free again when its bytes have left. Parameters arrive
    beside the worker's own, in an inbox. In an exchange nobody computes meanwhile: there bytes leave from where the
    gradient lies and arrive where the parameters lie.
    """

    direct = False

    def __init__(
        self,
        peer: Peer,
        sock: socket.socket,
        key: int,
        specs: Sequence[BlockSpec],
        event_loop: EventLoop,
        deliver: Deliver,
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.key = key
        self.event_loop = event_loop
        self.deliver = deliver
        self.inbox = {spec.index: torch.empty(spec.numel, dtype=getattr(torch, spec.dtype)) for spec in specs}
        self.pool: list[Tensor] = []
        self.views: Mapping[int, Tensor] = {}  # of the parameters, during an exchange
        self.exchanging = -1  # its sequence
        self.hot: list[Tensor] = []
        self.room = threading.Semaphore(OUTBOX_BUFFERS)
        self.largest = max((spec.num_bytes for spec in specs), default=0)
        self.outbox: queue.SimpleQueue[tuple[Message, Tensor | None, list[Tensor] | None]] = queue.SimpleQueue()
        _close_in_children(sock)
        for name, target in (("send", self._send_loop), ("receive", self._receive_loop)):
            threading.Thread(target=target, name=f"{name} {peer}", daemon=True).start()
        self.send(Hello())

    def send(self, message: Message) -> None:
        self.outbox.put((message, None, None))

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        waits = isinstance(message, Push) and message.want
        if waits and self.exchanging >= 0 and (payload := values.contiguous()) is not None:
            self.outbox.put((message, payload, None))
            return
        buffers = self.hot if waits else self.pool
        while waits and not self.room.acquire(timeout=0.5):  # few buffers, which stay in the cache
            self.event_loop.wait(0.0)  # raises when the connection is gone
        payload = buffers.pop() if buffers else torch.empty(self.largest, dtype=torch.uint8)
        values.write(payload[: _num_bytes(message)].view(getattr(torch, message.dtype)))
        self.outbox.put((message, payload, buffers))

    def lend(self, sequence: int, views: Mapping[int, Tensor]) -> None:
        self.exchanging, self.views = sequence, views

    def settle(self, pull: Settling) -> None:
        """Every block was answered, so every byte has left."""
        while not pull.ready():
            self.event_loop.wait()
        self.exchanging, self.views = -1, {}

    def _send_loop(self) -> None:
        try:
            while True:
                message, payload, buffers = self.outbox.get()
                body = None if payload is None else _bytes_of(payload)[: _num_bytes(message)]
                head = pack(encode(message), body, self.key)
                if body is None:
                    self.sock.sendall(head)
                    continue
                sent = self.sock.sendmsg([head, body])
                if sent < len(head):
                    self.sock.sendall(memoryview(head)[sent:])
                    sent = len(head)
                if sent < len(head) + len(body):
                    self.sock.sendall(body[sent - len(head) :])
                if buffers is not None and payload is not None:
                    buffers.append(payload)
                if buffers is self.hot:
                    self.room.release()
        except OSError as error:
            self._fail(ServerLost(str(self.peer), f"sending to it ({error.strerror})"))

    def _receive_loop(self) -> None:
        prefix = memoryview(bytearray(PREFIX_BYTES))
        try:
            while True:
                self._receive_exactly(prefix)
                fields = unpack_prefix(prefix, MAX_BODY_BYTES)
                header = bytearray(fields.header_bytes)
                self._receive_exactly(memoryview(header))
                check_header(fields, bytes(header), self.key)
                message = decode(bytes(header))
                payload = None
                if fields.body_bytes:
                    payload = self._receive_body(message, fields.body_bytes)
                    check_body(fields, _bytes_of(payload))
                self.event_loop.post(lambda m=message, p=payload: self.deliver(m, p))  # type: ignore[misc]
        except (OSError, BadFrame, msgspec.DecodeError) as error:
            self._fail(ServerLost(str(self.peer), f"waiting for its answers ({error})"))

    def _receive_body(self, message: Message, num_bytes: int) -> Tensor:
        payload = None
        if isinstance(message, Params):
            lent = message.sequence == self.exchanging
            payload = (self.views if lent else self.inbox).get(message.block)
        if isinstance(message, StatePart) and message.block in self.inbox:
            payload = torch.empty_like(self.inbox[message.block])
        if payload is None or payload.nbytes != num_bytes:
            raise BadFrame(f"a body of {num_bytes} bytes fits no block of {self.peer}")
        self._receive_exactly(_bytes_of(payload))
        return payload

    def _receive_exactly(self, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            count = self.sock.recv_into(memory[at:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise OSError(0, "the connection closed")
            at += count

    def _fail(self, error: RainbandError) -> None:
        def fail() -> None:
            raise error

        self.event_loop.post(fail)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("parameters come with the answer, there is nothing to read in place")


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _num_bytes(message: Message) -> int:
    if isinstance(message, Push | InitBlock):
        dtype: torch.dtype = getattr(torch, message.dtype)
        return message.numel * dtype.itemsize
    return 0


def _close_in_children(sock: socket.socket) -> None:
    """A forked data loader must not keep the connection open: the server would learn of our death seconds later."""
    fd = sock.fileno()

    def close() -> None:
        if sock.fileno() == fd:
            os.close(sock.detach())

    os.register_at_fork(after_in_child=close)
