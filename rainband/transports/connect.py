"""Connect to a node and authenticate, blocking; sockets that a node listens on."""

from __future__ import annotations

import platform
import socket
import sys
from pathlib import Path

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol.messages import Address, Peer
from rainband.transports.auth import ClientHandshake, Identity

SOCKET_BUFFER_BYTES = 4 << 20


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


def connect(
    address: Address, unix: bool, secret: bytes, run_id: bytes, me: Peer, timeout_s: float
) -> tuple[socket.socket, Identity, int]:
    """Connect and authenticate; return the socket, the peer's identity, and the connection's key."""
    sock = _connect(address, unix, timeout_s)
    shake = ClientHandshake(secret, run_id, Identity(me.role, me.index, me.incarnation))
    answered = False
    try:
        sock.sendall(shake.outgoing)
        while not shake.done:
            data = sock.recv(shake.need)
            if not data and not answered:
                raise PeerLost(_where(address, unix), "shaking hands (it closed the connection)")
            answered = True
            shake.feed(data)
            if shake.outgoing:
                sock.sendall(shake.outgoing)
    except TimeoutError:
        sock.close()
        raise HandshakeFailed(f"{_where(address, unix)} did not answer within {timeout_s:.0f} s.") from None
    except OSError as error:
        sock.close()
        raise PeerLost(_where(address, unix), f"shaking hands ({error.strerror})") from None
    except (HandshakeFailed, PeerLost):
        sock.close()
        raise
    sock.settimeout(None)
    return sock, shake.peer, shake.key


def _connect(address: Address, unix: bool, timeout_s: float) -> socket.socket:
    try:
        if unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                sock.connect(b"\0" + address.unix.encode())
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        raise PeerLost(_where(address, unix), f"connecting to it ({error.strerror or error})") from None


def _where(address: Address, unix: bool) -> str:
    return f"the socket {address.unix}" if unix else f"{address.host}:{address.port}"
