"""Server and worker processes for measurements, forked from a zygote, with a minimal coordinator."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rainband.bench.baselines.limit import PhysicalLimit, timed
from rainband.bench.harness.processes import BenchProcess
from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import BlockSpec, cut, deal
from rainband.protocol.messages import COORDINATOR, Address, Assign, Message, Opened, Peer, Ready, ServerJoin, Shutdown
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.ports import Port
from rainband.protocol.worker_stats import Stats
from rainband.runtimes.config import Job, RunConfig, encode_job
from rainband.runtimes.processes.zygote import Exited, SpawnFailed, Started, Zygote
from rainband.strategy import Batch
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import can_share_memory, connect, listen_unix, this_machine
from rainband.transports.connection import Connection
from rainband.transports.event_loop import EventLoop, readable_within
from rainband.transports.hub import Hub
from rainband.transports.server_links import SharedPort, TcpPort
from rainband.worker.client import Client

NUM_WORKERS = 4
PLAN = DataPlan(fingerprint="", layout="", num_samples=1 << 24, batch_size=1, epochs=1, seed=0, portion_batches=64)


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order for one measuring worker."""

    index: int
    num_elements: int
    rounds: int
    warmup: int
    addresses: tuple[Address, ...]
    owners: tuple[int, ...]
    blocks: tuple[BlockSpec, ...]
    transport: str
    run_id: bytes
    keys: dict[str, bytes]
    limit: OptimizerSpec | None  # of the physical limit, measured in turns with the exchange; None: not measured


Seconds = list[tuple[float, float]]  # of each exchange, and of the limit just after it


class ExchangeCluster:
    """Servers that hold one vector, and workers that push gradients to them and pull parameters."""

    def __init__(self, zygote: Zygote, num_elements: int, num_servers: int, optimizer: str, transport: str) -> None:
        self.zygote, self.transport, self.optimizer = zygote, transport, optimizer
        self.num_elements, self.num_servers = num_elements, num_servers
        self.run_id, self.keys = new_run_id(), role_keys(new_secret())
        self.addresses: dict[int, Address] = {}
        self.ready: set[int] = set()
        self.started: dict[int, int] = {}  # token -> process
        self.hub = Hub(COORDINATOR, self.keys, self.run_id, self, 1 << 26)
        self.unix = f"rainband-{self.run_id.hex()}"
        self.hub.listen(listen_unix(self.unix))
        self.tokens = [self._start_server(index) for index in range(num_servers)]
        layout = Flat(vector_module(num_elements)).layout
        self.blocks = cut(layout, num_servers)
        dealt = deal(self.blocks, num_servers)
        owner = {block: server for server, mine in enumerate(dealt) for block in mine}
        self.owners = tuple(owner[block.index] for block in self.blocks)
        while len(self.addresses) < num_servers:
            self.hub.run_once(1.0)
            self._check_servers()
        for index, mine in enumerate(dealt):
            specs = tuple(self.blocks[b] for b in mine)
            self.hub.send(Peer("server", index), Assign(PLAN, specs, layout.groups, NUM_WORKERS))
        self.hub.flush()

    def _check_servers(self) -> None:
        """Raise an error if a server has ended; the server has printed why."""
        for event in self.zygote.events():
            if isinstance(event, Started) and event.token in self.tokens:
                self.started[event.token] = event.pid
            elif isinstance(event, SpawnFailed) or (isinstance(event, Exited) and event.token in self.tokens):
                raise RuntimeError(f"a server ended during the measurement: {event}.")

    def _start_server(self, index: int) -> int:
        config = RunConfig(
            task="",
            strategy="downpour",
            strategy_settings={"optimizer": self.optimizer, "lr": 1e-3},
            num_workers=NUM_WORKERS,
            num_servers=self.num_servers,
        )
        job = Job(
            role="server",
            index=index,
            run_id=self.run_id,
            keys=self.keys,
            coordinator=Address("", 0, self.unix, this_machine()),
            config=config,
        )
        entry = "rainband.runtimes.processes.server_process:main"
        return self.zygote.spawn(entry, encode_job(job), f"rainband server {index}", threads=1)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        match message:
            case ServerJoin():
                self.addresses[connection.peer.index] = message.address
            case Ready():
                self.ready.add(connection.peer.index)

    def lost(self, peer: Peer) -> None:
        """Do nothing: `_check_servers` notices a lost server."""

    def measure(self, num_workers: int, rounds: int, limit: bool = True) -> list[Seconds]:
        """Return, for each worker, the seconds of each push + apply + pull; all work at the same time."""
        goes, processes = [], []
        for index in range(num_workers):
            go_read, go_write = os.pipe()
            order = WorkerOrder(
                index=index,
                num_elements=self.num_elements,
                rounds=rounds,
                warmup=3,
                addresses=tuple(self.addresses[i] for i in range(self.num_servers)),
                owners=self.owners,
                blocks=self.blocks,
                transport=self.transport,
                run_id=self.run_id,
                keys=self.keys,
                limit=OptimizerSpec(self.optimizer, {"lr": 1e-3}) if limit else None,
            )
            entry = "rainband.bench.harness.cluster:worker_main"
            processes.append(BenchProcess(self.zygote, entry, order, f"rainband worker {index}", [go_read]))
            os.close(go_read)
            goes.append(go_write)
        for process in processes:
            process.read_byte(self._idle)  # it is connected
        for go in goes:
            os.write(go, b"g")
            os.close(go)
        return [process.result(Seconds, self._idle) for process in processes]

    def _idle(self) -> None:
        self.hub.run_once(0.0)
        self._check_servers()

    def close(self) -> list[tuple[int, int]]:
        """Stop the servers; return for each the bytes of its peak resident size, and those shared with others."""
        self._check_servers()
        peaks = [(_peak_bytes(pid), _shared_bytes(pid)) for pid in self.started.values()]
        for index in range(self.num_servers):
            self.hub.send(Peer("server", index), Shutdown())
        self.hub.close()
        waiting, deadline = set(self.tokens), time.monotonic() + 10
        while waiting and time.monotonic() < deadline:
            readable_within(self.zygote, 0.1)
            waiting -= {event.token for event in self.zygote.events() if isinstance(event, Exited)}
        return peaks


def _peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmHWM"].split()[0]) * 1024


def _shared_bytes(pid: int) -> int:
    """Return the anonymous memory shared with other processes: torch's objects, imported by the zygote."""
    shared = dirty = 0
    with open(f"/proc/{pid}/smaps") as mappings:
        for line in mappings:
            name, _, rest = line.partition(":")
            if name == "Shared_Dirty":
                dirty = int(rest.split()[0])
            elif name == "Anonymous" and int(rest.split()[0]):  # follows Shared_Dirty; mailboxes have none
                shared += dirty
    return shared * 1024


def vector_module(num_elements: int) -> nn.Module:
    """Return a module with one long parameter and nothing else."""
    module = nn.Module()
    module.vector = nn.Parameter(torch.zeros(num_elements))
    return module


def worker_main(job: bytes, fds: list[int]) -> None:
    """Push the same gradient and pull the parameters, repeatedly; report the seconds."""
    order = msgspec.msgpack.decode(job, type=WorkerOrder)
    result_fd, go_fd = fds
    bench = BenchWorker(order)
    limit = PhysicalLimit(order.num_elements, order.limit) if order.limit else None
    os.write(result_fd, b"c")
    os.read(go_fd, 1)
    for _ in range(order.warmup):
        bench.exchange()
        if limit:
            limit.apply_and_copy()
    seconds: Any = []
    for _ in range(order.rounds):  # in turns, so that a disturbance hits both
        seconds.append((timed(bench.exchange), timed(limit.apply_and_copy) if limit else 0.0))
    os.write(result_fd, msgspec.msgpack.encode(seconds))
    os.close(result_fd)


class BenchWorker:
    """A client with real ports to the servers."""

    def __init__(self, order: WorkerOrder) -> None:
        self.event_loop = EventLoop()
        self.client: Client | None = None
        self.order = order
        self.stats = Stats()
        flat = Flat(vector_module(order.num_elements))
        me = Peer("worker", order.index)
        ports = [self._port(me, i, address) for i, address in enumerate(order.addresses)]
        self.client = Client(me, PLAN, flat, order.blocks, order.owners, ports, lambda message: None)
        self.client.servers.stats = self.stats
        self.gradient: Tensor = torch.full((order.num_elements,), 1e-3)
        self.batch = order.index << 20
        if order.index == 0:
            self.client.load()

    def _port(self, me: Peer, index: int, address: Address) -> Port:
        order = self.order
        specs = [order.blocks[b] for b, owner in enumerate(order.owners) if owner == index]
        shared = order.transport == "shm"
        assert not shared or can_share_memory(address)
        sock, _, key = connect(address, shared, order.keys, order.run_id, me, 5.0)
        peer = Peer("server", index)
        if shared:
            return SharedPort(peer, sock, key, specs, self.event_loop, self._deliver, self.stats)
        return TcpPort(peer, sock, key, specs, self.event_loop, self._deliver, self.stats)

    def _deliver(self, message: Message, payload: Tensor | None) -> None:
        if self.client is not None and not isinstance(message, Opened):
            self.client.receive(message, payload)

    def exchange(self) -> None:
        """Push a gradient, wait until it is applied, and pull the new parameters."""
        assert self.client is not None
        batch = Batch(self.batch // 64, self.batch % 64, 1)
        self.batch += 1
        pull = self.client.exchange(Gradient([self.gradient], (batch,), 1, 0.0))
        while not pull.ready():
            self.event_loop.wait()
