"""The threads of a worker's links: whatever happens to them, the thread that waits hears of it."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from rainband.errors import CoordinatorLost
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import Go, InitBlock, Message, Peer, encode
from rainband.protocol.worker_stats import Stats
from rainband.transports.coordinator_link import CoordinatorLink
from rainband.transports.event_loop import EventLoop, readable_within
from rainband.transports.frames import MAX_HEADER_BYTES, pack
from rainband.transports.server_links import TcpPort
from rainband.worker.state_transfer import ParameterValues
from tests.processes import DEADLINE_S

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
    return TcpPort(Peer("server", 0), sock, 0, SPECS, loop, lambda message, body: None)


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
