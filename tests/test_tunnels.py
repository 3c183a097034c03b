"""Workers that cannot reach each other: tunnels through the machine of the run, encrypted from end to end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol import events
from rainband.protocol.messages import COORDINATOR, Address, Message, OpenTunnel, Peer, encode
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import connect, listen_tcp
from rainband.transports.connection import Connection
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import pack
from rainband.transports.hub import Hub
from rainband.transports.peers import PeerLinks
from rainband.transports.tls.certificate import Certificate, new_certificate
from rainband.transports.tunnels.dial import ROLE, TunnelDialer
from rainband.transports.tunnels.host import Tunnel, TunnelHost
from tests.machines import Machines, machines_of
from tests.processes import DEADLINE_S, RunLauncher, wait_for
from tests.stage_tasks import Shaped, planned
from tests.test_machines import PORT
from tests.test_peers import at_once, get
from tests.test_stages_local import STAGED

SECRET = new_secret()


class RunMachine:
    """The run's machine, as far as tunnels go: it knows two workers."""

    def __init__(self, certificate: Certificate | None) -> None:
        self.run_id = new_run_id()
        self.links: list[PeerLinks] = []
        self.hub = Hub(COORDINATOR, role_keys(SECRET, ROLE), self.run_id, self, 1 << 16)
        self.tunnels = TunnelHost(self.hub, self.worker, self.ask)
        listener = listen_tcp("127.0.0.1")
        fingerprint = certificate.fingerprint if certificate else b""
        self.address = Address("127.0.0.1", listener.getsockname()[1], "", "elsewhere", fingerprint)
        self.hub.listen(listener, certificate)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def worker(self, index: int) -> Peer | None:
        return Peer("worker", index) if index < len(self.links) else None

    def ask(self, to: Peer, worker: int) -> None:
        link = self.links[to.index]
        link.event_loop.post(lambda: link.answer(worker))

    def run(self) -> None:
        while not self.over.is_set():
            self.hub.run_once(0.02)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        self.tunnels.receive(connection, message)

    def lost(self, peer: Peer) -> None:
        self.tunnels.lost(peer)

    def link(self, index: int) -> PeerLinks:
        keys = role_keys(SECRET, "worker", ROLE)
        dialer = TunnelDialer(index, self.address, keys, self.run_id)
        link = PeerLinks(Peer("worker", index), keys, self.run_id, EventLoop(), "tcp", DEADLINE_S, tunnels=dialer)
        self.links.append(link)
        return link

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.tunnels.close()
        self.hub.close()


@contextmanager
def run_machine(encrypted: bool) -> Iterator[RunMachine]:
    run = RunMachine(new_certificate() if encrypted else None)
    try:
        yield run
    finally:
        for link in run.links:
            link.close()
        run.close()


def unreachable(address: Address) -> Address:
    """Return an address at which nobody listens, in place of a worker's own."""
    with listen_tcp("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    return Address("127.0.0.1", port, "", "elsewhere", address.fingerprint)


@pytest.mark.parametrize("encrypted", [True, False])
def test_workers_that_cannot_reach_each_other_send_through_the_runs_machine(encrypted: bool) -> None:
    with run_machine(encrypted) as run:
        links = [run.link(index) for index in range(2)]
        own = [link.listen("127.0.0.1", new_certificate() if encrypted else None) for link in links]
        addresses = {index: unreachable(address) for index, address in enumerate(own)}
        at_once(*(lambda link=link: link.connect(addresses) for link in links))  # type: ignore[misc]
        assert links[1].transports == {0: "tunnel"}
        sent = torch.arange(1 << 20, dtype=torch.float32)
        at_once(
            lambda: links[0].send(1, ("down",), sent),
            lambda: links[1].send(0, ("up",), -sent),
        )
        assert torch.equal(get(links[1], 0, "down"), sent) and torch.equal(get(links[0], 1, "up"), -sent)
        (tunnel,) = run.tunnels.tunnels
        assert tunnel.workers == (1, 0) and min(tunnel.num_bytes) >= sent.nbytes


def test_workers_that_reach_each_other_need_no_tunnel() -> None:
    with run_machine(encrypted=True) as run:
        links = [run.link(index) for index in range(2)]
        addresses = {index: link.listen("127.0.0.1", new_certificate()) for index, link in enumerate(links)}
        at_once(*(lambda link=link: link.connect(addresses) for link in links))  # type: ignore[misc]
        assert links[1].transports == {0: "tls"} and not run.tunnels.tunnels


def test_the_runs_machine_cannot_take_the_place_of_the_other_worker() -> None:
    """Both ends compare certificates: here the tunnel ends at a worker with another one than was announced."""
    with run_machine(encrypted=True) as run:
        links = [run.link(index) for index in range(2)]
        announced = [unreachable(link.listen("127.0.0.1", new_certificate())) for link in links]
        other = unreachable(Address("", 0, "", "", new_certificate().fingerprint))
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                links[0].event_loop.wait(0.02)

        def call() -> None:
            try:
                with pytest.raises(HandshakeFailed, match="the certificate is not the one"):
                    links[1].connect({0: other, 1: announced[1]})
            finally:
                stop.set()

        at_once(answer, call)


@pytest.mark.parametrize("message", [OpenTunnel(0, 7), OpenTunnel(0, 1, answers=True), OpenTunnel(0, 0, answers=True)])
def test_an_end_that_nobody_waits_for_is_refused(message: OpenTunnel) -> None:
    with run_machine(encrypted=False) as run:
        run.link(0)
        me = Peer(ROLE, 1)
        sock, _, key = connect(run.address, False, role_keys(SECRET, ROLE), run.run_id, me, DEADLINE_S)
        with sock:
            sock.sendall(pack(encode(message), None, key))
            sock.settimeout(DEADLINE_S)
            assert sock.recv(1) == b""
        assert not run.tunnels.waiting


def test_a_worker_that_is_not_there_is_named() -> None:
    with run_machine(encrypted=True) as run:
        (link,) = (run.link(0),)
        link.listen("127.0.0.1", new_certificate())
        dialer = TunnelDialer(0, run.address, role_keys(SECRET, ROLE), run.run_id)
        with pytest.raises(PeerLost, match="worker 5 while opening a tunnel to it .the run's machine does not know it"):
            dialer.dial(5, time.monotonic() + DEADLINE_S)


def test_a_tunnel_ends_with_either_end() -> None:
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    tunnel = Tunnel((1, 0), theirs)
    ours[0].sendall(b"last words")
    ours[0].close()
    assert ours[1].recv(64) == b"last words" and ours[1].recv(64) == b""
    ours[1].close()
    wait_for(lambda: not tunnel.is_open, "the end of the tunnel")
    assert tunnel.num_bytes == [10, 0]
    tunnel.close()


# ---- real machines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[Machines]:
    with machines_of(3) as made:
        yield made


@pytest.mark.processes
def test_stages_on_machines_that_reach_only_the_first_one(
    launcher: RunLauncher, tmp_path: Path, three: Machines
) -> None:
    three.separate()
    with launcher.run(
        tmp_path,
        "downpour",
        servers=1,
        stage_plan=planned(Shaped("chain"), 2),
        namespace=three.names[0],
        transport="auto",
        options={"listen": f"{three.address(0)}:{PORT}", "num_local": 0, "min_workers": 2},
        name="chain",
        samples=40,
        **STAGED,
    ) as run:
        joined = [run.join(name, "--workers", "1") for name in three.names[1:]]
        result = run.result()
        assert [one.ended() for one in joined] == [0, 0], [one.printed() for one in joined]
    assert (result.outcome, result.accounting["applied"]) == ("finished", 10), result.reason
    assert (run.directory / "model.safetensors").exists()
    assert {linked.peers for linked in run.all(events.Linked)} == {(), ((0, "tunnel"),)}  # the later one dials
    opened, closed = run.all(events.Tunneled)
    assert opened.workers == closed.workers == (1, 0) and closed.num_bytes > opened.num_bytes == 0
