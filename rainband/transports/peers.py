"""Links of one worker to other workers: tagged messages of tensors and numbers.

They go through shared memory on one machine and by TCP otherwise; callers need not know which.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol.messages import Address, Peer
from rainband.protocol.peer_inbox import Inbox, Received, Tag
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
    ) -> None:
        """`transport`: auto, shm or tcp. `on_lost` is called, while waiting, with the number of a lost worker.

        What it raises comes out of whatever waits.
        """
        self.me, self.keys, self.run_id = me, keys, run_id
        self.event_loop = event_loop
        self.transport = transport
        self.timeout_s = timeout_s
        self.inbox = Inbox(on_lost)
        self.sent_messages = 0
        self.sent_bytes = 0  # of tensors
        self._shared: SharedPeerLinks | None = None
        self._tcp: TcpPeerLinks | None = None
        _close_in_children(self)

    @property
    def lost(self) -> Mapping[int, str]:
        """Lost workers, and why their links are closed."""
        return self.inbox.lost

    def listen(self, host: str = "127.0.0.1") -> Address:
        """Listen, and return the address at which other workers of the run reach this one."""
        port, unix = 0, ""
        settings = self.me, self.keys, self.run_id, self.event_loop, self.inbox, self.timeout_s
        if self.transport != "tcp":
            unix = f"rainband-{self.run_id.hex()}-worker-{self.me.index}-{self.me.incarnation}"
            self._shared = SharedPeerLinks(*settings)
            self._shared.hub.listen(listen_unix(unix))
        if self.transport != "shm":
            sock = listen_tcp(host)
            port = sock.getsockname()[1]
            self._tcp = TcpPeerLinks(*settings)
            self._tcp.hub.listen(sock)
            self._tcp.start()
        return Address(host, port, unix, this_machine())

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
        timeout_s = max(0.1, deadline - time.monotonic())
        try:
            sock, peer, key = connect(address, shared, self.keys, self.run_id, self.me, timeout_s)
        except HandshakeFailed as error:
            raise HandshakeFailed(f"worker {index}: {error}") from None
        except PeerLost as error:
            raise PeerLost(f"worker {index}", f"linking up with it ({error})") from None
        if (peer.role, peer.index) != ("worker", index):
            sock.close()
            raise HandshakeFailed(f"{peer.role} {peer.index} answers where worker {index} should be.")
        links.adopt(sock, peer, key)

    def close_in_child(self) -> None:
        """Close the connections in a forked process: they must end when the parent does."""
        for links in (self._shared, self._tcp):
            if links is not None:
                hub = links.hub
                for sock in [*hub.listeners.values(), *(connection.sock for connection in hub.connections.values())]:
                    if sock.fileno() >= 0:
                        os.close(sock.detach())


def _close_in_children(links: PeerLinks) -> None:
    """Close the links in forked processes: held open by a data loader, they would hide this process's death."""
    known = weakref.ref(links)

    def close() -> None:
        alive = known()
        if alive is not None:
            alive.close_in_child()

    os.register_at_fork(after_in_child=close)
