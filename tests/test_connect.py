"""Connecting while the other side is busy, breaks off, belongs to somebody else, or is sooner than we are."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rainband.errors import CoordinatorLost, HandshakeFailed, PeerLost
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import COORDINATOR, Address, Assign, Message, Peer, StopRequest
from rainband.protocol.worker_stats import Stats
from rainband.runtimes.config import Job, RunConfig
from rainband.runtimes.processes.server_process import ServerProcess
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import connect, listen_tcp, listen_unix, this_machine
from rainband.transports.connection import Connection
from rainband.transports.event_loop import EventLoop, readable_within
from rainband.transports.hub import Hub
from rainband.transports.server_links import SharedPort
from tests.processes import DEADLINE_S
from tests.test_transports import PLAN

KEYS, RUN_ID = role_keys(new_secret()), new_run_id()
WORKER = Peer("worker", 0)


class Listening:
    """A hub that runs only while the test lets it, and its address."""

    def __init__(self, backlog: int = 128) -> None:
        self.hub = Hub(COORDINATOR, KEYS, RUN_ID, self, 1 << 16)
        name = f"rainband-test-{os.getpid()}-{id(self)}"
        self.socket = listen_unix(name)
        self.socket.listen(backlog)
        self.address = Address("", 0, name, this_machine())

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        """Ignore it: heartbeats."""

    def lost(self, peer: Peer) -> None:
        """Ignore it: the test closes connections."""

    def begin(self) -> None:
        self.hub.listen(self.socket)

    def serve(self, done: Callable[[], object]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until, "nobody came"
            self.hub.run_once(0.05)

    def peers(self) -> list[Peer]:
        return list(self.hub.peers)


@pytest.fixture
def listening() -> Iterator[Listening]:
    it = Listening()
    yield it
    it.hub.close()
    it.socket.close()


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do `work` in a thread; its result, or what it raised, is in the list when this is left."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield results
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it waits for ever"


def dial(address: Address) -> socket.socket:
    return connect(address, True, KEYS, RUN_ID, WORKER)[0]


def job(address: Address, role: str = "worker", timeout_s: float = 5.0) -> Job:
    config = RunConfig(
        task="",
        strategy="downpour",
        strategy_settings={"optimizer": "sgd", "lr": 0.5},
        num_workers=1,
        num_servers=1,
        failure_timeout_s=timeout_s,
    )
    return Job(role=role, index=0, run_id=RUN_ID, keys=KEYS, coordinator=address, config=config)


def test_a_worker_waits_longer_for_a_busy_coordinator_than_a_heartbeat_may_take(listening: Listening) -> None:
    link = WorkerLink(job(listening.address, timeout_s=0.01))
    with meanwhile(link.connect) as results:
        assert readable_within(listening.socket, DEADLINE_S)
        first, _ = listening.socket.accept()  # it is busy with something else now
        assert first.recv(1 << 10).startswith(b"RBHI")
        assert not readable_within(first, 0.1), "the worker has hung up"
        first.close()
        listening.begin()
        listening.serve(listening.peers)
    assert results == [None]
    assert link.control is not None
    link.control.sock.shutdown(socket.SHUT_RDWR)  # which ends its thread
    with pytest.raises(CoordinatorLost):
        link.wait(DEADLINE_S)
    link.control.sock.close()


def test_a_loop_that_uses_its_run_outside_the_with_block_is_told_to_write_one(listening: Listening) -> None:
    with pytest.raises(ValueError, match="put it inside a block, `with rainband.join"):
        WorkerLink(job(listening.address)).tell(StopRequest("converged"))


def test_a_peer_that_breaks_off_the_handshake_is_asked_again(listening: Listening) -> None:
    with meanwhile(lambda: dial(listening.address)) as results:
        for _ in range(2):
            listening.socket.accept()[0].close()
        listening.begin()
        listening.serve(listening.peers)
    (sock,) = results
    assert isinstance(sock, socket.socket), sock
    sock.close()


def test_a_socket_with_a_full_queue_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded, turned_away = Listening(backlog=0), threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: turned_away.set())
    strangers = []
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.setblocking(False)
        strangers.append(stranger)
        try:
            stranger.connect(b"\0" + crowded.address.unix.encode())
        except BlockingIOError:
            break
    with meanwhile(lambda: dial(crowded.address)) as results:
        assert turned_away.wait(DEADLINE_S)
        crowded.begin()
        crowded.serve(crowded.peers)
    (sock,) = results
    assert isinstance(sock, socket.socket), sock
    for each in (sock, *strangers, crowded.socket):
        each.close()
    crowded.hub.close()


def test_a_peer_that_has_ended_is_not_waited_for(listening: Listening) -> None:
    listening.socket.close()
    with pytest.raises(PeerLost, match="Connection refused"):
        dial(listening.address)


def test_a_peer_that_never_answers_is_given_up_and_the_time_is_reported(listening: Listening) -> None:
    with pytest.raises(HandshakeFailed, match=r"did not answer within 0\.01 s"):
        connect(listening.address, True, KEYS, RUN_ID, WORKER, timeout_s=0.01)


def test_a_connection_of_another_user_is_closed_before_it_is_read(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    listening.begin()
    for _ in range(3):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(DEADLINE_S)
        stranger.connect(b"\0" + listening.address.unix.encode())
        listening.hub.run_once(DEADLINE_S)
        assert stranger.recv(1) == b"" and not listening.hub.connections
        stranger.close()
    assert f"another user of this machine (user ID {me})" in caplog.text


def test_a_socket_of_another_user_learns_nothing(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(HandshakeFailed, match=f"belongs to user {me}, and this process to {me + 1}"):
        dial(listening.address)
    monkeypatch.undo()
    sock, _ = listening.socket.accept()
    assert sock.recv(1) == b""
    sock.close()


def test_a_hello_that_waited_for_a_busy_hub_is_answered_although_its_time_is_over(listening: Listening) -> None:
    listening.begin()
    with meanwhile(lambda: connect(listening.address, True, KEYS, RUN_ID, WORKER, DEADLINE_S)[0]) as results:
        listening.serve(lambda: listening.hub.connections)  # accepted, and then the hub was busy with a large message
        (connection,) = listening.hub.connections.values()
        connection.deadline = time.monotonic()
        listening.serve(listening.peers)
    assert listening.hub.connections == {connection.sock.fileno(): connection}  # it was not asked to try again
    results[0].close()


def test_a_worker_that_is_sooner_than_the_blocks_gets_them_when_they_are_there() -> None:
    process = ServerProcess(job(Address("", 0), "server"), listen_tcp("127.0.0.1"))
    name = f"rainband-test-{os.getpid()}-{id(process)}"
    listener = listen_unix(name)
    process.hub.listen(listener)
    layout = arrange([LayoutEntry("w", (16,))])
    specs = cut(layout, 1)
    until = time.monotonic() + DEADLINE_S

    def open_port() -> SharedPort:
        sock, _, key = connect(Address("", 0, name, this_machine()), True, KEYS, RUN_ID, WORKER)
        return SharedPort(Peer("server", 0), sock, key, specs, EventLoop(), lambda message, body: None, Stats())

    with meanwhile(open_port) as results:
        while not process.unopened and not results and time.monotonic() < until:
            process.hub.run_once(0.05)
        assert not results, results
        process.receive(_FromCoordinator(), Assign(PLAN, specs, layout.groups, 1), None)  # type: ignore[arg-type]
        process.hub.run_once(0.0)
    (port,) = results
    assert isinstance(port, SharedPort), port
    listener.close()
    assert port.published.read(0, port.published.values[0][0].clone()) == (0, 0)
    process.hub.close()
    process.tcp.close()
    port.sock.close()


class _FromCoordinator:
    peer = COORDINATOR
    mailbox = None
