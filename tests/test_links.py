"""The threads of a worker's links: whatever happens to them, the thread that waits hears of it."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rainband.errors import CoordinatorLost, ServerLost
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import Go, InitBlock, Message, Peer, Push, encode
from rainband.protocol.worker_stats import Stats
from rainband.transports.coordinator_link import CoordinatorLink
from rainband.transports.event_loop import EventLoop, readable_within
from rainband.transports.frames import MAX_HEADER_BYTES, FrameReader, pack
from rainband.transports.server_links import SEND_BUFFERS, TcpPort
from rainband.worker.state_transfer import ParameterValues
from tests.processes import DEADLINE_S, wait_for

ABOVE_SELECT = 1024  # the first file descriptor that select() refuses
SPECS = cut(arrange([LayoutEntry("w", (16,))]), 1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A worker's end of a connection, and the other."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def high(pair: tuple[socket.socket, socket.socket]) -> Iterator[socket.socket]:
    """The worker's end, as in a process with more than a thousand open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * ABOVE_SELECT)), hard))
    sock = socket.socket(fileno=fcntl.fcntl(pair[0].fileno(), fcntl.F_DUPFD_CLOEXEC, ABOVE_SELECT))
    yield sock
    sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def to_coordinator(
    sock: socket.socket, loop: EventLoop, deliver: Callable[[Message], object] = lambda message: None
) -> CoordinatorLink:
    return CoordinatorLink(sock, 0, loop, lambda message, body: deliver(message), Stats(), heartbeat_s=60.0)


def to_server(sock: socket.socket, loop: EventLoop) -> TcpPort:
    return TcpPort(Peer("server", 0), sock, 0, SPECS, loop, lambda message, body: None, Stats())


def test_the_coordinator_is_heard_above_file_descriptor_1023(
    high: socket.socket, pair: tuple[socket.socket, socket.socket]
) -> None:
    loop, heard = EventLoop(), list[Message]()
    to_coordinator(high, loop, heard.append)
    pair[1].sendall(pack(encode(Go()), None))
    assert loop.wait(DEADLINE_S)
    assert heard == [Go()]


def test_a_file_is_readable_when_it_has_something_or_has_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert not readable_within(ours, 0.0)
    theirs.send(b"x")
    assert readable_within(ours, 0.0)
    ours.recv(1)
    assert not readable_within(ours.fileno(), 0.0)
    theirs.close()
    assert readable_within(ours, DEADLINE_S)


def test_whatever_ends_a_receiving_thread_is_raised_where_the_worker_waits(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*sizes: object, **kwargs: object) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 64 bytes")

    loop = EventLoop()
    link = to_coordinator(pair[0], loop)
    monkeypatch.setattr(link.reader, "received", no_memory)
    pair[1].sendall(pack(encode(Go()), None))
    with pytest.raises(RuntimeError, match="not enough memory"):
        loop.wait(DEADLINE_S)


def test_a_message_too_large_to_send_is_raised_where_the_worker_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    loop = EventLoop()
    message = InitBlock(0, "float32", 16, part="x" * MAX_HEADER_BYTES)  # without values it would be sent as a body
    to_server(pair[0], loop).push(message, ParameterValues(torch.zeros(16)))
    with pytest.raises(ValueError, match="does not fit a frame"):
        loop.wait(DEADLINE_S)


def test_a_closed_connection_is_the_loss_of_its_other_end(pair: tuple[socket.socket, socket.socket]) -> None:
    loop = EventLoop()
    to_coordinator(pair[0], loop)
    pair[1].close()
    with pytest.raises(CoordinatorLost, match="the connection was closed"):
        loop.wait(DEADLINE_S)


def test_a_worker_that_pushes_faster_than_the_connection_waits_instead_of_keeping_every_gradient(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Fifty pushes of one block of 1 MB, as with n_fetch=50: at most 9 of them are in memory."""
    pushes, limit = 50, SEND_BUFFERS + 1
    specs = cut(arrange([LayoutEntry("w", (1 << 18,))]), 1)
    stats, buffers = Stats(), set[int]()
    port = TcpPort(Peer("server", 0), pair[0], 0, specs, EventLoop(), lambda message, body: None, stats)

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        def write(self, out: Tensor) -> None:
            buffers.add(out.data_ptr())
            written.append(self.number)
            out.fill_(self.number)

        def contiguous(self) -> Tensor | None:
            return None

    def push_all() -> None:
        for number in range(pushes):
            port.push(Push(0, 0, number, (), 1, number, 1, 0, "float32", 1 << 18), Numbered(number))

    written = list[int]()
    thread = threading.Thread(target=push_all, daemon=True)
    thread.start()
    wait_for(lambda: stats.waiting, "the worker to wait")
    assert written == list(range(limit))  # the first is being sent: it does not fit the socket's buffer
    reader, arrived = FrameReader(1 << 21), list[float]()
    while len(arrived) < pushes:
        for frame in reader.received(pair[1].recv_into(reader.space())):
            if frame.body is not None:
                values = torch.frombuffer(frame.body, dtype=torch.float32)
                assert values.min() == values.max()
                arrived.append(values[0].item())
    thread.join(DEADLINE_S)
    assert arrived == written == list(range(pushes))
    assert len(buffers) <= limit and not stats.waiting and stats.waited_s > 0.0


def test_a_worker_that_waits_to_send_hears_that_the_server_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    specs = cut(arrange([LayoutEntry("w", (1 << 18,))]), 1)
    port = TcpPort(Peer("server", 0), pair[0], 0, specs, EventLoop(), lambda message, body: None, Stats())
    values = ParameterValues(torch.zeros(1 << 18))
    closer = threading.Thread(target=lambda: wait_for(lambda: port.stats.waiting, "waiting") and pair[1].close())
    closer.start()
    with pytest.raises(ServerLost, match="lost server 0"):
        for number in range(50):
            port.push(Push(0, 0, number, (), 1, number, 1, 0, "float32", 1 << 18), values)
    closer.join()
