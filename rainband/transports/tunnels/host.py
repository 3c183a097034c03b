"""The run's machine: joins two connections to a tunnel, and copies bytes between them without reading these."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from rainband.protocol.messages import Message, OpenTunnel, Peer, TunnelOpen
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.tls.tls_socket import TlsSocket, unsent

PIPE_BYTES = 1 << 20
MAX_WAITING = 1000  # tunnels whose other end has not come


class Tunnel:
    """Two connections, and what passes between them: one thread for each direction."""

    def __init__(self, workers: tuple[int, int], ends: tuple[socket.socket, socket.socket]) -> None:
        self.workers = workers
        self.ends = ends
        self.num_bytes = [0, 0]  # from the first, and from the second
        self.threads = [threading.Thread(target=self._copy, args=(way,), name="tunnel", daemon=True) for way in (0, 1)]
        for thread in self.threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def close(self) -> None:
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for end in self.ends:
            end.close()

    def _copy(self, way: int) -> None:
        """Copy what one end sends to the other, inside the kernel, until either is closed."""
        source, to = self.ends[way], self.ends[1 - way]
        reader, writer = os.pipe()
        try:
            while count := os.splice(source.fileno(), writer, PIPE_BYTES):
                left = count
                while left:
                    left -= os.splice(reader, to.fileno(), left)
                self.num_bytes[way] += count
        except OSError:
            pass  # an end is lost, and so is the tunnel
        finally:
            for end in self.ends:  # what was copied before still arrives
                with suppress(OSError):
                    end.shutdown(socket.SHUT_WR if end is to else socket.SHUT_RD)
            os.close(reader)
            os.close(writer)


class TunnelHost:
    """Matches the ends of tunnels."""

    def __init__(self, hub: Hub, peer_of: Callable[[int], Peer | None], ask: Callable[[Peer, int], None]) -> None:
        """`peer_of` returns the node of a worker that is there; `ask` asks it to open a tunnel to a worker."""
        self.hub = hub
        self.peer_of = peer_of
        self.ask = ask
        self.waiting: dict[
            tuple[int, int], Peer
        ] = {}  # (the worker that asks, the one that is to answer) -> the connection's node
        self.tunnels: list[Tunnel] = []
        self.opened: list[Tunnel] = []  # since they were last looked at

    def receive(self, connection: Connection, message: Message) -> None:
        """Take one end of a tunnel, and open the tunnel if the other end is there."""
        if not isinstance(message, OpenTunnel):
            return self.hub.refuse(connection, "it opens no tunnel, for which its role is")
        if not message.answers:
            other = self.peer_of(message.to)
            if other is None or len(self.waiting) >= MAX_WAITING:
                return self.hub.refuse(connection, f"worker {message.to} is not there for a tunnel")
            self.waiting[message.worker, message.to] = connection.peer
            return self.ask(other, message.worker)
        first = self.hub.peers.get(self.waiting.pop((message.to, message.worker), connection.peer))
        if first is None or first is connection:
            return self.hub.refuse(connection, f"worker {message.to} waits for no tunnel any more")
        self._open((message.to, message.worker), (first, connection))

    def lost(self, peer: Peer) -> None:
        """Forget an end that waits no more."""
        self.waiting = {pair: end for pair, end in self.waiting.items() if end != peer}

    def _open(self, workers: tuple[int, int], ends: tuple[Connection, Connection]) -> None:
        for end in ends:
            self.hub.send(end.peer, TunnelOpen())
        self.hub.flush()
        if any(self.hub.peers.get(end.peer) is not end or end.out or unsent(end.sock) for end in ends):
            for end in ends:
                self.hub.refuse(end, "its tunnel could not be opened")
            return
        first, second = (self._plain(end) for end in ends)
        tunnel = Tunnel(workers, (first, second))
        self.tunnels.append(tunnel)
        self.opened.append(tunnel)

    def _plain(self, end: Connection) -> socket.socket:
        """Return the socket without TLS; the worker has said nothing more."""
        sock = self.hub.detach(end.peer)
        if isinstance(sock, TlsSocket):
            sock, received = sock.unwrap()
            assert not received, "a worker waits until its tunnel is open"
        sock.setblocking(True)
        return sock

    def close(self) -> None:
        for tunnel in self.tunnels:
            tunnel.close()
