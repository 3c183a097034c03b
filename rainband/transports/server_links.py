"""A worker's links to servers: through shared memory on its own machine, by TCP to any other."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from rainband.transports.frames import PREFIX_BYTES, BadFrame, Frame, FrameReader, pack
from rainband.transports.link import ThreadedLink, close_in_children
from rainband.transports.shared_memory import Mailbox, Published

Deliver = Callable[[Message, Tensor | None], None]
MAILBOX_SLOTS = 8  # few, so that they stay in the cache that worker and server share
SEND_BUFFERS = 8  # likewise, for pushes whose answers the worker waits for; others may fill a whole model more
MAX_BODY_BYTES = 1 << 26


@contextmanager
def counted_as_waiting(stats: Stats) -> Iterator[None]:
    """Count the time inside as waiting, but not for another worker."""
    started = time.monotonic()
    stats.waiting = True
    try:
        yield
    finally:
        stats.waiting = False
        held_by, stats.held_by = stats.held_by, None
        stats.waited(time.monotonic() - started)
        stats.held_by = held_by


class SharedPort:
    """A link to a server on this machine: values in mailbox slots, answers read from the published parameters.

    It has no thread: the computing thread must copy anyway. A slot belongs to the server from the message that names
    it until the answer; no timer takes it back.
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
        close_in_children(sock)
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
        try:
            self.sock.sendall(pack(encode(message), None, self.key))
        except OSError as error:
            raise ServerLost(str(self.peer), f"sending to it ({error.strerror})") from None

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        if not self.free:
            self._wait_for_room()
        slot = self.free.pop()  # the one used last: it is still in the cache
        values.write(self.mailbox.tensor(slot, *message.payload))
        self.send(msgspec.structs.replace(message, slot=slot))

    def _wait_for_room(self) -> None:
        """Wait until the server has answered a push."""
        with counted_as_waiting(self.stats):
            while not self.free:
                self.event_loop.wait()

    def _readable(self) -> None:
        try:
            count = self.sock.recv_into(self.reader.space())
        except OSError:
            count = 0
        if count == 0:
            self.event_loop.unwatch(self.sock.fileno())  # raise only once
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
        version, torn_reads = self.published.read(spec.index, out)
        self.stats.torn_reads += torn_reads
        return version


class SendBuffers:
    """A bounded number of buffers for values to send; a buffer is free again when its bytes have left."""

    def __init__(self, limit: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.room = threading.Semaphore(limit)
        self.unused: list[Tensor] = []

    def take(self, stats: Stats, event_loop: EventLoop) -> Tensor:
        """Return a buffer; wait for one if all are in use."""
        if not self.room.acquire(blocking=False):
            with counted_as_waiting(stats):
                while not self.room.acquire(timeout=0.5):
                    event_loop.wait(0.0)  # raises if the connection is lost
        return self.unused.pop() if self.unused else torch.empty(self.num_bytes, dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        self.unused.append(buffer)
        self.room.release()


class TcpPort(ThreadedLink):
    """A link to a server anywhere: one thread sends and one receives, so that transfers overlap computing.

    Values are copied once, into a buffer that is reused when its bytes have left; a worker that is faster than the
    connection waits for one. Parameters are received into an inbox beside the worker's own. In an exchange the worker
    does not compute: gradients are sent from where they lie, and parameters are received where they belong.
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
        stats: Stats,
    ) -> None:
        super().__init__(str(peer), sock, key, event_loop, MAX_BODY_BYTES, self._body_memory)
        self.deliver = deliver
        self.inbox = {spec.index: torch.empty(spec.numel, dtype=getattr(torch, spec.dtype)) for spec in specs}
        self.arriving: deque[tuple[Message, Tensor]] = deque()  # messages whose bodies are being received
        self.views: Mapping[int, Tensor] = {}  # the worker's parameters, during an exchange
        self.exchanging = -1  # the sequence of that exchange
        self.stats = stats
        largest = max((spec.num_bytes for spec in specs), default=0)
        self.waited_buffers = SendBuffers(SEND_BUFFERS, largest)  # few, which stay in the cache
        self.other_buffers = SendBuffers(SEND_BUFFERS + len(specs), largest)  # one push may leave while one is computed
        self.outbox: queue.SimpleQueue[tuple[Message, Tensor | None, SendBuffers | None]] = queue.SimpleQueue()
        close_in_children(sock)
        threading.Thread(target=self._send_all, name=f"send {peer}", daemon=True).start()
        self.start_receiving()
        self.send(Hello())

    def send(self, message: Message) -> None:
        self.outbox.put((message, None, None))

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        waited = isinstance(message, Push) and message.want
        if waited and self.exchanging >= 0 and (payload := values.contiguous()) is not None:
            self.outbox.put((message, payload, None))
            return
        buffers = self.waited_buffers if waited else self.other_buffers
        payload = buffers.take(self.stats, self.event_loop)
        values.write(payload[: _num_bytes(message)].view(getattr(torch, message.payload[0])))
        self.outbox.put((message, payload, buffers))

    def lend(self, sequence: int, views: Mapping[int, Tensor]) -> None:
        self.exchanging, self.views = sequence, views

    def settle(self, pull: Settling) -> None:
        while not pull.ready():
            self.event_loop.wait()
        self.exchanging, self.views = -1, {}  # every block has answered, so every byte has left

    def _send_all(self) -> None:
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
                    buffers.give_back(payload)
        except OSError as error:
            self.fail(ServerLost(self.name, f"sending to it ({error.strerror})"))
        except Exception as error:
            self.fail(error)

    def frame_received(self, frame: Frame) -> None:
        message, payload = (decode(frame.header), None) if frame.body is None else self.arriving.popleft()
        self.event_loop.post(lambda: self.deliver(message, payload))

    def _body_memory(self, header: bytes, num_bytes: int) -> memoryview:
        message = decode(header)
        payload = None
        if isinstance(message, Params) and message.encoded and message.block in self.inbox:
            if message.encoded != num_bytes or num_bytes >= self.inbox[message.block].nbytes:
                raise BadFrame(f"a body of {num_bytes} bytes is not what block {message.block} becomes encoded")
            payload = torch.empty(num_bytes, dtype=torch.uint8)
        elif isinstance(message, Params):
            payload = (self.views if message.sequence == self.exchanging else self.inbox).get(message.block)
        if isinstance(message, StatePart) and message.block in self.inbox:
            payload = torch.empty_like(self.inbox[message.block])
        if payload is None or payload.nbytes != num_bytes:
            raise BadFrame(f"a body of {num_bytes} bytes fits no block of {self.name}")
        self.arriving.append((message, payload))
        return _bytes_of(payload)

    def lost(self, reason: str) -> RainbandError:
        return ServerLost(self.name, f"waiting for its answers ({reason})")

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("over TCP, parameters arrive with the reply")


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _num_bytes(message: Message) -> int:
    if isinstance(message, Push | InitBlock):
        name, number = message.payload
        dtype: torch.dtype = getattr(torch, name)
        return number * dtype.itemsize
    return 0
