"""Addresses of runs on several machines: names, IPv6, several network cards, ports in use, and errors with remedies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from rainband.errors import HandshakeFailed
from rainband.options import OptionError
from rainband.runtimes.machines.doors import Doors
from rainband.runtimes.machines.invitation import Invitation
from rainband.runtimes.machines.joiner import Joiner, JoinOptions
from rainband.runtimes.processes.zygote import Zygote
from rainband.transports.connect import listen_tcp
from tests.machines import Machines
from tests.processes import RunLauncher, exact, wait_for

PORT = 7070


def refused(text: str, listen: str, advertise: str = "", num_servers: int = 1) -> None:
    with pytest.raises(OptionError, match=text):
        Doors(listen, advertise, num_servers)


def opened(listen: str, advertise: str = "", num_servers: int = 1) -> tuple[str, list[int]]:
    doors = Doors(listen, advertise, num_servers)
    doors.close()
    return doors.host, doors.ports


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], None]:
    """Give this machine network cards with these addresses, and one that is switched off."""
    import psutil

    def have(hosts: Sequence[str]) -> None:
        kinds = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in (*hosts, "127.0.0.1", "::1")]
        found = {str(number): [SimpleNamespace(family=kind, address=host)] for number, (kind, host) in enumerate(kinds)}
        states = {name: SimpleNamespace(isup=True) for name in found} | {"off": SimpleNamespace(isup=False)}
        off = {"off": [SimpleNamespace(family=socket.AF_INET, address="10.9.9.9")]}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: found | off)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: states)

    return have


def test_a_port_in_use_is_named_also_that_of_a_server() -> None:
    with listen_tcp("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        refused(
            f"cannot listen on 127.0.0.1 port {port}: another program uses this port. Choose another",
            f"127.0.0.1:{port}",
        )
        if port > 1024:
            text = f"port {port}: another program uses this port.* The servers use the ports {port} and up"
            refused(text, f"127.0.0.1:{port - 1}")


def test_hosts_and_addresses_that_this_machine_does_not_have_are_named() -> None:
    refused("there is no host named no-such-host.invalid: give an address of this machine", "no-such-host.invalid:7070")
    refused("port 7070: this machine does not have this address .ip address lists", "203.0.113.9:7070")
    refused("does not have this address", "[2001:db8::1]:7070")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("10.0.0.5", "give HOST:PORT, such as 10.0.0.5:7070"),
        ("10.0.0.5:", "give HOST:PORT"),
        (":7070", "give HOST:PORT"),
        ("10.0.0.5:70700", "with a port up to 65535"),
        ("fd00::5:7070", r"write an IPv6 address in brackets, such as \[fd00::5\]:7070"),
        ("127.0.0.1:65535", r"the servers \(1\) use the next ports, and 65535 is the last .* use a port up to 65534"),
    ],
)
def test_what_is_no_address_is_refused_with_an_example(typed: str, text: str) -> None:
    refused(text, typed)


def test_a_machine_with_several_cards_must_say_at_which_address_it_is_reached(
    cards: Callable[[Sequence[str]], None],
) -> None:
    cards(["10.0.0.5"])
    assert opened("0.0.0.0:0")[0] == "10.0.0.5"
    cards(["10.0.0.5", "192.168.1.7", "fe80::1%eth0"])
    two = "this machine has the addresses 10.0.0.5, 192.168.1.7. Also use advertise=10.0.0.5, or the one"
    refused(two, "0.0.0.0:0")
    assert opened("0.0.0.0:0", "192.168.1.7")[0] == "192.168.1.7"
    cards([])
    refused("this machine has no address that others can reach; connect it first", "0.0.0.0:0")
    cards(["fd00::5", "10.0.0.5"])
    assert opened("[::]:0")[0] == "fd00::5"


@pytest.mark.parametrize(
    ("listen", "advertise", "warning"),
    [
        ("localhost:0", "", "localhost is 127.0.0.1 here. Other machines cannot reach 127.0.0.1: listen at 0.0.0.0:0"),
        ("127.0.0.1:0", "", "Other machines cannot reach 127.0.0.1: listen at 0.0.0.0:0, or at another"),
        ("127.0.0.1:0", "lab1.example", ""),  # through a tunnel, for example
    ],
)
def test_an_address_that_only_this_machine_can_reach_is_warned_of(listen: str, advertise: str, warning: str) -> None:
    doors = Doors(listen, advertise, num_servers=0)
    doors.close()
    assert doors.warning.startswith(warning) and bool(doors.warning) == bool(warning)


def test_the_address_that_others_use_may_have_a_name_and_other_ports() -> None:
    with listen_tcp("127.0.0.1") as free:
        port = free.getsockname()[1]
    assert opened(f"127.0.0.1:{port}", "lab1.example") == ("lab1.example", [port, port + 1])
    assert opened(f"127.0.0.1:{port}", "lab1.example:9000") == ("lab1.example", [9000, 9001])
    for typed in ("fd00::5", "[fd00::5]"):
        assert opened(f"127.0.0.1:{port}", typed) == ("fd00::5", [port, port + 1])
    assert opened(f"127.0.0.1:{port}", "[fd00::5]:9000") == ("fd00::5", [9000, 9001])


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("no-such-host.invalid", "there is no host named no-such-host.invalid: check the spelling"),
        ("127.0.0.1", "nothing listens on 127.0.0.1:{port}: start the run with --listen"),
    ],
)
def test_a_machine_that_cannot_reach_the_run_says_who_cannot_reach_whom_and_what_to_do(host: str, text: str) -> None:
    with listen_tcp("127.0.0.1") as closed:
        port = closed.getsockname()[1]
    invitation = Invitation(
        run="a-run", run_id=b"1" * 16, host=host, port=port, unix="", machine="", fingerprint=b"1" * 32, key=b"1" * 32
    )
    machine = Joiner(invitation, JoinOptions(workers=1), print)
    with pytest.raises(HandshakeFailed) as raised:
        machine._connect_first()
    machine.hub.close()
    assert str(raised.value).startswith(f"{machine.name} cannot join the run a-run: {text.format(port=port)}")


def test_ctrl_c_ends_connecting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Joiner(
        Invitation(
            run="a-run", run_id=b"1" * 16, host="h", port=1, unix="", machine="", fingerprint=b"1" * 32, key=b"1" * 32
        ),
        JoinOptions(workers=1),
        print,
    )

    def connecting(patience_s: float) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it goes on connecting")

    monkeypatch.setattr(Zygote, "start", lambda modules: NoZygote())
    monkeypatch.setattr(machine, "_connect", connecting)
    assert machine.run() == 130


class NoZygote:
    """A fork server that is not used."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)

    def fileno(self) -> int:
        return self.fd

    def close(self, grace_s: float) -> None:
        os.close(self.fd)


# ---- machines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_ipv6(machines: Machines) -> Iterator[list[str]]:
    """Two machines that also have IPv6 addresses."""
    hosts = [f"fd00:87::{number + 1}" for number in range(2)]
    for number, host in enumerate(hosts):
        machines.give(number, host)
    yield hosts


@pytest.mark.processes
def test_a_run_on_ipv6_is_joined_and_checked(
    launcher: RunLauncher, tmp_path: Path, machines: Machines, with_ipv6: list[str]
) -> None:
    options = {"listen": f"[{with_ipv6[0]}]:{PORT}", "num_local": 1}
    first, second = machines.names
    with launcher.run(tmp_path, workers=1, namespace=first, transport="auto", options=options) as run:
        run.gate.let(8)
        joined = run.join(second, "--workers", "1")
        wait_for(lambda: len(run.gate.begun()) == 2, "work for both")
        checked = run.command(second, "doctor", "--to", str(run.directory / "invite.txt"))
        assert checked.ended() == 0, checked.printed()
        assert f"to [{with_ipv6[0]}]:{PORT} in" in checked.printed()
        run.gate.open()
        assert joined.ended() == 0, joined.printed()
    assert run.result().outcome == "finished" and exact(run)


@pytest.mark.processes
@pytest.mark.slow
def test_a_machine_whose_packets_are_dropped_is_told_of_the_firewall(
    launcher: RunLauncher, tmp_path: Path, machines: Machines
) -> None:
    options = {"listen": f"{machines.address(0)}:{PORT}", "num_local": 1}
    with launcher.run(tmp_path, workers=1, namespace=machines.names[0], transport="auto", options=options) as run:
        run.gate.let(8)
        wait_for((run.directory / "invite.txt").is_file, "the invitation")
        machines.cut(1)
        checked = run.command(machines.names[1], "doctor", "--to", str(run.directory / "invite.txt"))
        assert checked.ended() == 1
        run.gate.open()
    what = f"{machines.address(0)}:{PORT}"
    assert f"{what} does not answer within 5 s: a firewall" in checked.printed() or "no route" in checked.printed()
