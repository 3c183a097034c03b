"""Connect to a node and authenticate, blocking; sockets that a node listens on."""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
import time
from pathlib import Path

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol.messages import Address, Peer
from rainband.transports.auth import ClientHandshake, Identity

SOCKET_BUFFER_BYTES = 4 << 20
# How long a node that starts tries to connect. Longer than any heartbeat: until then the other side may be creating
# blocks of some GB, or be stopped. A process that has ended is noticed at once, because its socket is closed.
STARTING_LIMIT_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0  # between two tries
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def this_machine() -> str:
    """Return a name that two processes share only if they can share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/ipc').readlink()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


def can_share_memory(address: Address) -> bool:
    """Return True on the same Linux machine, if processors see each other's stores in order (x86)."""
    ordered = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return sys.platform == "linux" and ordered and bool(address.unix) and address.machine == this_machine()


def listen_unix(name: str) -> socket.socket:
    """Listen on an abstract Unix socket, which leaves no file behind if the process is killed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(b"\0" + name.encode())
    sock.listen(128)
    return sock


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Before listen(), so that accepted sockets have the large buffers from their first byte.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}. Choose another port.") from None
    sock.listen(128)
    return sock


def user_of(sock: socket.socket) -> int:
    """Return the ID of the user at the other end of a Unix socket: of the process that connected, or that listened."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class _NotNow(Exception):
    """The peer cannot talk to us now, but may when asked again."""


def connect(
    address: Address, unix: bool, secret: bytes, run_id: bytes, me: Peer, timeout_s: float = STARTING_LIMIT_S
) -> tuple[socket.socket, Identity, int]:
    """Connect and authenticate; return the socket, the peer's identity, and the connection's key.

    A peer that is busy is waited for and asked again, until `timeout_s` have passed.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while True:
        shake = ClientHandshake(secret, run_id, Identity(me.role, me.index, me.incarnation))
        try:
            return _try_once(address, unix, shake, deadline)
        except TimeoutError:
            raise HandshakeFailed(f"{_where(address, unix)} did not answer within {timeout_s:g} s.") from None
        except _NotNow as reason:
            if time.monotonic() + pause_s > deadline:
                raise HandshakeFailed(f"{_where(address, unix)} {reason}, for {timeout_s:g} s.") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _try_once(
    address: Address, unix: bool, shake: ClientHandshake, deadline: float
) -> tuple[socket.socket, Identity, int]:
    sock = _connect(address, unix, deadline)
    try:
        if unix and (user := user_of(sock)) != os.geteuid():
            raise HandshakeFailed(
                f"{_where(address, unix)} belongs to user {user}, and this process to {os.geteuid()}."
            )
        sock.sendall(shake.outgoing)
        while not shake.done:
            sock.settimeout(_left_s(deadline))
            data = sock.recv(shake.need)
            if not data:
                raise _NotNow("closed the connection during the handshake")
            shake.feed(data)
            if shake.outgoing:
                sock.sendall(shake.outgoing)
    except ConnectionError as error:
        sock.close()
        raise _NotNow(f"broke off the handshake ({error.strerror})") from None
    except Exception:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, shake.peer, shake.key


def _connect(address: Address, unix: bool, deadline: float) -> socket.socket:
    try:
        if unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(_left_s(deadline))
            try:
                sock.connect(b"\0" + address.unix.encode())
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((address.host, address.port), timeout=_left_s(deadline))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except TimeoutError:
        raise
    except BlockingIOError:
        raise _NotNow("has too many connections that it has not accepted yet") from None
    except OSError as error:
        raise PeerLost(_where(address, unix), f"connecting to it ({error.strerror or error})") from None


def _left_s(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _where(address: Address, unix: bool) -> str:
    return f"the socket {address.unix}" if unix else f"{address.host}:{address.port}"
