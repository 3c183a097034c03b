"""Links of one worker to other workers: tagged messages of tensors and numbers.

They go through shared memory on one machine and by TCP otherwise; callers need not know which.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rainband.errors import HandshakeFailed, PeerLost, RainbandError
from rainband.protocol.messages import Address, Peer
from rainband.protocol.peer_inbox import Inbox, Received, Tag
from rainband.transports.auth import Identity
from rainband.transports.connect import (
    STARTING_LIMIT_S,
    can_share_memory,
    connect,
    listen_tcp,
    listen_unix,
    this_machine,
)
from rainband.transports.event_loop import EventLoop
from rainband.transports.peers_shared import SharedPeerLinks
from rainband.transports.peers_tcp import TcpPeerLinks
from rainband.transports.pytrees import outgoing
from rainband.transports.tls.certificate import Certificate
from rainband.transports.tunnels.dial import TunnelDialer

DIRECT_S = 2.0  # to connect directly, before a tunnel is tried: a firewall may drop what is sent
ANSWER_S = 10.0  # to open the other end of a tunnel


class PeerLinks:
    """Links to other workers; used only by the thread that waits on the event loop."""

    def __init__(
        self,
        me: Peer,
        keys: Mapping[str, bytes],
        run_id: bytes,
        event_loop: EventLoop,
        transport: str = "auto",
        timeout_s: float = 5.0,
        on_lost: Callable[[int], None] | None = None,
        tunnels: TunnelDialer | None = None,
    ) -> None:
        """`transport`: auto, shm or tcp. `on_lost` is called, while waiting, with the number of a lost worker.

        What it raises is raised where the worker waits. `tunnels`: the way to workers that cannot be reached otherwise.
        """
        self.me, self.keys, self.run_id = me, keys, run_id
        self.event_loop = event_loop
        self.transport = transport
        self.timeout_s = timeout_s
        self.inbox = Inbox(on_lost)
        self.tunnels = tunnels
        self.transports: dict[int, str] = {}  # of the workers that this one has connected to
        self.sent_messages = 0
        self.sent_bytes = 0  # of tensors
        self._shared: SharedPeerLinks | None = None
        self._tcp: TcpPeerLinks | None = None
        _close_in_children(self)

    @property
    def lost(self) -> Mapping[int, str]:
        """Lost workers, and why their links are closed."""
        return self.inbox.lost

    def listen(self, host: str = "127.0.0.1", certificate: Certificate | None = None) -> Address:
        """Listen, and return the address at which other workers of the run reach this one.

        With a certificate, the host is an address for other machines, perhaps one that a router forwards to this one.
        """
        port, unix = 0, ""
        settings = self.me, self.keys, self.run_id, self.event_loop, self.inbox, self.timeout_s
        if self.transport != "tcp":
            unix = f"rainband-{self.run_id.hex()}-worker-{self.me.index}-{self.me.incarnation}"
            self._shared = SharedPeerLinks(*settings)
            self._shared.hub.listen(listen_unix(unix))
        if self.transport != "shm":
            sock = _listen_at(host) if certificate is not None else listen_tcp(host)
            port = sock.getsockname()[1]
            self._tcp = TcpPeerLinks(*settings, certificate)
            self._tcp.hub.listen(sock, certificate)
            self._tcp.start()
        return Address(host, port, unix, this_machine(), certificate.fingerprint if certificate else b"")

    def connect(self, peers: Mapping[int, Address], timeout_s: float = STARTING_LIMIT_S) -> None:
        """Connect to these workers, which do the same: each worker calls those with lower numbers.

        Returns when all are there. Raises PeerLost, which names them, when some are not there within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        for index in sorted(peers):
            if index < self.me.index:
                self._call(index, peers[index], deadline)
        others = set(peers) - {self.me.index}
        while missing := sorted(others - self.inbox.linked):
            gone = [index for index in missing if index in self.inbox.lost]
            left_s = deadline - time.monotonic()
            if gone or left_s <= 0:
                names = ", ".join(f"worker {index}" for index in gone or missing)
                raise PeerLost(names, f"linking up with the other stages, for at most {timeout_s:g} s")
            self.event_loop.wait(left_s)

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        """Send a pytree of values, which may be overwritten afterwards; handles arriving messages while it waits."""
        pytree = outgoing(payload)
        if to not in self.inbox.linked:
            why = self.inbox.lost.get(to, "there was never a link to it")
            raise PeerLost(f"worker {to}", f"sending to it ({why})")
        if self._shared is not None and to in self._shared.links:
            self._shared.send(to, tag, pytree)
        else:
            assert self._tcp is not None
            self._tcp.send(to, tag, pytree)
        self.sent_messages += 1
        self.sent_bytes += pytree.num_bytes

    def recv(self, source: int, tag: Tag) -> Received:
        """Request one message of this tag, which may have arrived already; await the result."""
        return self.inbox.ask(source, tag)

    def close(self) -> None:
        """Close the links; values that were sent still arrive, but nothing is received."""
        for links in (self._shared, self._tcp):
            if links is not None:
                links.close()
        self._shared = self._tcp = None

    def _call(self, index: int, address: Address, deadline: float) -> None:
        shared = self._shared is not None and can_share_memory(address)
        links = self._shared if shared else self._tcp
        if links is None:
            raise ValueError(f"worker {index} is not on this machine, or memory cannot be shared: use --transport tcp.")
        try:
            sock, peer, key = self._connected(index, address, shared, deadline)
        except HandshakeFailed as error:
            raise HandshakeFailed(f"worker {index}: {error}") from None
        except PeerLost as error:
            raise PeerLost(f"worker {index}", f"linking up with it ({error})") from None
        if (peer.role, peer.index) != ("worker", index):
            sock.close()
            raise HandshakeFailed(f"{peer.role} {peer.index} answers where worker {index} should be.")
        links.adopt(sock, peer, key)

    def _connected(
        self, index: int, address: Address, shared: bool, deadline: float
    ) -> tuple[socket.socket, Identity, int]:
        """Connect to a worker: directly, or else through the run's machine, encrypted from one end to the other."""
        reach = partial(connect, address, shared, self.keys, self.run_id, self.me)
        timeout_s = max(0.1, deadline - time.monotonic())
        self.transports[index] = "shm" if shared else "tls" if address.fingerprint else "tcp"
        tunnels = self.tunnels
        if shared or tunnels is None:
            return reach(timeout_s)
        try:
            return reach(min(DIRECT_S, timeout_s))
        except RainbandError:
            self.transports[index] = "tunnel"
            return reach(max(0.1, deadline - time.monotonic()), lambda until: tunnels.dial(index, until))

    def answer(self, index: int) -> None:
        """Open this end of a tunnel for a worker that cannot reach this one."""
        if self.tunnels is not None and self._tcp is not None:
            self._tcp.accept(self.tunnels.dial(index, time.monotonic() + ANSWER_S, answers=True))

    def close_in_child(self) -> None:
        """Close the connections in a forked process: they must end when the parent does."""
        for links in (self._shared, self._tcp):
            if links is not None:
                hub = links.hub
                for sock in [*hub.listeners.values(), *(connection.sock for connection in hub.connections.values())]:
                    if sock.fileno() >= 0:
                        os.close(sock.detach())


def _listen_at(host: str) -> socket.socket:
    """Listen on an address of this machine, or on all of them if it belongs to a router."""
    try:
        return listen_tcp(host)
    except ValueError:
        return listen_tcp("::" if ":" in host else "0.0.0.0")


def _close_in_children(links: PeerLinks) -> None:
    """Close the links in forked processes: held open by a data loader, they would hide this process's death."""
    known = weakref.ref(links)

    def close() -> None:
        alive = known()
        if alive is not None:
            alive.close_in_child()

    os.register_at_fork(after_in_child=close)
