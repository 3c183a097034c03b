"""Check from another machine whether a run can be reached and joined: name, port, encryption, secret, versions."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rainband.errors import RainbandError
from rainband.protocol.messages import COORDINATOR, MachineJoin, MachineWelcome, Message, Peer
from rainband.runtimes.machines.addresses import parse_address
from rainband.runtimes.machines.invitation import Invitation, check_typed, read_invitation
from rainband.runtimes.machines.software import own_software
from rainband.transports.connect import connect, host_and_port, is_here
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.tls.certificate import client_context, fingerprint
from rainband.transports.tls.tls_socket import TlsSocket

PATIENCE_S = 5.0


class Reached(NamedTuple):
    """The result of one check."""

    name: str
    is_good: bool
    found: str
    advice: str = ""


def reach(to: str) -> Iterator[Reached]:
    """Check each step on the way to a run, given HOST:PORT or the file of an invitation; end at the first failure."""
    check_typed(to)
    invitation = read_invitation(to) if Path(to).is_file() else None
    host, port = (invitation.host, invitation.port) if invitation else parse_address("to", to)
    yield from steps(host, port, invitation)


def why_not(invitation: Invitation) -> str:
    """Return what is in the way to a run, and what to do; "" if nothing is."""
    last = list(steps(invitation.host, invitation.port, invitation))[-1]
    return "" if last.is_good else f"{last.found}: {last.advice.rstrip('.')}."


def steps(host: str, port: int, invitation: Invitation | None = None) -> Iterator[Reached]:
    """Check each step on the way; end at the first failure."""
    where = host_and_port(host, port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        advice = "check the spelling, or use the number that the run prints, such as 10.0.0.5:7070"
        yield Reached("address", False, f"there is no host named {host}", advice)
        return
    yield Reached("address", True, f"{host} is {', '.join(sorted({str(one[4][0]) for one in found}))}")
    began = time.monotonic()
    try:
        sock = socket.create_connection((host, port), timeout=PATIENCE_S)
    except OSError as error:
        yield Reached("connection", False, *_why_not_connected(error, where, port))
        return
    took_ms = 1000 * (time.monotonic() - began)
    yield Reached("connection", True, f"from {sock.getsockname()[0]} to {where} in {took_ms:.1f} ms")
    if invitation is None or invitation.fingerprint:
        try:
            encryption = _encryption(sock, invitation)
        except (OSError, ssl.SSLError) as error:
            what = f"{where} does not speak TLS 1.3 ({getattr(error, 'reason', None) or error.strerror or error})"
            yield Reached("encryption", False, what, "another program uses this port: use the address of the run")
            return
        finally:
            sock.close()
        yield encryption
        if not encryption.is_good:
            return
    sock.close()
    if invitation is not None:
        yield _membership(invitation)


def _why_not_connected(error: OSError, where: str, port: int) -> tuple[str, str]:
    """Return what happened, and what to do."""
    if isinstance(error, TimeoutError):
        advice = f"allow TCP port {port} in the firewall of that machine, and check that it is on"
        return f"{where} does not answer within {PATIENCE_S:g} s: a firewall may drop what is sent to it", advice
    if error.errno == errno.ECONNREFUSED:
        advice = "start the run with --listen, or use the address and the port that it prints; it may have ended"
        return f"nothing listens on {where}", advice
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        advice = "connect both machines to one network, or have the run use --advertise with an address you can reach"
        return f"this machine has no route to {where}", advice
    return f"cannot connect to {where}: {error.strerror or error}", "check the network of both machines"


def _encryption(sock: socket.socket, invitation: Invitation | None) -> Reached:
    tls = TlsSocket(sock, client_context(), server_side=False)
    try:
        tls.settimeout(PATIENCE_S)
        tls.shake_hands()
        shown = fingerprint(tls.peer_certificate() or b"")
    finally:
        tls.close()
    what = f"TLS 1.3, certificate {shown.hex()[:16]}…"
    if invitation is not None and invitation.fingerprint != shown:
        advice = "copy the invitation of the run that is there now (rainband invite)"
        return Reached("encryption", False, f"{what} is not that of the invitation", advice)
    return Reached("encryption", True, what)


def _membership(invitation: Invitation) -> Reached:
    """Authenticate, and ask whether this machine may join, without joining."""
    question = _Question(invitation)
    try:
        answer = question.ask()
    except RainbandError as error:
        return Reached("run", False, str(error), "copy the invitation of the run that is there now (rainband invite)")
    if answer is None:
        return Reached("run", False, f"{invitation.run} does not answer within {PATIENCE_S:g} s", "try again")
    if answer.refused:
        return Reached("run", False, f"{invitation.run} refuses this machine", answer.refused)
    return Reached("run", True, f"{answer.run} lets this machine join")


class _Question:
    """A connection that asks whether this machine may join."""

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation
        self.answer: MachineWelcome | None = None
        self.is_lost = False

    def ask(self) -> MachineWelcome | None:
        invitation = self.invitation
        me, address = Peer("machine", int.from_bytes(os.urandom(4), "little")), invitation.address
        keys = {"machine": invitation.key}
        sock, peer, key = connect(address, is_here(address), keys, invitation.run_id, me, PATIENCE_S)
        hub = Hub(me, {}, invitation.run_id, self, 1 << 20)
        try:
            hub.adopt(sock, peer, key)
            hub.send(COORDINATOR, MachineJoin(socket.gethostname(), own_software(), 0))
            deadline = time.monotonic() + PATIENCE_S
            while self.answer is None and not self.is_lost and time.monotonic() < deadline:
                hub.run_once(0.1)
        finally:
            hub.close()
        return self.answer

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        if isinstance(message, MachineWelcome):
            self.answer = message

    def lost(self, peer: Peer) -> None:
        self.is_lost = True
