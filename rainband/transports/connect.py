"""Connect to a node and authenticate, blocking; sockets that a node listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rainband.errors import HandshakeFailed, NoAnswer, NotListening, PeerLost
from rainband.protocol.messages import Address, Peer
from rainband.transports.auth import ClientHandshake, Identity
from rainband.transports.tls.certificate import check_fingerprint, client_context
from rainband.transports.tls.tls_socket import TlsSocket

SOCKET_BUFFER_BYTES = 4 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# How long a node that starts tries to connect. Longer than any heartbeat: until then the other side may be creating
# blocks of some GB, or be stopped. A process that has ended is noticed at once, because its socket is closed.
STARTING_LIMIT_S = 300.0
LINK_TIMEOUT_S = 30.0  # a TCP connection is given up when nothing sent was acknowledged for this time
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0  # between two tries
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def this_machine() -> str:
    """Return a name that two processes share only if they can share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = f"{Path('/proc/self/ns/ipc').readlink()} {Path('/proc/self/ns/net').readlink()}"
        return f"{boot} {namespaces} user {os.geteuid()}"
    except OSError:
        return ""


def process_usage() -> tuple[float, int]:
    """Return the processor seconds of this process, and its memory now without files and shared memory, in bytes."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return time.process_time(), 0
    return time.process_time(), (int(resident) - int(shared)) * PAGE_BYTES


def is_here(address: Address) -> bool:
    """Return True if a node is on this machine, where its Unix socket can be reached."""
    return bool(address.unix) and address.machine == this_machine()


def can_share_memory(address: Address) -> bool:
    """Return True on the same Linux machine, if processors see each other's stores in order (x86)."""
    ordered = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return sys.platform == "linux" and ordered and is_here(address)


def listen_unix(name: str) -> socket.socket:
    """Listen on an abstract Unix socket, which leaves no file behind if the process is killed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(b"\0" + name.encode())
    sock.listen(128)
    return sock


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Listen on an address or a name of this machine; raise ValueError if that is not possible."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"there is no host named {host}: give an address of this machine, such as 0.0.0.0.") from None
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Before listen(), so that accepted sockets have the large buffers from their first byte.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    try:
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise ValueError(_cannot_listen(host, port, error)) from None
    sock.listen(128)
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    what = f"cannot listen on {host} port {port}"
    if error.errno == errno.EADDRINUSE:
        return f"{what}: another program uses this port. Choose another port, or 0 for any that is free."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine does not have this address (ip address lists those that it has)."
    if error.errno == errno.EACCES:
        return f"{what}: only root may use ports below 1024. Choose a larger one."
    return f"{what}: {error.strerror}. Choose another address or port."


def is_loopback(sock: socket.socket) -> bool:
    """Return True if only processes of this machine can reach a listening socket."""
    if sock.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other end acknowledges nothing for LINK_TIMEOUT_S."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(LINK_TIMEOUT_S / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, round(LINK_TIMEOUT_S / 6))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * LINK_TIMEOUT_S))


def user_of(sock: socket.socket) -> int:
    """Return the ID of the user at the other end of a Unix socket: of the process that connected, or that listened."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


class Dialed(NamedTuple):
    """A connected socket, and what was read from it already."""

    sock: socket.socket
    received: bytes = b""


Dial = Callable[[float], Dialed]  # connects until a deadline


class _NotNow(Exception):
    """The peer cannot talk to us now, but may when asked again."""


def connect(
    address: Address,
    unix: bool,
    keys: Mapping[str, bytes],
    run_id: bytes,
    me: Peer,
    timeout_s: float = STARTING_LIMIT_S,
    dial: Dial | None = None,
) -> tuple[socket.socket, Identity, int]:
    """Connect and authenticate; return the socket, the peer's identity, and the connection's key.

    A peer that is busy is waited for and asked again, until `timeout_s` have passed. `dial`: how to reach the peer,
    if not at its address.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    dial = dial or (lambda until: Dialed(_connect(address, unix, until)))
    while True:
        shake = ClientHandshake(keys[me.role], run_id, Identity(me.role, me.index, me.incarnation))
        try:
            return _try_once(address, unix, shake, deadline, dial)
        except TimeoutError:
            raise NoAnswer(f"{_where(address, unix)} did not answer within {timeout_s:g} s.") from None
        except _NotNow as reason:
            if time.monotonic() + pause_s > deadline:
                raise HandshakeFailed(f"{_where(address, unix)} {reason}, for {timeout_s:g} s.") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _try_once(
    address: Address, unix: bool, shake: ClientHandshake, deadline: float, dial: Dial
) -> tuple[socket.socket, Identity, int]:
    sock, received = dial(deadline)
    try:
        if unix and (user := user_of(sock)) != os.geteuid():
            raise HandshakeFailed(
                f"{_where(address, unix)} belongs to user {user}, and this process to {os.geteuid()}."
            )
        if address.fingerprint and not unix:
            sock.settimeout(left_s(deadline))
            sock = _encrypted(sock, address.fingerprint, received)
        sock.sendall(shake.outgoing)
        while not shake.done:
            sock.settimeout(left_s(deadline))
            data = sock.recv(shake.need)
            if not data:
                raise _NotNow("closed the connection during the handshake")
            shake.feed(data)
            if shake.outgoing:
                sock.sendall(shake.outgoing)
    except ssl.SSLError as error:
        sock.close()
        raise HandshakeFailed(
            f"{_where(address, unix)} does not speak TLS as this run does ({error.reason})."
        ) from None
    except ConnectionError as error:
        sock.close()
        raise _NotNow(f"broke off the handshake ({error.strerror or error})") from None
    except Exception:
        sock.close()
        raise
    sock.settimeout(None)
    if isinstance(sock, TlsSocket):
        sock.trusted()
    return sock, shake.peer, shake.key


def _encrypted(sock: socket.socket, fingerprint: bytes, received: bytes) -> TlsSocket:
    """Do TLS's handshake, and check whose certificate the other end has shown."""
    tls = TlsSocket(sock, client_context(), server_side=False, received=received)
    try:
        tls.shake_hands()
        check_fingerprint(tls.peer_certificate(), fingerprint)
    except Exception:
        tls.close()
        raise
    return tls


def _connect(address: Address, unix: bool, deadline: float) -> socket.socket:
    try:
        if unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(left_s(deadline))
            try:
                sock.connect(b"\0" + address.unix.encode())
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((address.host, address.port), timeout=left_s(deadline))
        keep_alive(sock)
        return sock
    except TimeoutError:
        raise
    except (socket.gaierror, UnicodeError):
        raise PeerLost(_where(address, unix), "looking up its address (there is no host of this name)") from None
    except BlockingIOError:
        raise _NotNow("has too many connections that it has not accepted yet") from None
    except OSError as error:
        kind = NotListening if isinstance(error, ConnectionRefusedError) else PeerLost
        raise kind(_where(address, unix), f"connecting to it ({error.strerror or error})") from None


def left_s(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _where(address: Address, unix: bool) -> str:
    if unix:
        return f"the socket {address.unix}"
    return host_and_port(address.host, address.port)


def host_and_port(host: str, port: int) -> str:
    """Write an address as users type it, such as 10.0.0.5:7070 or [fd00::5]:7070."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
