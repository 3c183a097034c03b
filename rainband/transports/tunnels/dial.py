"""One end of a tunnel: a worker connects to the run's machine, which joins this connection to that of another worker.

Both ends authenticate to the run's machine, over TLS, and name the other worker. When both are there, they leave TLS,
and the run's machine only copies bytes. The two workers then do TLS and the handshake with each other, so it can read
nothing.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping

from rainband.errors import PeerLost
from rainband.protocol.messages import Address, OpenTunnel, Peer, TunnelOpen, encode
from rainband.transports.connect import Dialed, connect, is_here, left_s
from rainband.transports.frames import pack
from rainband.transports.tls.tls_socket import TlsSocket

ROLE = "tunnel"


class TunnelDialer:
    """Opens this worker's ends of tunnels to other workers."""

    def __init__(self, worker: int, run: Address, keys: Mapping[str, bytes], run_id: bytes) -> None:
        """`run`: the address of the coordinator."""
        self.worker = worker
        self.run = run
        self.keys = keys
        self.run_id = run_id

    def dial(self, to: int, deadline: float, answers: bool = False) -> Dialed:
        """Return the connection once the other worker has opened its end; `answers`: it has asked for this one."""
        me = Peer(ROLE, secrets.randbelow(1 << 32))  # each tunnel is a node of its own
        timeout_s = max(0.1, deadline - time.monotonic())
        sock, _, key = connect(self.run, is_here(self.run), self.keys, self.run_id, me, timeout_s)
        try:
            sock.settimeout(left_s(deadline))
            sock.sendall(pack(encode(OpenTunnel(self.worker, to, answers)), None, key))
            _await_opening(sock, pack(encode(TunnelOpen()), None, key), to)
            sock.settimeout(None)
            return Dialed(*sock.unwrap()) if isinstance(sock, TlsSocket) else Dialed(sock)
        except BaseException:
            sock.close()
            raise


def _await_opening(sock: socket.socket, expected: bytes, to: int) -> None:
    """Read exactly the message that both ends are there: what follows is for the other worker."""
    received = b""
    try:
        while len(received) < len(expected) and (data := sock.recv(len(expected) - len(received))):
            received += data
    except TimeoutError:
        raise PeerLost(f"worker {to}", "waiting until it answers through the run's machine") from None
    except OSError as error:
        raise PeerLost(f"worker {to}", f"opening a tunnel to it ({error.strerror or error})") from None
    if received != expected:
        raise PeerLost(f"worker {to}", "opening a tunnel to it (the run's machine does not know it, or has lost it)")
