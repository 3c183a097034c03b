"""`rainband doctor --to`: each step on the way to a run of another machine, and what to do where it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rainband.options import OptionError
from rainband.protocol.messages import MachineJoin, MachineWelcome, Message
from rainband.runtimes.machines.invitation import Invitation
from rainband.runtimes.machines.reach import Reached, reach
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import listen_tcp
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.tls.certificate import new_certificate
from tests.test_tls import CERTIFICATE, COORDINATOR

SECRET, RUN_ID = new_secret(), new_run_id()


class Listening:
    """A run that listens, and answers machines."""

    def __init__(self) -> None:
        self.answer = MachineWelcome(run="a-run")
        self.questions: list[MachineJoin] = []
        self.hub = Hub(COORDINATOR, role_keys(SECRET, "machine"), RUN_ID, self, 1 << 20)
        sock = listen_tcp("127.0.0.1")
        self.port: int = sock.getsockname()[1]
        self.hub.listen(sock, CERTIFICATE)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.over.is_set():
            self.hub.run_once(0.05)
        self.hub.close()

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        assert isinstance(message, MachineJoin)
        self.questions.append(message)
        self.hub.send(connection.peer, self.answer)

    def lost(self, peer: object) -> None:
        pass

    def invitation(self, path: Path, secret: bytes = SECRET, fingerprint: bytes = CERTIFICATE.fingerprint) -> str:
        file = path / "invite.txt"
        Invitation(
            run="a-run",
            run_id=RUN_ID,
            host="127.0.0.1",
            port=self.port,
            unix="",
            machine="",
            fingerprint=fingerprint,
            key=role_keys(secret, "machine")["machine"],
        ).write(file)
        return str(file)


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.over.set()
    made.thread.join()


def verdicts(found: Iterator[Reached]) -> list[tuple[str, bool]]:
    return [(one.name, one.is_good) for one in found]


def test_a_run_that_can_be_joined_is_found_in_four_steps(listening: Listening, tmp_path: Path) -> None:
    steps = [("address", True), ("connection", True), ("encryption", True)]
    assert verdicts(reach(f"localhost:{listening.port}")) == steps
    assert verdicts(reach(listening.invitation(tmp_path))) == [*steps, ("run", True)]
    assert [(question.workers, question.servers) for question in listening.questions] == [(0, 0)]  # it brings nothing


def test_a_run_that_refuses_this_machine_says_why(listening: Listening, tmp_path: Path) -> None:
    listening.answer = MachineWelcome(
        run="a-run", refused="b has torch 1 and the run's machine torch 2: install torch 2 on b."
    )
    last = list(reach(listening.invitation(tmp_path)))[-1]
    assert last == Reached("run", False, "a-run refuses this machine", listening.answer.refused)


def test_another_secret_or_certificate_is_noticed(listening: Listening, tmp_path: Path) -> None:
    last = list(reach(listening.invitation(tmp_path, secret=new_secret())))[-1]
    assert (last.name, last.is_good) == ("run", False) and "secret mismatch" in last.found
    (tmp_path / "invite.txt").unlink()
    other = new_certificate().fingerprint
    last = list(reach(listening.invitation(tmp_path, fingerprint=other)))[-1]
    assert (last.name, last.is_good) == ("encryption", False) and "rainband invite" in last.advice


def test_a_host_that_does_not_exist_and_a_port_without_listener_are_named() -> None:
    (unknown,) = reach("no-such-host.invalid:7070")
    assert (unknown.is_good, unknown.found) == (False, "there is no host named no-such-host.invalid")
    with listen_tcp("127.0.0.1") as closed:
        port = closed.getsockname()[1]
    _, refused = reach(f"127.0.0.1:{port}")
    assert (refused.is_good, refused.found) == (False, f"nothing listens on 127.0.0.1:{port}")


def test_another_program_at_the_address_is_noticed() -> None:
    with listen_tcp("127.0.0.1") as sock:

        def answer() -> None:
            client, _ = sock.accept()
            with client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        last = list(reach(f"127.0.0.1:{sock.getsockname()[1]}"))[-1]
        thread.join()
    assert (last.name, last.is_good) == ("encryption", False)
    assert "another program uses this port" in last.advice


def test_a_firewall_that_drops_packets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    last = list(reach("127.0.0.1:7070"))[-1]
    assert not last.is_good and "firewall" in last.found and "TCP port 7070" in last.advice


def test_an_address_needs_a_port() -> None:
    with pytest.raises(OptionError):
        list(reach("127.0.0.1"))
