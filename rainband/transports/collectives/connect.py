"""Connect the ranks of a group with each other by TCP."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol.messages import Address, Message, Peer
from rainband.transports.connect import STARTING_LIMIT_S, connect
from rainband.transports.connection import Connection
from rainband.transports.event_loop import readable_within
from rainband.transports.hub import Hub

READY = b"\x01"  # the accepting side has handed over the connection
ACCEPT_S = 0.1  # between two looks at the clock


class _Admission:
    """Accepts connections, and takes no message before they are handed over."""

    def __init__(self, me: Peer, keys: Mapping[str, bytes], run_id: bytes, timeout_s: float) -> None:
        self.hub = Hub(me, keys, run_id, self, 0, timeout_s)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        self.hub.refuse(connection, f"it sends {type(message).__name__} before this rank is ready")

    def lost(self, peer: Peer) -> None:
        """Wait for this peer again."""


def connect_ranks(
    rank: int,
    addresses: Mapping[int, Address],
    listener: socket.socket,
    keys: Mapping[str, bytes],
    run_id: bytes,
    timeout_s: float = STARTING_LIMIT_S,
) -> dict[int, socket.socket]:
    """Return authenticated connections to all other ranks; each rank calls those with lower numbers.

    All ranks call this. It closes the listener. Raises PeerLost, which names the ranks that are not there in time.
    """
    me = Peer("worker", rank)
    deadline = time.monotonic() + timeout_s
    links: dict[int, socket.socket] = {}
    admission = _Admission(me, keys, run_id, timeout_s)
    admission.hub.listen(listener)
    try:
        for other in sorted(addresses):
            if other < rank:
                links[other] = _call(other, addresses[other], keys, run_id, me, deadline)
        called = [other for other in addresses if other < rank]
        _accept(admission.hub, [other for other in addresses if other > rank], links, deadline)
        for other in called:
            if not readable_within(links[other], deadline - time.monotonic()) or links[other].recv(1) != READY:
                raise PeerLost(f"rank {other}", "waiting until it has connected to all ranks")
    except BaseException:
        for sock in links.values():
            sock.close()
        raise
    finally:
        admission.hub.close()
    return links


def _accept(hub: Hub, others: list[int], links: dict[int, socket.socket], deadline: float) -> None:
    while missing := [other for other in others if Peer("worker", other) not in hub.peers]:
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {other}" for other in missing)
            raise PeerLost(names, "waiting for its connection")
        hub.run_once(ACCEPT_S)
    for other in others:
        links[other] = hub.detach(Peer("worker", other))
        links[other].send(READY)


def _call(
    other: int, address: Address, keys: Mapping[str, bytes], run_id: bytes, me: Peer, deadline: float
) -> socket.socket:
    try:
        sock, peer, _ = connect(address, False, keys, run_id, me, max(0.1, deadline - time.monotonic()))
    except PeerLost as error:
        raise PeerLost(f"rank {other}", f"connecting to it ({error})") from None
    if (peer.role, peer.index) != ("worker", other):
        sock.close()
        raise HandshakeFailed(f"{peer.role} {peer.index} answers where rank {other} should be.")
    return sock
