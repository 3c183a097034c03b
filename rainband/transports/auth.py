"""Handshake: how two nodes prove to each other that they hold the run's secret, before anything else is read.

    client -> server   hello     magic b"RBHI", version | role, index, incarnation, run id, nonce
    server -> client   answer    status, version        | role, index, incarnation, nonce, MAC("server")
    client -> server   proof     MAC("client")
    server -> client   verdict   status, MAC("verdict", status)

    MAC(label, more) = HMAC-SHA256(role key, label || hello || answer without its MAC || more)
    role key         = HMAC-SHA256(secret, "rainband role" || the client's role)
    key              = the first 4 bytes of MAC("key"), the same at both ends

Every message has a fixed length; a server reads 94 bytes before it knows whom it talks to. What stands
before the bar keeps its form in all versions to come, so that any two versions can tell each other why they
part: a server that speaks another version answers with just that part, in clear. Each MAC covers both
nonces, so nothing recorded can be replayed, and a label of its direction, so nothing can be reflected. A
wrong secret gets no answer at all. A process holds only the keys of its own role and of those that may connect
to it: a worker's key does not let it connect as a server or as the coordinator. Which run the client asked for is
looked at only once it has proved that it knows its key, and what the server says to it then is signed.

This decides who may connect. It neither hides nor signs what is sent afterwards: between machines it runs inside
TLS (`tls/`), whose certificate is compared with the fingerprint of the address.

There is no input or output here: both sides say what to send and how many bytes they need next.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator, Mapping
from typing import NamedTuple

import msgspec

from rainband.errors import HandshakeFailed
from rainband.transports.frames import PROTOCOL_VERSION

MAGIC = b"RBHI"
SECRET_BYTES = 32
RUN_ID_BYTES = 16
NONCE_BYTES = 32
MAC_BYTES = 32
ROLES = {"worker": 1, "server": 2, "coordinator": 3, "observer": 4, "machine": 5, "tunnel": 6, "files": 7}

# What a server says in the first byte of its answer and of its verdict.
WELCOME, OTHER_VERSION, OTHER_RUN, UNKNOWN_ROLE = 1, 2, 3, 4

_IDENTITY = struct.Struct("<BII")
_HELLO_START_BYTES = len(MAGIC) + 1
_HELLO_REST_BYTES = _IDENTITY.size + RUN_ID_BYTES + NONCE_BYTES
_ANSWER_START_BYTES = 2
_ANSWER_REST_BYTES = _IDENTITY.size + NONCE_BYTES + MAC_BYTES
_VERDICT_BYTES = 1 + MAC_BYTES
_SAME_VERSION = "install the same version of rainband on all machines."


class Identity(msgspec.Struct, frozen=True):
    """The identity of a node within its run."""

    role: str
    index: int
    incarnation: int


class Handshake:
    """One side of a handshake:

        send(shake.outgoing)
        while not shake.done:
            shake.feed(recv(shake.need))
            send(shake.outgoing)

    `outgoing` is what to send now; each `feed` replaces it. When `feed` raises `HandshakeFailed`,
    `outgoing` is the last word for the peer (often nothing): send it if it can be sent at once, and close.
    Never read more than `need` bytes: what follows the handshake is not its business. Fewer are fine, none
    is the end of the connection.
    """

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._pending = b""
        self._peer: Identity | None = None
        self.key = 0  # starts the header checksums of this connection; known when done
        self.outgoing, self.need = next(script)

    @property
    def done(self) -> bool:
        """Return True if both sides have authenticated; the last `outgoing` must still be sent."""
        return self._peer is not None

    @property
    def step_done(self) -> bool:
        """Return True if the last bytes completed a step, so that the time for the next one begins."""
        return not self._pending

    @property
    def peer(self) -> Identity:
        """Return the identity of the other side."""
        assert self._peer is not None, "the peer is not known before the handshake is done"
        return self._peer

    def feed(self, data: bytes) -> None:
        """Take what was received, at most `need` bytes; none mean that the peer closed the connection."""
        assert len(data) <= self.need, f"{len(data)} bytes were read, the handshake needs {self.need}"
        self.outgoing = b""
        if not data:
            raise HandshakeFailed("the peer closed the connection during the handshake; its own log says why.")
        self._pending += data
        self.need -= len(data)
        if self.need == 0:
            self._advance()

    def _advance(self) -> None:
        data, self._pending = self._pending, b""
        try:
            self.outgoing, self.need = self._script.send(data)
        except StopIteration as end:
            self._conclude(end.value)

    def _conclude(self, outcome: _Agreed | _Refused) -> None:
        self.outgoing = outcome.outgoing
        if isinstance(outcome, _Refused):
            raise HandshakeFailed(outcome.reason)
        self._peer, self.key = outcome.peer, outcome.key


class ClientHandshake(Handshake):
    """The side that opened the connection."""

    def __init__(self, key: bytes, run_id: bytes, me: Identity) -> None:
        """`key`: that of this node's role."""
        super().__init__(_client(_Signer(key), _checked_run_id(run_id), _packed(me)))


class ServerHandshake(Handshake):
    """The side that accepted the connection, whatever its role in the run."""

    def __init__(self, keys: Mapping[str, bytes], run_id: bytes, me: Identity) -> None:
        """`keys`: those of the roles that may connect."""
        signers = {ROLES[role]: _Signer(key) for role, key in keys.items()}
        super().__init__(_server(signers, _checked_run_id(run_id), _packed(me)))


def new_secret() -> bytes:
    """Return a fresh secret for a run."""
    return secrets.token_bytes(SECRET_BYTES)


def role_keys(secret: bytes, *roles: str) -> dict[str, bytes]:
    """Return the keys of these roles (none: of all) in the run with this secret."""
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes is too short: new_secret() makes one of {SECRET_BYTES}.")
    return {role: hmac.digest(secret, b"rainband role " + role.encode(), "sha256") for role in roles or ROLES}


def new_run_id() -> bytes:
    """Return a fresh name for a run; it is no secret."""
    return secrets.token_bytes(RUN_ID_BYTES)


class _Agreed(NamedTuple):
    outgoing: bytes
    peer: Identity
    key: int


class _Refused(NamedTuple):
    reason: str
    outgoing: bytes = b""


# A side's half of the protocol, written down from top to bottom: it yields what to send and how many bytes it
# needs next, is sent these bytes, and returns how it ended.
_Script = Generator[tuple[bytes, int], bytes, _Agreed | _Refused]


def _client(signer: _Signer, run_id: bytes, me: bytes) -> _Script:
    hello = MAGIC + bytes([PROTOCOL_VERSION]) + me + run_id + secrets.token_bytes(NONCE_BYTES)
    start = yield hello, _ANSWER_START_BYTES
    status, version = start
    if status == OTHER_VERSION:
        return _Refused(_other_version(version))
    if status == UNKNOWN_ROLE:
        return _Refused(_why_not_welcome(status))
    if status != WELCOME or version != PROTOCOL_VERSION:
        return _Refused(f"the peer is no Rainband node: its answer begins with {start!r}. Check the address.")

    rest = yield b"", _ANSWER_REST_BYTES
    answer, mac = start + rest[:-MAC_BYTES], rest[-MAC_BYTES:]
    signer.transcript = hello + answer
    if not hmac.compare_digest(mac, signer.mac(b"server")):
        return _Refused("secret mismatch: the peer does not hold our secret. See rainband doctor.")

    verdict = yield signer.mac(b"client"), _VERDICT_BYTES
    if not hmac.compare_digest(verdict[1:], signer.mac(b"verdict", verdict[:1])):
        return _Refused("secret mismatch: the peer's verdict is not signed with our secret. See rainband doctor.")
    if verdict[0] != WELCOME:
        return _Refused(_why_not_welcome(verdict[0]))
    peer = _unpacked(rest)
    if peer is None:
        return _Refused(_unknown_role(rest[0]))
    return signer.agreed(b"", peer)


def _server(signers: Mapping[int, _Signer], run_id: bytes, me: bytes) -> _Script:
    start = yield b"", _HELLO_START_BYTES
    version = start[-1]
    if not start.startswith(MAGIC):
        return _Refused(f"the peer is no Rainband node: its hello begins with {start!r}, not {MAGIC!r}.")
    if version != PROTOCOL_VERSION:
        return _Refused(_other_version(version), bytes([OTHER_VERSION, PROTOCOL_VERSION]))

    rest = yield b"", _HELLO_REST_BYTES
    if rest[0] not in signers:
        return _Refused(_unknown_role(rest[0]), bytes([UNKNOWN_ROLE, PROTOCOL_VERSION]))
    signer = signers[rest[0]]
    answer = bytes([WELCOME, PROTOCOL_VERSION]) + me + secrets.token_bytes(NONCE_BYTES)
    signer.transcript = start + rest + answer

    proof = yield answer + signer.mac(b"server"), MAC_BYTES
    if not hmac.compare_digest(proof, signer.mac(b"client")):
        return _Refused("secret mismatch: the peer could not prove that it holds our secret. See rainband doctor.")
    peer = _unpacked(rest)
    if rest[_IDENTITY.size : -NONCE_BYTES] != run_id:
        return _Refused(f"the peer, {peer}, belongs to another run.", signer.verdict(OTHER_RUN))
    assert peer is not None, "a role that has a key is known"
    return signer.agreed(signer.verdict(WELCOME), peer)


class _Signer:
    """Makes the MACs of one handshake; it keeps the key only inside of the hash."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes is too short: new_secret() makes one of {SECRET_BYTES}.")
        self._keyed = hmac.new(secret, digestmod="sha256")
        self.transcript = b""

    def mac(self, label: bytes, more: bytes = b"") -> bytes:
        assert self.transcript, "nothing is signed before both nonces are known"
        mac = self._keyed.copy()
        mac.update(label + self.transcript + more)
        return mac.digest()

    def verdict(self, status: int) -> bytes:
        return bytes([status]) + self.mac(b"verdict", bytes([status]))

    def agreed(self, outgoing: bytes, peer: Identity) -> _Agreed:
        return _Agreed(outgoing, peer, int.from_bytes(self.mac(b"key")[:4], "little"))


def _other_version(version: int) -> str:
    return f"the peer speaks protocol version {version}, we speak {PROTOCOL_VERSION}: {_SAME_VERSION}"


def _unknown_role(number: int) -> str:
    names = {value: name for name, value in ROLES.items()}
    what = f"role {names[number]}, which may not connect here" if number in names else f"unknown role {number}"
    return f"the peer has the {what}: {_SAME_VERSION}"


def _why_not_welcome(status: int) -> str:
    if status == OTHER_RUN:
        return "the peer belongs to another run: check its address, and that both read the same run directory."
    if status == UNKNOWN_ROLE:
        return (
            "the peer does not accept connections of our role: check its address, and install the same version of "
            "rainband on all machines."
        )
    return f"the peer refused us with the unknown status {status}: {_SAME_VERSION}"


def _checked_run_id(run_id: bytes) -> bytes:
    if len(run_id) != RUN_ID_BYTES:
        raise ValueError(f"a run id of {len(run_id)} bytes: it has {RUN_ID_BYTES}, as new_run_id() makes them.")
    return run_id


def _packed(who: Identity) -> bytes:
    if who.role not in ROLES:
        raise ValueError(f"no role named {who.role!r}: choose from {', '.join(ROLES)}.")
    if not (0 <= who.index < 1 << 32 and 0 <= who.incarnation < 1 << 32):
        raise ValueError(f"{who} cannot be sent: index and incarnation must lie between 0 and {(1 << 32) - 1}.")
    return _IDENTITY.pack(ROLES[who.role], who.index, who.incarnation)


def _unpacked(data: bytes) -> Identity | None:
    """Return the identity at the beginning of `data`, or None if its role is none that we know."""
    number, index, incarnation = _IDENTITY.unpack_from(data)
    names = {value: name for name, value in ROLES.items()}
    return Identity(names[number], index, incarnation) if number in names else None
