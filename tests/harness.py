"""A whole run in one process: the real coordinator, servers and workers, with faults, replayed from a seed.

Nodes talk over lines: first in, first out, one for each direction between two nodes. Which line delivers next, who
computes next and what breaks is drawn from one random generator, so a seed gives the same run for ever. What the run
must come to is in `ledger.py`; which runs and faults are drawn, in `storms.py`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

import rainband.coordinator.planning
import rainband.server.block_parameters
from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.errors import Stop
from rainband.model.gradient import Gradient
from rainband.protocol.data_plan import DataPlan, choose_portion_batches
from rainband.protocol.layout import BlockSpec, LayoutEntry, arrange
from rainband.protocol.messages import (
    COORDINATOR,
    AcceptedBatches,
    Ack,
    Address,
    Conclude,
    Dataset,
    Failed,
    Finish,
    Forget,
    Heartbeat,
    InitBlock,
    Join,
    Lease,
    LeaseRequest,
    Message,
    Params,
    Peer,
    Pull,
    Push,
    Report,
    ReportRequest,
    Return,
    Revoke,
    ServerJoin,
    Welcome,
    decode,
    encode,
)
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.protocol.ports import BlockValues, Port
from rainband.protocol.steps import Handle, Steps
from rainband.server.block import Block
from rainband.server.server import Server
from rainband.strategy import Batch, ServerPart
from rainband.worker.client import Client
from rainband.worker.lifecycle import run_worker
from rainband.worker.session import Dismissed, Session, join_of
from rainband.worker.work_items import StillNeeded
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import Buffers, WorkerModel, pull_final
from tests.ledger import ELEMENTS, Case, CountingOptimizer, Ledger, Memory, Wrong, check_block, number_of

TIMEOUT_S = 5.0
M = TypeVar("M", bound=Message)
MAY_COME_TWICE = (
    Push,
    Ack,
    Pull,
    Params,
    Revoke,
    AcceptedBatches,
    Forget,
    ReportRequest,
    Report,
    Lease,
    LeaseRequest,
    Return,
    Heartbeat,
    Finish,
)
MAY_COME_AGAIN_LATER = (Push, Ack, Revoke, AcceptedBatches)


class Killed(BaseException):
    """A worker's process ends here, in the middle of whatever it was doing."""


class InFlight(NamedTuple):
    """A message on a line."""

    message: Message | None  # None: the connection has closed
    payload: Tensor | None = None
    body: bytes | None = None
    read: bool = False  # the payload is read when it arrives, not when it was sent


CLOSED = InFlight(None)


def replaced(message: M, **changes: object) -> M:
    """The same message with some fields changed."""
    return msgspec.structs.replace(message, **changes)


@dataclass(frozen=True)
class Faults:
    """The number of faults of each kind; the seed decides when they happen, and to which node."""

    kills: int = 0
    restarts: int = 0  # a killed worker comes back under its own number
    pauses: int = 0  # a worker stops, is given up, and wakes when others have its work
    suspicions: int = 0  # a worker's heartbeats are late, it works on
    reconnects: int = 0  # a connection breaks; what is unanswered is sent again, in any order
    duplicates: float = 0.0  # the part of the messages that come twice
    latecomers: int = 0
    stop: bool = False  # the run is stopped early


# ---- workers ---------------------------------------------------------------------------------------------------------


class LinePort:
    """A worker's way to one server: a line, or the server's own memory."""

    def __init__(self, cluster: SimulatedCluster, worker: Node, server: Peer) -> None:
        self.cluster = cluster
        self.worker = worker
        self.server = server
        self.direct = cluster.case.direct
        self.unanswered: dict[tuple[int, int], InFlight] = {}  # (block, sequence) -> the push, to be sent again
        self.inbox: dict[int, Tensor] = {}  # a reply lands here, over the one before

    def send(self, message: Message) -> None:
        self._send(InFlight(message))

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        if self.direct and self.cluster.random.random() < 0.1:  # waiting for room, it takes what has come
            self.cluster.hand_over_some(self.server, self.worker.peer)
        payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
        values.write(payload)
        self._send(InFlight(message, payload))

    def _send(self, in_flight: InFlight) -> None:
        self.worker.may_die()
        if isinstance(in_flight.message, Push):
            self.unanswered[in_flight.message.block, in_flight.message.sequence] = in_flight
        self.cluster.bus(self.worker.peer, self.server, in_flight)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        block = self.cluster.servers[self.server].blocks[spec.index]
        if not (at_version < 0 or at_version <= block.version <= at_version + 1):
            return None
        version = block.version if at_version < 0 else at_version
        out.copy_(block.buffer.at(version))
        return version

    def arrived(self, in_flight: InFlight) -> InFlight:
        """Before a reply is handed to the client."""
        match in_flight.message:
            case Ack():
                self.unanswered.pop((in_flight.message.block, in_flight.message.sequence), None)
            case Params() if in_flight.payload is not None:
                block = in_flight.message.block
                inbox = self.inbox.setdefault(block, torch.empty_like(in_flight.payload))
                inbox.copy_(in_flight.payload)
                return in_flight._replace(payload=None if self.direct else inbox)
        return in_flight


class LedgerModel(WorkerModel[ModuleWorker]):
    """A worker's parameters as a ledger; its gradients are computed by the node."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        memory: Any = self.node.memory
        return Client(me, welcome.plan, memory, welcome.blocks, welcome.owners, ports, tell)

    def worker(self, index: int, client: Client) -> ModuleWorker:
        nothing: Any = None
        return ModuleWorker(index, self.node.case.num_workers, nothing, nothing, torch.nn.Module(), client)

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float]:
        await pull_final(worker.client)
        self.node.cluster.saved = [parameter.clone() for parameter in self.node.memory.parameters]
        return {}


class Node:
    """A worker as a runtime: the real life of a worker, advanced when the cluster's random generator says so."""

    def __init__(self, cluster: SimulatedCluster, peer: Peer) -> None:
        self.cluster = cluster
        self.case = cluster.case
        self.peer = peer
        self.rank = peer.index
        self.memory = Memory(cluster.layout, cluster.ledger)
        self.ports: list[LinePort] = []
        self.dismissed = False
        self.paused = False
        self.dies_at = -1  # after this many more frames
        self.session = Session(peer, self)
        self.session.prepare(self.case.strategy, cluster.join(), LedgerModel(self))
        self.life: Steps[None] | None = None  # once it has begun
        self.needed: Any = None  # what it needs to go on

    @property
    def client(self) -> Client | None:
        return self.session.client

    # ---- what a runtime supplies ----

    def tell(self, message: Message, body: bytes | None = None) -> None:
        if isinstance(message, Failed):
            raise Wrong(f"{self.peer} failed: {message.error}\n{message.traceback}")
        self.cluster.bus(self.peer, COORDINATOR, InFlight(message, body=body))

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        self.ports = [LinePort(self.cluster, self, Peer("server", i)) for i in range(self.case.num_servers)]
        return list(self.ports)

    def before_training(self, worker: ModuleWorker) -> None: ...

    def flush_output(self) -> None: ...

    async def saved(self) -> None: ...

    async def failure_is_known(self) -> None: ...

    # ---- being driven ----

    def runnable(self) -> bool:
        return not self.paused and not self.dismissed and self._can_go_on()

    def _can_go_on(self) -> bool:
        needed = self.needed
        if not isinstance(needed, Handle) or isinstance(needed, StillNeeded):
            return True  # to compute, or to begin
        ready = needed.ready()
        if self.session.training:
            self.session.stats.waiting = not ready
        return ready or self.session.must_stop(needed)

    def run(self) -> None:
        """Provide what the worker needs, and let it go on until it needs something else."""
        needed, error = self.needed, None
        self.life = self.life or Steps(run_worker(self.session))
        if isinstance(needed, Compute):
            needed.result = self._compute(needed.worker.client, needed.batch)
        elif isinstance(needed, StillNeeded):
            needed.looked = True
        elif needed is not None and not needed.ready():
            self.session.stopped, error = True, Stop()
        self.needed = self.life.go_on(error)

    def may_die(self) -> None:
        self.dies_at -= 1
        if self.dies_at == 0:
            raise Killed

    def receive(self, sender: Peer, in_flight: InFlight) -> None:
        assert in_flight.message is not None
        if sender.role == "server":
            in_flight = self.ports[sender.index].arrived(in_flight)
            assert in_flight.message is not None
        try:
            self.session.receive(in_flight.message, in_flight.payload)
        except Dismissed:
            self.dismissed = True

    def _compute(self, client: Client, batch: Batch) -> Gradient:
        plan = client.plan
        number = number_of(plan, batch.portion, batch.k)
        samples = plan.samples_in(batch.portion, batch.k)
        client.stats.steps += 1
        client.stats.samples += samples
        if plan.items_per_round and not getattr(
            self.case.strategy, "backup_workers", 0
        ):  # otherwise it shows who was late
            self.check_round_read(plan.round_of(batch.portion, batch.k), plan)
        return Gradient(self.gradients(number), (batch,), samples, 0.0)

    def check_round_read(self, round_: int, plan: DataPlan) -> None:
        """Check that a work item of a round is computed at exactly that round's version of every block."""
        for block, (parameter, versions) in enumerate(
            zip(self.memory.parameters, self.cluster.versions_of(plan), strict=True)
        ):
            if not torch.equal(parameter, versions[round_].to(parameter.dtype)):
                equal = [r for r, v in enumerate(versions) if torch.equal(parameter, v.to(parameter.dtype))]
                raise Wrong(f"{self.peer} computes round {round_} with block {block} at version {equal}")

    def gradients(self, number: int) -> list[Tensor | None]:
        """Of a batch, by its number in the run: zero but for one element."""
        tensors: list[Tensor | None] = []
        for index, parameter in enumerate(self.memory.parameters):
            if (number, index) in self.case.absent:
                tensors.append(None)
                continue
            gradient = torch.zeros_like(parameter)
            gradient[number] = self.cluster.ledger.amount(index, number)
            if number in self.case.not_finite and index == number % len(self.memory.parameters):
                gradient[number] = math.nan
            tensors.append(gradient)
        return tensors


# ---- the runtime -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The results of a run."""

    steps: int
    seconds: float
    coordinator: Coordinator
    blocks: dict[int, Block]
    saved: list[Tensor] = field(default_factory=list)


class SimulatedCluster:
    """All nodes of a run, the lines between them, and what goes wrong."""

    def __init__(
        self,
        seed: int,
        case: Case,
        faults: Faults = Faults(),  # noqa: B008
        max_steps: int = 20_000,
        node: type[Node] = Node,
    ) -> None:
        self.random = random.Random(seed)
        self.node = node
        self.case = case
        self.faults = faults
        self.max_steps = max_steps
        self.ledger = Ledger(case)
        entries = [
            LayoutEntry(f"{dtype} {v} {s}", (ELEMENTS,), dtype, device=f"vector {v}")
            for v, dtype in enumerate(case.dtypes)
            for s in range(case.num_servers)
        ]
        self.layout = arrange(entries)
        self.now = 0.0
        self.steps = 0
        self.lines: dict[tuple[Peer, Peer], deque[InFlight]] = {}
        self.speed: dict[tuple[Peer, Peer], float] = {}
        self.saved: list[Tensor] = []
        self.versions: list[list[Tensor]] = []
        self.trace: deque[tuple[object, ...]] = deque(maxlen=40)
        self.pace = self.random.choice((0.3, 1.0, 5.0))  # how fast computing is, beside the lines
        self.time_passes = 0.015  # at this fraction of the steps; 0: never
        self.coordinator = Coordinator(
            RunSettings(num_workers=case.num_workers, num_servers=case.num_servers, failure_timeout_s=TIMEOUT_S),
            case.strategy,
        )
        self.servers = {Peer("server", i): Server(self._half, self._publish) for i in range(case.num_servers)}
        for peer in self.servers:
            self.bus(peer, COORDINATOR, InFlight(ServerJoin(Address("here", 0))))
        self.workers: dict[Peer, Node] = {}
        for index in range(case.num_workers):
            self._add_worker(Peer("worker", index))
        self.restarts_left = faults.restarts
        self.todo = self._draw_faults()

    def _portion_batches(self, *given: int) -> int:
        return self.case.portion_batches or choose_portion_batches(*given)

    def _half(self, num_workers: int) -> ServerPart:
        half = self.case.strategy.server(num_workers)
        assert half is not None
        return half

    def _publish(self, specs: Sequence[BlockSpec], buffers: int) -> list[ParameterBuffer]:
        return [
            ParameterBuffer([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])
            for spec in specs
        ]

    def join(self) -> Join:
        case = self.case
        dataset = Dataset("the data", case.num_samples, case.batch_size, case.epochs)
        return join_of(case.strategy, self.layout, dataset)

    def _add_worker(self, peer: Peer) -> Node:
        node = self.workers[peer] = self.node(self, peer)
        return node

    # ---- lines ----

    def bus(self, sender: Peer, to: Peer, in_flight: InFlight) -> None:
        if to.role == "worker" and to not in self.workers:
            return  # nobody is there any more
        if in_flight.message is not None:
            in_flight = in_flight._replace(message=decode(encode(in_flight.message)))
        key = sender, to
        if key not in self.lines:
            self.lines[key] = deque()
            self.speed[key] = self.random.choice((1.0, 1.0, 0.3, 0.05))
        self.lines[key].append(in_flight)

    def deliver(self, sender: Peer, to: Peer) -> None:
        line = self.lines[sender, to]
        in_flight = line.popleft()
        if isinstance(in_flight.message, MAY_COME_TWICE) and self.random.random() < self.faults.duplicates:
            later = isinstance(in_flight.message, MAY_COME_AGAIN_LATER) and self.random.random() < 0.5
            line.append(in_flight) if later else line.appendleft(in_flight)
        self.hand_over(sender, to, in_flight)

    def hand_over(self, sender: Peer, to: Peer, in_flight: InFlight) -> None:
        self.trace.append((sender, to, in_flight.message))
        if to == COORDINATOR:
            self._coordinator_gets(sender, in_flight)
        elif to.role == "server":
            self._server_gets(sender, to, in_flight)
        elif to in self.workers:
            if in_flight.read:
                in_flight = self._read(sender, in_flight)
            node = self.workers[to]
            try:
                node.receive(sender, in_flight)
            except Killed:  # with what it sends at once
                self.bury(node)

    def hand_over_some(self, sender: Peer, to: Peer) -> None:
        line = self.lines.get((sender, to), ())
        for _ in range(self.random.randint(0, len(line))):
            self.deliver(sender, to)

    def _read(self, server: Peer, in_flight: InFlight) -> InFlight:
        assert isinstance(in_flight.message, Params)
        message, values = self.servers[server].read(in_flight.message)
        return InFlight(message, None if values is None else values.clone())

    def _coordinator_gets(self, sender: Peer, in_flight: InFlight) -> None:
        if in_flight.message is None:
            self._say(self.coordinator.lost(sender, self.now))
        else:
            self._say(self.coordinator.receive(sender, in_flight.message, self.now, in_flight.body))

    def _say(self, outs: Sequence[Any]) -> None:
        for out in outs:
            self.bus(COORDINATOR, out.to, InFlight(out.message, body=out.body))

    def _server_gets(self, sender: Peer, to: Peer, in_flight: InFlight) -> None:
        server = self.servers[to]
        if in_flight.message is None:
            server.lost(sender)
            return
        for out in server.receive(sender, in_flight.message, in_flight.payload):
            reply = InFlight(out.message, read=out.read)
            if out.read and self.random.random() < 0.5:  # its bytes leave at once, or when the line is free
                reply = self._read(to, reply)
            self.bus(to, out.to, reply)

    # ---- faults ----

    def _draw_faults(self) -> list[tuple[int, Callable[[], None]]]:
        """Draw the faults, each with the number of steps before it."""
        f = self.faults
        kinds: list[Callable[[], None]] = [self._kill] * f.kills + [self._pause] * f.pauses
        kinds += [self._suspect] * f.suspicions + [self._reconnect] * f.reconnects
        kinds += [self._join_late] * f.latecomers + [self._stop] * f.stop
        length = (25 if self.case.rounds else 12) * self.case.num_batches
        return [(self.random.randrange(5, length), kind) for kind in kinds]

    def _alive(self) -> list[Node]:
        return [w for w in self.workers.values() if not w.dismissed]

    def _one_of_several(self) -> Node | None:
        """A worker without which another one can still end the run."""
        well = [w for w in self._alive() if not w.paused and w.dies_at < 0]
        early = self.coordinator.state.phase in ("forming", "loading")
        # One started again counts once it has joined: with everybody else gone meanwhile, the run is over.
        well = [w for w in well if w.client is not None or (early and not w.peer.incarnation)]
        return self.random.choice(well) if len(well) > 1 else None

    def _kill(self) -> None:
        """At once, or in the middle of the next frames it sends."""
        victim = self._one_of_several()
        if victim is None:
            return
        if self.random.random() < 0.5:
            self.bury(victim)
        else:
            victim.dies_at = self.random.randint(1, 2 * self.case.num_blocks)

    def bury(self, node: Node) -> None:
        """Deliver the messages on its lines up to some message, as TCP does; then close the lines."""
        self.trace.append((node.peer, "dies"))
        del self.workers[node.peer]
        for (sender, to), line in list(self.lines.items()):
            if sender == node.peer:
                keep = self.random.randint(0, len(line))
                self.lines[sender, to] = deque([*list(line)[:keep], CLOSED])
            elif to == node.peer:
                del self.lines[sender, to]
        for to in (COORDINATOR, *self.servers):
            if (node.peer, to) not in self.lines:
                self.bus(node.peer, to, CLOSED)
        if self.restarts_left:
            self.restarts_left -= 1
            self._add_worker(Peer("worker", node.peer.index, node.peer.incarnation + 1))

    def _pause(self) -> None:
        node = self._one_of_several()
        if node is None:
            return
        node.paused = True
        given_up_after = self.random.randint(0, 60)
        self._later(given_up_after, lambda: self._suspect(node))
        self._later(given_up_after + self.random.randint(0, 150), lambda: setattr(node, "paused", False))

    def _later(self, steps: int, do: Callable[[], None]) -> None:
        self.todo.append((self.steps + steps, do))

    def _suspect(self, node: Node | None = None) -> None:
        """Let a node's heartbeats be late, while those of the others arrive."""
        node = node or self.random.choice(self._alive())
        self.trace.append((node.peer, "is suspected"))
        self.now += TIMEOUT_S + 0.1
        for other in list(self.workers.values()):
            if other is not node and other.client is not None and not other.paused:
                self.hand_over(other.peer, COORDINATOR, InFlight(other.client.stats.heartbeat()))
        if self.coordinator.state.phase != "over":
            self._say(self.coordinator.tick(self.now))

    def _reconnect(self) -> None:
        node = self.random.choice(self._alive())
        if not node.ports or self.coordinator.state.phase != "running":
            return
        port = self.random.choice(node.ports)
        for key in ((node.peer, port.server), (port.server, node.peer)):
            line = self.lines.get(key)
            if line:
                self.lines[key] = deque(list(line)[: self.random.randint(0, len(line))])
        self.trace.append((node.peer, "connects again to", port.server))
        self.bus(node.peer, port.server, CLOSED)
        again = list(port.unanswered.values())
        self.random.shuffle(again)
        for in_flight in again:
            self.bus(node.peer, port.server, in_flight)
        pull = node.client.pulls.current if node.client else None
        in_place = port.direct and node.client is not None and node.client.pulls.asks is False
        if pull is not None and pull.request is not None and not (in_place and pull.at_version < 0):
            self.bus(node.peer, port.server, InFlight(pull.request))

    def _join_late(self) -> None:
        index = 1 + max(w.rank for w in self.workers.values())
        self._add_worker(Peer("worker", max(index, self.case.num_workers)))

    def _stop(self) -> None:
        self._say(self.coordinator.shutdown.stop("stopped", "asked to"))

    # ---- running ----

    def run(self) -> Outcome:
        """To the end; raises Wrong when the run breaks a promise or does not end."""
        with patch.object(rainband.coordinator.planning, "choose_portion_batches", self._portion_batches):
            while self.coordinator.state.phase != "over":
                self.steps += 1
                if self.steps > self.max_steps:
                    raise Wrong(f"not over after {self.max_steps} steps: {self.where()}")
                self._next()
        blocks = {i: b for s in self.servers.values() for i, b in s.blocks.items()}
        return Outcome(self.steps, self.now, self.coordinator, blocks, self.saved)

    def _next(self) -> None:
        due = [item for item in self.todo if item[0] <= self.steps]
        for item in due:
            self.todo.remove(item)
            item[1]()
        actions: list[Callable[[], None]] = []
        weights: list[float] = []
        for (sender, to), line in self.lines.items():
            if line and not (to in self.workers and self.workers[to].paused):
                actions.append(lambda s=sender, t=to: self.deliver(s, t))  # type: ignore[misc]
                weights.append(self.speed[sender, to] * len(line))
        for node in self.workers.values():
            if node.runnable():
                actions.append(lambda n=node: self._run(n))  # type: ignore[misc]
                weights.append(self.pace)
        if actions and self.random.random() >= self.time_passes:
            self.random.choices(actions, weights)[0]()
        elif self.time_passes:
            self._pass_time()
        else:
            raise Wrong(f"everyone waits: {self.where()}")

    def _run(self, node: Node) -> None:
        try:
            node.run()
        except Killed:
            self.bury(node)

    def _pass_time(self) -> None:
        self.now += self.random.choice((0.2, 1.0, 2.0))
        for node in self.workers.values():
            if node.client is not None and not node.paused and not node.dismissed:
                node.tell(node.client.stats.heartbeat())
        if self.coordinator.state.phase != "over":
            self._say(self.coordinator.tick(self.now))

    def where(self) -> str:
        c = self.coordinator
        held = {str(w.peer): dict(w.leases) for w in c.state.workers.values()}
        steps = "\n".join(" ".join(map(str, what)) for what in self.trace)
        return (
            f"phase {c.state.phase}, {c.state.batches_done()} of {self.case.num_batches} batches, leases {held}, "
            f"to do again {c.leases.again}, asking {list(c.leases.gathering)}, wanting {c.leases.wanting}, "
            f"active {[i for i, w in c.state.workers.items() if w.active]}; last steps:\n{steps}"
        )

    def versions_of(self, plan: DataPlan) -> list[list[Tensor]]:
        """In rounds: every version of every block, as it must be."""
        if not self.versions:
            self.versions = [self.ledger.versions(b, plan.items_per_round) for b in range(self.case.num_blocks)]
        return self.versions


# ---- promises --------------------------------------------------------------------------------------------------------


def check(cluster: SimulatedCluster, outcome: Outcome) -> None:
    """All that is promised at the end of a run, whatever went wrong on its way."""
    coordinator, case = outcome.coordinator, cluster.case
    accounting = coordinator.reporting.accounting()
    if accounting is None and cluster.faults.stop:
        return  # stopped before there was a plan
    assert accounting is not None
    if not accounting.balanced:
        raise Wrong(f"the batch accounting does not balance: {accounting}")
    for index, block in outcome.blocks.items():
        check_block(cluster.ledger, index, block)
    if coordinator.state.outcome == "stopped" and cluster.faults.stop:
        return
    if coordinator.state.outcome != "finished" or accounting.not_processed:
        raise Wrong(f"{coordinator.state.outcome} {coordinator.state.reason}: {accounting}")
    skipped = {
        frozenset((key, mask) for key, mask in b.accounting.skipped.items() if mask) for b in outcome.blocks.values()
    }
    if case.rounds and len(skipped) > 1:
        raise Wrong(f"the blocks have made rounds of different work items: they skipped {skipped}")
    for index, block in outcome.blocks.items():
        if block.accounting.accepted_set.count != case.num_batches:
            raise Wrong(f"block {index} accepted {block.accounting.accepted_set.count} batches of {case.num_batches}")
        if not torch.equal(outcome.saved[index], block.values.to(outcome.saved[index].dtype)):
            raise Wrong(f"block {index} of the saved model is not the server's")


def run(
    seed: int,
    case: Case,
    faults: Faults = Faults(),  # noqa: B008
    max_steps: int = 20_000,
    prepare: Callable[[SimulatedCluster], None] = lambda cluster: None,
) -> Outcome:
    """Run a case to its end and check all promises; the optimizer is the harness's own."""
    cluster = SimulatedCluster(seed, case, faults, max_steps)
    prepare(cluster)
    with patch.object(rainband.server.block_parameters, "BlockOptimizer", CountingOptimizer):
        outcome = cluster.run()
    check(cluster, outcome)
    return outcome
