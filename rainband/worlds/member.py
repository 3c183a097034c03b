"""A worker's place in a run: its connections to the coordinator and the servers, and the way in and out."""

from __future__ import annotations

import sys

from torch import Tensor

from rainband.client import Client
from rainband.errors import RainbandError
from rainband.flat import Flat
from rainband.handover import State
from rainband.messages import (
    Address,
    Bye,
    Conclude,
    Failed,
    Go,
    Join,
    Message,
    Opened,
    Peer,
    Welcome,
)
from rainband.stats import Stats
from rainband.transports.control import Control
from rainband.transports.dial import can_share_memory, dial
from rainband.transports.ports import SharedPort, TcpPort
from rainband.transports.switchboard import Switchboard
from rainband.types import Port
from rainband.worlds.config import Job


class Dismissed(RainbandError):
    """The coordinator has said goodbye."""


class Member:
    """One worker of a run. Messages are dealt with on the thread that waits."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.me = Peer("worker", job.index)
        self.switchboard = Switchboard()
        self.stats = Stats()
        self.control: Control | None = None
        self.client: Client | None = None
        self.welcome: Welcome | None = None
        self.go = False
        self.conclude: tuple[Conclude, memoryview | None] | None = None

    def connect(self) -> None:
        """Call the coordinator; from then on it hears our heartbeats."""
        if self.control is not None:
            return
        address, timeout_s = self.job.coordinator, self.config.failure_timeout_s
        sock, _, key = dial(address, bool(address.unix), self.job.secret, self.job.run_id, self.me, timeout_s)
        self.control = Control(sock, key, self.switchboard, self._from_coordinator, self.stats, timeout_s / 5)

    def tell(self, message: Message, body: bytes | None = None) -> None:
        """Send something to the coordinator."""
        assert self.control is not None, "connect first"
        self.control.send(message, body)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something has come and deal with it; False: nothing came in time."""
        return self.switchboard.wait(timeout_s)

    def enter(self, join: Join, flat: Flat, state: State | None = None) -> Client:
        """Join, open the ways to the servers, give them their first values if asked to; returns when all is ready."""
        self.tell(join)
        while self.welcome is None:
            self.wait()
        welcome = self.welcome
        ports = [self._port(i, address, welcome) for i, address in enumerate(welcome.servers)]
        self.client = Client(self.me, welcome.plan, flat, welcome.blocks, welcome.owners, ports, self.tell)
        self.client.stats = self.stats
        loaded = False
        while not self.go:
            if self.welcome.load and not loaded:
                loaded = True
                self.client.load(state)
            self.wait()
        return self.client

    def see_pushes_through(self) -> None:
        """Wait for the last answers."""
        assert self.client is not None
        while self.client.pushes:
            self.wait()

    def pull_latest(self) -> None:
        """Take over the parameters as the servers have them now."""
        assert self.client is not None
        if self.client.blocks and self.client.ports:
            pull = self.client.pull_latest()
            while not pull.ready():
                self.wait()

    def fail(self, error: BaseException, trace: str) -> None:
        """Tell the coordinator what went wrong; it ends the run and shows it once."""
        try:
            self.connect()
            self.tell(Failed(self.stats.steps, f"{type(error).__name__}: {error}", trace))
            while True:
                self.wait(self.config.failure_timeout_s)
        except RainbandError:
            return

    def _port(self, index: int, address: Address, welcome: Welcome) -> Port:
        peer = Peer("server", index)
        shared = can_share_memory(address) and self.config.transport != "tcp"
        if self.config.transport == "shm" and not shared:
            raise ValueError(f"{peer} is not on this machine, or memory cannot be shared here: use --transport tcp.")
        specs = [welcome.blocks[b] for b, owner in enumerate(welcome.owners) if owner == index]
        sock, _, key = dial(
            address, shared, self.job.secret, self.job.run_id, self.me, self.config.failure_timeout_s
        )
        if shared:
            return SharedPort(peer, sock, key, specs, self.switchboard, self._from_server, self.stats)
        return TcpPort(peer, sock, key, specs, self.switchboard, self._from_server)

    def _from_server(self, message: Message, payload: Tensor | None) -> None:
        if self.client is not None and not isinstance(message, Opened):
            self.client.receive(message, payload)

    def _from_coordinator(self, message: Message, body: memoryview | None) -> None:
        match message:
            case Bye():
                if message.reason and self.client is None:
                    print(message.reason, file=sys.stderr)
                raise Dismissed(message.reason or "the run is over.")
            case Welcome():
                self.welcome = message
            case Go():
                self.go = True
            case Conclude():
                self.conclude = message, body
            case _:
                if self.client is not None:
                    self.client.receive(message)
