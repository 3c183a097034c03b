"""Runs on several machines, which are network namespaces: workers join, leave, and lose their connections."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rainband.errors import RainbandError
from rainband.protocol import events
from rainband.protocol.messages import (
    Address,
    Heartbeat,
    Leave,
    MachineJoin,
    Peer,
    ProcessEnded,
    ServerJoin,
    Shutdown,
    encode,
)
from rainband.runtimes.checkpoints.place import opened
from rainband.runtimes.machines.invitation import read_invitation
from rainband.runtimes.machines.software import own_software
from rainband.transports.connect import connect, this_machine
from rainband.transports.frames import pack
from rainband.transports.hub import MAX_UNKNOWN
from tests.machines import Machines, break_connections
from tests.processes import DEADLINE_S, Run, RunLauncher, enter_namespace, exact, wait_for
from tests.test_launcher import balanced

pytestmark = pytest.mark.processes

PORT = 7070


@contextmanager
def listening(
    launcher: RunLauncher, path: Path, machines: Machines, workers: int = 1, planned: int = 1, **changes: Any
) -> Iterator[Run]:
    """A gated run on the first machine that others may join."""
    options = {"listen": f"{machines.address(0)}:{PORT}", "num_local": workers, **changes.pop("options", {})}
    with launcher.run(
        path, workers=planned, namespace=machines.names[0], transport="auto", options=options, **changes
    ) as run:
        yield run


def dripping(run: Run, found: Callable[[], bool]) -> None:
    """Let one batch pass at a time, of any worker that is at the gate, until something is so."""

    def look() -> bool:
        if run.gate.is_dry():
            run.gate.let(1)
        return found()

    wait_for(look, "it, with one batch at a time")


def finished_exactly(run: Run) -> bool:
    result = run.result()
    assert (result.outcome, result.exit_code) == ("finished", 0), result.reason
    assert balanced(result), result.accounting
    return exact(run)


def write_name(job: bytes, fds: list[int]) -> None:
    """Write the name of this machine, seen from a network namespace, into a file."""
    enter_namespace(job.decode())
    with open(fds[0], "w") as file:
        file.write(this_machine())


def test_namespaces_are_different_machines(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    names = []
    for index in (0, 1):
        path = tmp_path / str(index)
        with path.open("w") as file:
            launcher.zygote.spawn(
                "tests.test_machines:write_name", machines.names[index].encode(), "name", [file.fileno()]
            )
        names.append(wait_for(path.read_text, "the name of a machine"))
    assert len({*names, this_machine()}) == 3


@pytest.mark.parametrize(
    "strategy", ["downpour", "shared", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sync", "stale_sync"))]
)
def test_a_worker_of_another_machine_joins_in_the_middle(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, strategy: str
) -> None:
    planned = 2 if strategy == "sync" else 1  # batches of a round: with one, worker 0 would always have it
    with listening(launcher, tmp_path, machines, strategy=strategy, planned=planned) as run:
        run.gate.let(16)
        wait_for(run.gate.is_dry, "the first batches")
        joined = run.join(machines.names[1], "--workers", "1")
        links = 1 if strategy == "shared" else 2
        assert run.first(events.Linked, worker=1).links == ("tls",) * links
        assert run.first(events.Linked, worker=0).links == ("shm",) * links
        run.gate.let(16)
        wait_for(lambda: len(run.gate.begun()) == 2, "work for the worker that has joined")
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)
    assert run.all(events.MachineJoined)[0].workers == (1,)
    assert not (run.directory / "invite.txt").exists()


def test_a_machine_that_does_not_fit_says_why_and_the_run_goes_on(
    launcher: RunLauncher, tmp_path: Path, machines: Machines
) -> None:
    """One has fewer samples, and one lacks the file with their number."""
    folders = [tmp_path / name for name in ("here", "fewer", "none")]
    for folder, content in zip(folders, ("1024", "512", ""), strict=True):
        folder.mkdir()
        (folder / "samples").write_text(content) if content else None
    here, fewer, none = (str(folder) for folder in folders)
    with listening(launcher, tmp_path, machines, folder=here, file="samples") as run:
        run.gate.let(8)
        wait_for(run.gate.is_dry, "the first batches")
        differs = run.join(machines.names[1], "--workers", "1", folder=fewer)
        assert differs.ended() == 1, differs.printed()
        fails = run.join(machines.names[1], "--workers", "1", folder=none)
        assert fails.ended() == 1, fails.printed()
        run.gate.open()
    assert finished_exactly(run)
    assert "worker 1 has ended: worker 1 does not fit this run: " in differs.printed()
    assert "the number of samples is 512, not 1024" in differs.printed()
    assert "Traceback (most recent call last)" in fails.printed()
    assert "worker 2 has ended: its code failed before it could start: FileNotFoundError" in fails.printed()
    assert [event.node for event in run.all(events.Lost)] == ["worker 1", "worker 2"]
    assert run.all(events.UserError) == []


def test_the_model_comes_home_when_all_workers_are_elsewhere(
    launcher: RunLauncher, tmp_path: Path, machines: Machines
) -> None:
    """So does its last checkpoint, of a run that is stopped; with it, the workers of that machine continue."""
    often = {"checkpoint_every_s": 300.0}
    with listening(launcher, tmp_path, machines, workers=0, options=often) as run:
        joined = run.join(machines.names[1], "--workers", "2")
        run.gate.let(20)
        run.done(10)
        run.signal(signal.SIGTERM)
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
        assert run.ended() == 75, run.result().reason
    [folder] = (run.directory / "checkpoints").iterdir()
    opened(str(folder)).verify()
    (again := tmp_path / "again").mkdir()
    with listening(launcher, again, machines, workers=0, options={"resume_from": str(folder)}) as run:
        run.gate.open()
        joined = run.join(machines.names[1], "--workers", "2")
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)


@pytest.mark.parametrize("strategy", ["downpour", "shared"])
def test_ctrl_c_on_the_other_machine_gives_its_batches_back(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, strategy: str
) -> None:
    with listening(launcher, tmp_path, machines, strategy=strategy) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        run.first(events.Linked, worker=1)
        run.gate.let(8)
        wait_for(lambda: run.gate.is_dry() and len(run.gate.begun()) == 2, "work for both")
        joined.interrupt()
        wait_for(lambda: "leaving" in joined.printed(), "the machine to leave")
        run.gate.open()
        assert joined.ended() == 130, joined.printed()
    assert finished_exactly(run)
    assert [event.node for event in run.all(events.Lost)] == ["worker 1"]
    assert [event.left for event in run.all(events.MachineJoined)] == ["", "Ctrl-C there"]


def test_ctrl_c_ends_workers_at_once_that_have_not_joined_yet(
    launcher: RunLauncher, tmp_path: Path, machines: Machines
) -> None:
    """They may import for long, and would train on to the end of the run."""
    with listening(launcher, tmp_path, machines, slow_build=True) as run:
        run.gate.let_build(1)
        wait_for(run.gate.begun, "the first batch")
        joined = run.join(machines.names[1], "--workers", "1")
        wait_for(lambda: "as worker 1" in joined.printed(), "the welcome of the machine")
        joined.interrupt()
        assert joined.ended() == 130, joined.printed()
        run.gate.open()
    assert finished_exactly(run)
    assert not run.all(events.Joined, node="worker 1")


def test_a_server_may_run_on_another_machine(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    """It joins before the run begins; then the machine asks once more, and is told that servers are too late."""
    there, address = machines.names[1], machines.address(1)
    bring = ("--servers", "1", "--workers", "1", "--listen", f"{address}:{PORT}")
    with listening(launcher, tmp_path, machines, planned=2, servers=1, options={"min_workers": 2}) as run:
        joined = run.join(there, *bring)
        assert run.first(events.Linked, worker=0).links == ("shm", "tls")
        assert run.first(events.Linked, worker=1).links == ("tls", "shm")
        late = run.join(there, *bring[:-1], f"{address}:{PORT + 1}")
        assert late.ended() == 1 and "the run has begun, and its servers cannot change any more" in late.printed()
        doctor = run.command(there, "doctor", "--to", str(run.directory / "invite.txt"))
        assert doctor.ended() == 0, doctor.printed()
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)


@pytest.mark.parametrize("strategy", ["downpour", pytest.param("sync", marks=pytest.mark.slow), "shared"])
def test_a_machine_that_is_cut_off_returns(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, strategy: str
) -> None:
    with listening(launcher, tmp_path, machines, planned=2, strategy=strategy, timeout_s=1.0) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        wait_for(lambda: run.gate.is_dry() and len(run.gate.begun()) == 2, "work for both")
        machines.cut(1)
        run.first(events.Lost, node="worker 1")  # for more than the failure timeout
        run.gate.let(4)
        machines.restore(1)
        dripping(run, lambda: bool(run.all(events.Returned, node="worker 1")))
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)


@pytest.mark.parametrize("strategy", ["downpour", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_cut_that_is_shorter_than_the_failure_timeout_is_not_noticed(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, strategy: str
) -> None:
    with listening(launcher, tmp_path, machines, planned=2, strategy=strategy, timeout_s=30.0) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        wait_for(lambda: run.gate.is_dry() and len(run.gate.begun()) == 2, "work for both")
        machines.cut(1)
        run.gate.let(2)
        wait_for(run.gate.is_dry, "batches of which some cannot be pushed")
        machines.restore(1)
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)
    assert not run.all(events.Lost) and not run.all(events.BatchesReassigned)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour", "shared"])
def test_machines_may_come_and_go_all_the_time(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, strategy: str
) -> None:
    with listening(launcher, tmp_path, machines, strategy=strategy, samples=1 << 15) as run:
        for rank in range(1, 6):
            joined = run.join(machines.names[1], "--workers", "1")
            run.first(events.Linked, worker=rank)
            joined.interrupt()
            dripping(run, joined.has_ended)
            assert joined.ended() == 130, joined.printed()
        run.gate.open()
    assert finished_exactly(run)
    assert [event.workers for event in run.all(events.MachineJoined, left="")] == [(rank,) for rank in range(1, 6)]


@pytest.mark.slow
def test_a_machine_that_vanishes_is_replaced(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    """Its connections stay half open: nothing tells the run that it is gone."""
    with listening(launcher, tmp_path, machines, planned=2, strategy="shared", timeout_s=1.0) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        wait_for(lambda: run.gate.is_dry() and len(run.gate.begun()) == 2, "work for both")
        machines.cut(1)
        run.first(events.Lost, node="worker 1")
        run.gate.open()
        run.ended()
        machines.restore(1)
        assert joined.ended() is not None
    assert finished_exactly(run)


@pytest.mark.slow
def test_connections_that_break_are_made_again(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    with listening(launcher, tmp_path, machines) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        wait_for(lambda: len(run.gate.begun()) == 2, "work for both")
        break_connections(machines, 1)
        run.gate.let(2)  # the one that computes notices it afterwards
        run.first(events.Lost, node="worker 1")
        wait_for(lambda: len(run.all(events.Joined, node="worker 1")) == 2, "the worker to join again")
        wait_for(lambda: len(run.gate.begun()) == 3, "work for its next incarnation")
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert finished_exactly(run)


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "a node without TLS": b"RBHI\x01" + bytes(89),
    "half a TLS client": b"\x16\x03\x01\x02\x00\x01" + bytes(600),
}


@pytest.mark.parametrize("bytes_sent", STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_are_turned_away(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, bytes_sent: bytes
) -> None:
    with listening(launcher, tmp_path, machines) as run:
        invitation = run.directory / "invite.txt"
        wait_for(invitation.is_file, "the invitation")
        answers = tmp_path / "answers"
        with answers.open("wb") as file:
            launcher.zygote.spawn(
                "tests.test_machines:send_bytes", machines.names[1].encode() + b" " + bytes_sent, "", [file.fileno()]
            )
        wait_for(lambda: answers.stat().st_size, "the end of the connection")
        assert answers.read_bytes()[-1:] == b"."  # closed; at most an alert of TLS came before
        assert b"RBHI" not in answers.read_bytes()
        run.gate.open()
    assert finished_exactly(run)


def send_bytes(job: bytes, fds: list[int]) -> None:
    """Send bytes to the run from another machine; write what comes back, and a full stop when it is closed."""
    name, _, sent = job.partition(b" ")
    enter_namespace(name.decode())
    sock = socket.create_connection((Machines(1).address(0), PORT))
    sock.sendall(sent)
    with open(fds[0], "wb") as file:
        try:
            while data := sock.recv(4096):
                file.write(data)
        except ConnectionError:
            pass
        file.write(b".")


def attack(job: bytes, fds: list[int]) -> None:
    """Do to a run from another machine what must change nothing, and write how each attempt ended."""
    name, _, path = job.decode().partition(" ")
    enter_namespace(name)
    invitation = read_invitation(path)
    where, run_id = invitation.address, invitation.run_id
    me, keys = Peer("machine", 1), {"machine": invitation.key}
    idle = [socket.create_connection((where.host, where.port)) for _ in range(MAX_UNKNOWN)]

    def outcome(run: Callable[[], object]) -> str:
        try:
            run()
        except RainbandError as error:
            return f"{type(error).__name__}: {error}"
        return "admitted"

    def after_welcome(sent: bytes) -> str:
        sock, _, key = connect(where, False, keys, run_id, me, DEADLINE_S)
        with sock:
            sock.sendall(sent or b"".join(pack(encode(message), None, key) for message in FORBIDDEN))
            sock.settimeout(1.0)
            try:
                return "closed" if not sock.recv(1) else "answered"
            except TimeoutError:
                return "ignored"
            except ConnectionError:
                return "closed"

    outcomes = [
        outcome(lambda: connect(where, False, {"machine": bytes(32)}, run_id, me, DEADLINE_S)),
        outcome(lambda: connect(where, False, keys, bytes(16), me, DEADLINE_S)),
        outcome(lambda: connect(where, False, {"server": invitation.key}, run_id, Peer("server", 0), DEADLINE_S)),
        after_welcome(b"\xff" * 64),
        after_welcome(pack(encode(Heartbeat()), None, 0)[:-1] + b"?"),
        after_welcome(b""),
    ]
    with open(fds[0], "w") as file:
        file.write("\n".join(outcomes) + "\nend")
    for sock in idle:
        sock.close()


FORBIDDEN = [
    MachineJoin("attacker", own_software(), 1),  # a machine may join, and then act for itself only
    MachineJoin("attacker", own_software(), 0, ranks=(0,)),  # it has not brought this worker
    Shutdown("by a stranger"),
    ProcessEnded(Peer("worker", 0), "a lie"),
    ServerJoin(Address("", 0), ""),
    Leave(),
]


def test_attacks_from_another_machine_change_nothing(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    with listening(launcher, tmp_path, machines) as run:
        invitation = run.directory / "invite.txt"
        wait_for(invitation.is_file, "the invitation")
        path = tmp_path / "outcomes"
        with path.open("w") as file:
            job = f"{machines.names[1]} {invitation}".encode()
            launcher.zygote.spawn("tests.test_machines:attack", job, "", [file.fileno()])
        wait_for(lambda: path.read_text().endswith("end"), "the end of the attacks")
        key, other_run, role, *after = path.read_text().splitlines()[:-1]
        assert "secret mismatch" in key and "another run" in other_run and "secret mismatch" in role
        assert after == ["closed", "closed", "answered"]  # by the welcome of a machine
        run.gate.open()
    assert finished_exactly(run)
    assert not run.all(events.Lost)


def test_the_secret_is_in_the_invitation_only(launcher: RunLauncher, tmp_path: Path, machines: Machines) -> None:
    with listening(launcher, tmp_path, machines) as run:
        joined = run.join(machines.names[1], "--workers", "1")
        run.first(events.Linked, worker=1)
        invitation = run.directory / "invite.txt"
        assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
        key = invitation.read_text().partition('"key":"')[2].partition('"')[0]
        assert len(key) > 40
        shown = [" ".join(process.cmdline()) + str(process.environ()) for process in launcher.processes()]
        assert not any(key in text for text in shown)
        run.gate.open()
        assert joined.ended() == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(key.encode() in path.read_bytes() for path in files)
