"""A machine's memory for rounds of split batches, with the connection over which it follows that of the run.

For processes that start workers, but have no other business with the run: a thread does the work.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time

import msgspec

from rainband.errors import RainbandError
from rainband.protocol.messages import (
    COORDINATOR,
    Address,
    MachineJoin,
    MachineWelcome,
    Message,
    Peer,
    RoundAudience,
    RoundData,
    RoundWords,
)
from rainband.runtimes.machines.joiner import MAX_BODY_BYTES, TICK_S, TRY_S, pause_s
from rainband.runtimes.machines.rounds_relay import MachineRelay
from rainband.runtimes.machines.software import own_software
from rainband.transports.connect import connect, is_here
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.shared_rounds import RoundsMemory


class MirrorOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which a machine makes its memory."""

    num_ranks: int
    run_id: bytes
    key: bytes  # of the role of machines
    address: Address  # of the coordinator


class Mirror:
    """The memory, and a thread that lets it follow that of the run."""

    def __init__(self, order: MirrorOrder) -> None:
        self.order = order
        self.me = Peer("machine", secrets.randbelow(1 << 32))
        self.memory = RoundsMemory(order.num_ranks, is_mirror=True)
        self.ranks: set[int] = set()  # workers that this machine has
        self.lock = threading.Lock()  # for these
        self.hub = Hub(self.me, {}, order.run_id, self, MAX_BODY_BYTES)
        self.relay = MachineRelay(self.memory, (), self.hub.send, COORDINATOR)
        self.hub.watch(self.relay.bell, self.relay.rang)
        self.is_connected = False
        self.tries = 0
        self.next_try_at = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="rounds", daemon=True)
        self.thread.start()

    def add(self, rank: int) -> None:
        """Let a worker of this machine take part. Call it before the worker is started."""
        with self.lock:
            self.ranks.add(rank)
        os.eventfd_write(self.relay.bell, 1)

    def close(self) -> None:
        """End the connection, when the workers have ended."""
        self.over.set()
        os.eventfd_write(self.relay.bell, 1)
        self.thread.join(2 * TICK_S)
        if not self.thread.is_alive():  # otherwise it waits for the run's machine, and this process ends soon
            self.hub.close()
            self.memory.close()

    def _follow(self) -> None:
        while not self.over.is_set():
            if not self.is_connected and time.monotonic() >= self.next_try_at:
                self._connect()
            self._introduce()
            self.relay.sleep()
            self.relay.look()
            self.hub.run_once(TICK_S)

    def _connect(self) -> None:
        order, address = self.order, self.order.address
        try:
            sock, peer, key = connect(address, is_here(address), {"machine": order.key}, order.run_id, self.me, TRY_S)
        except RainbandError:  # the workers have the same trouble, and the launcher sees to them
            self.tries += 1
            self.next_try_at = time.monotonic() + pause_s(self.tries)
            return
        self.hub.adopt(sock, peer, key)
        self.is_connected, self.tries = True, 0
        self.relay.ranks = set()
        self.relay.connected()

    def _introduce(self) -> None:
        """Tell the run's machine about new workers before their first words."""
        with self.lock:
            ranks = set(self.ranks)
        if self.is_connected and ranks != self.relay.ranks:
            self.relay.ranks = ranks
            software = own_software()
            self.hub.send(COORDINATOR, MachineJoin(platform.node(), software, 0, ranks=tuple(sorted(ranks))))

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        if isinstance(message, RoundData | RoundWords | RoundAudience):
            self.relay.receive(message, body)
        elif isinstance(message, MachineWelcome) and message.refused:
            self.over.set()  # the run is ending

    def lost(self, peer: Peer) -> None:
        self.is_connected = False
        self.next_try_at = time.monotonic() + pause_s(0)
