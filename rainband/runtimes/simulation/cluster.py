"""A simulated cluster: nodes, network and clock put together, and driven to the run's end or to a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop
from math import inf
from random import Random

import msgspec

from rainband.codecs.codec import Codec
from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.coordinator.liveness import server_patience_s
from rainband.coordinator.state import BEFORE_THE_END, FailureCause, Phase
from rainband.errors import Deadlock
from rainband.observer import Observer, join_observers
from rainband.protocol import events
from rainband.protocol.layout import ITEM_BYTES
from rainband.protocol.messages import COORDINATOR, Address, Join, Peer, ServerJoin
from rainband.protocol.ports import Port
from rainband.protocol.steps import Handle, Until
from rainband.record.spans import SpanRecorder
from rainband.runtimes.checkpoints.restore import CheckpointAccess
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.simulation.aggregated import AggregatedPort, AggregatedServersNode, as_one_block, make_aggregated
from rainband.runtimes.simulation.message_bus import InFlight, MessageBus, Node
from rainband.runtimes.simulation.models.clock import VirtualClock
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputePace
from rainband.runtimes.simulation.models.cores import Cores, OwnCore, nothing
from rainband.runtimes.simulation.models.network import Machine, Network
from rainband.runtimes.simulation.models.trace import NodeEvent, Trace
from rainband.runtimes.simulation.nodes import CoordinatorNode, ServerNode, unchanged, without_elements
from rainband.runtimes.simulation.rounds import SimulatedRounds
from rainband.runtimes.simulation.stages import StageCompute, StageNode
from rainband.runtimes.simulation.worker import SimPort, SimulatedCompute, WorkerNode
from rainband.strategy import ServerPart, Strategy
from rainband.views.spans import Span
from rainband.worker.client import StateChanged
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle

SLOTS_PER_TICK = 256  # of the clock, for thousands of workers
KERNEL_PATIENCE_S = 20.0  # until the kernel closes a connection to a machine that crashed
RESTART_S = 1.0  # from the loss of a replica to the start of its next processes

Show = Callable[[events.AnyEvent], None]


@dataclass
class Notes:
    """The records of a run: trace, spans, events."""

    trace: Trace = field(default_factory=Trace)
    spans: list[Span] | None = None  # None: no spans
    show: Show = field(default=lambda event: None)
    # Called for each node when it is made.
    observe: Callable[[Peer], Observer | None] = field(default=lambda peer: None)


@dataclass
class Scenario:
    """The strategy, task and workers of a simulation, without its times and faults."""

    strategy: Strategy
    join: Join
    make_compute: Callable[[], SimulatedCompute]
    real: bool  # with gradients, not only timing
    aggregated: bool = False  # simulate all servers as one, for thousands of workers
    eval_every_s: float = 0.0  # between two evaluations by worker 0; 0: only at the end
    hogwild_server: HogwildServer | None = None  # if all workers share one memory
    stage_compute: Callable[[int], StageCompute] | None = None  # by worker, if several compute one model together
    equal_parts: bool = False  # of batches that workers share
    checkpoints: CheckpointAccess | None = None  # None: there are none
    codecs: tuple[Codec | None, Codec | None] = (None, None)  # of what workers and what servers send

    def server_part(self, num_workers: int) -> ServerPart:
        part = self.strategy.server(num_workers)
        assert part is not None, "a strategy without servers was given one"
        return part


class SimulatedCluster:
    """One simulated run."""

    def __init__(
        self,
        scenario: Scenario,
        settings: RunSettings,
        model: ClusterModel,
        notes: Notes,
        tick_s: float = 1.0,
        shuffle: Random | None = None,
        seed: int | None = None,
    ) -> None:
        """`seed` seeds times and faults; None: the seed of the data plan."""
        self.scenario = scenario
        self.settings = settings
        self.model = model
        self.notes = notes
        self.trace, self.spans = notes.trace, notes.spans
        self.tick_s = tick_s
        # At every tick; with thousands of workers just often enough that none is declared lost.
        self.heartbeat_s = max(tick_s, 0.8 * settings.failure_timeout_s) if scenario.aggregated else tick_s
        self.clock = VirtualClock(shuffle, SLOTS_PER_TICK / tick_s if scenario.aggregated else 0.0)
        self.seed = settings.seed if seed is None else seed
        self.network = Network(model.network, self.clock, self.seed)
        self.bus = MessageBus(self.clock, self.network, notes.trace)
        nodes = model.nodes
        self.cores: Cores | OwnCore = (
            Cores(self.clock, nodes.cores, nodes.crowding, nodes.wake_s, nodes.moves)
            if nodes.cores
            else OwnCore(self.clock)
        )
        one_server = scenario.aggregated or scenario.hogwild_server is not None
        known = msgspec.structs.replace(settings, num_servers=1) if one_server else settings
        self.coordinator = Coordinator(known, scenario.strategy)
        self.coordinator_node = self._add_coordinator(self.network.machine())
        self.servers: dict[int, ServerNode | AggregatedServersNode] = {}
        self.copies: dict[int, ServerNode] = {}  # server -> its copy, or where one is being made
        self.workers: dict[int, WorkerNode] = {}
        self.restarts = 0  # of the coordinator, that are still to come
        num_bytes = sum(vector.numel * ITEM_BYTES[vector.dtype] for vector in scenario.join.layout.vectors)
        in_rounds = scenario.strategy.requires.in_rounds
        self.rounds = (
            SimulatedRounds(self, settings.num_workers, num_bytes, scenario.strategy.requires.algorithm)
            if in_rounds
            else None
        )

    def start(self) -> None:
        if self.scenario.aggregated:
            self._add_aggregated()
        else:
            for index in range(self.settings.num_servers):
                self.add_server(index)
        for index in range(self.settings.num_workers):
            self.add_worker(index)

    def _add_coordinator(self, machine: Machine) -> CoordinatorNode:
        scenario, nodes = self.scenario, self.model.nodes
        adapt = unchanged if scenario.real else as_one_block if scenario.aggregated else without_elements
        occupy = partial(self.cores.work, nodes.message_s, nothing, COORDINATOR) if nodes.cores else nothing
        observer = self.notes.observe(COORDINATOR)
        hogwild_server, show = scenario.hogwild_server, self._show if self.settings.restarts else self.notes.show
        node = CoordinatorNode(self, machine, self.coordinator, show, adapt, occupy, hogwild_server, observer)
        self.bus.nodes[COORDINATOR] = node
        return node

    def restart_soon(self, lost: Peer) -> None:
        """Start the replica of a lost worker again after a while, if the runtime does so."""
        if self.settings.restarts and lost.role == "worker":
            self.clock.after(RESTART_S, self._start_lost_replicas)

    def _show(self, event: events.AnyEvent) -> None:
        self.notes.show(event)
        if isinstance(event, events.Lost) and event.node.startswith("worker"):
            self.restart_soon(Peer("worker", int(event.node.split()[1])))

    def _start_lost_replicas(self) -> None:
        """Start replicas again of which a worker was lost, all their workers as the same incarnation."""
        state = self.coordinator.state
        if state.phase not in BEFORE_THE_END or state.outcome != "finished":
            return
        for first in range(0, self.settings.num_workers, self.settings.workers_per_replica):
            ranks = state.replica_indices(first)
            if any(map(self._is_lost, ranks)) and state.missing.isdisjoint(ranks):
                for rank in ranks:
                    self.kill(self.workers[rank])
                incarnation = 1 + max(self.workers[rank].peer.incarnation for rank in ranks)
                for rank in ranks:
                    self.add_worker(rank, incarnation)

    def _is_lost(self, rank: int) -> bool:
        """Return True if a worker has ended, and the coordinator knows."""
        node, known = self.workers[rank], self.coordinator.state.workers.get(rank)
        return not known.connected if known is not None and known.peer == node.peer else not node.alive

    def add_server(self, index: int, incarnation: int = 0) -> None:
        peer = Peer("server", index, incarnation)
        node = ServerNode(self, peer, self.network.machine(), self._observer(peer))
        self.servers[index] = self.bus.nodes[node.peer] = node
        node.join(COORDINATOR)

    def add_copy(self, peer: Peer) -> None:
        """Start a server that becomes the copy of another one."""
        node = ServerNode(self, peer, self.network.machine(), self._observer(peer))
        self.copies[peer.index] = self.bus.nodes[peer] = node
        node.join(COORDINATOR)

    def use_copy(self, peer: Peer) -> None:
        """Count a copy that has taken over as the server."""
        node = self.bus.nodes.get(peer)
        if node is not None and self.copies.get(peer.index) is node:
            self.servers[peer.index] = self.copies.pop(peer.index)

    def _add_aggregated(self) -> None:
        aggregated = make_aggregated(self.model, self.scenario.join.layout, self.settings.num_servers)
        node = AggregatedServersNode(self.bus, self.network.machine(), self.scenario.server_part, aggregated)
        self.servers[0] = self.bus.nodes[node.peer] = node
        self.bus.send(node, COORDINATOR, ServerJoin(Address("", 0, node.name)))

    def add_worker(self, index: int, incarnation: int = 0) -> WorkerNode:
        scenario = self.scenario
        if self.rounds is not None and index in self.workers:
            self.rounds.exclude(index)  # its process has ended before it is started again
        pace = ComputePace(self.model.compute, self.seed, index + 1_000_003 * incarnation)
        peer = Peer("worker", index, incarnation)
        observer, machine = self._observer(peer), self.network.machine()
        node = (
            WorkerNode(self, peer, machine, scenario.make_compute(), pace, observer)
            if scenario.stage_compute is None
            else StageNode(self, peer, machine, scenario.stage_compute(index), pace, observer)
        )
        if index == 0 and scenario.real:
            node.eval_every_s = scenario.eval_every_s
        self.workers[index] = self.bus.nodes[node.peer] = node
        node.start()
        return node

    def _observer(self, peer: Peer) -> Observer | None:
        observers = [self.notes.observe(peer)]
        if self.spans is not None:
            observers.append(SpanRecorder(f"{peer.role} {peer.index}", self.clock.now_s, self.spans.append))
        return join_observers(filter(None, observers))

    def port(self, worker: WorkerNode, server: int) -> Port:
        node = self.servers.get(server)  # a hogwild server is not among them
        if isinstance(node, AggregatedServersNode):
            return AggregatedPort(worker, node)
        peer = Peer("server", server) if node is None else node.peer
        return SimPort(worker, peer, lambda: self.servers[server] if node is None else node, self.scenario.real)

    def block_bytes(self, block: int) -> int:
        """Return the true size of a block, also where the nodes' blocks are hollow."""
        return self.coordinator_node.block_bytes[block]

    def kill(self, node: Node, keep: Callable[[InFlight], bool] = lambda in_flight: True, silent: bool = False) -> None:
        """End a node now. Messages that have not left are lost; of those under way, those that `keep` returns arrive.

        The others see its connections close: at once, or if `silent`, when their kernels give the machine up.
        """
        if not node.alive:
            return
        event = NodeEvent.CRASHED if silent else NodeEvent.KILLED
        self.trace.note(self.clock.now, node.name, event, event.name.lower())
        node.alive, node.killed_at = False, self.clock.now
        self.bus.nodes.pop(node.peer)
        self.bus.ended.append(node)
        for flow in node.flows.values():
            lost = False
            for in_flight in flow.under_way:  # a connection breaks: nothing arrives after the first lost message
                assert isinstance(in_flight, InFlight)
                lost = lost or not keep(in_flight)
                in_flight.lost = lost
        if node is self.coordinator_node and self.coordinator.journal is not None and self.restarts:
            self.coordinator_node.show(events.Lost(at_s=self.clock.now, node=node.name, why="killed"))
            return  # the others wait for the next coordinator
        if node is self.coordinator_node:
            self.coordinator.state.fail(
                "the coordinator was lost: no other can continue this run.", FailureCause.COORDINATOR_LOST
            )
            self.coordinator.state.enter(Phase.OVER)
        if isinstance(node, WorkerNode):
            node.waiting = None
            with suppress(RuntimeError):  # the strategy refuses to end
                node.steps.close()
        self.clock.after(KERNEL_PATIENCE_S if silent else 0.0, lambda: self._close(node))

    def start_coordinator(self) -> None:
        """Start the coordinator again with the journal of the one before; the workers join again."""
        before, self.restarts = self.coordinator_node, self.restarts - 1
        journal = self.coordinator.journal
        if before.alive or journal is None:
            return
        self.trace.note(self.clock.now, before.name, NodeEvent.STARTED, "started again")
        self.coordinator.state.enter(Phase.REPLACED)
        settings = self.coordinator.state.settings
        self.coordinator = Coordinator(settings, self.scenario.strategy, journal.resumed())
        self.coordinator_node = self._add_coordinator(before.machine)
        self.coordinator_node.block_bytes = before.block_bytes
        self.coordinator_node.send(self.coordinator.resume(self.clock.now))
        for server in [server.peer for server in self.coordinator.state.servers.values()]:
            if server not in self.bus.nodes:  # it refuses the connection, or has been started again without its blocks
                self.coordinator_node.lost(server)
        for node in self.workers.values():
            if node.alive and not node.over:
                node.wake(node.join_again)
            else:
                self.coordinator_node.lost(node.peer)

    def _close(self, node: Node) -> None:
        for other in list(self.bus.nodes.values()):
            self.bus.send(node, other.peer, None)

    def disconnect(self, one: Node, other: Node) -> None:
        """Break the connection of two nodes: messages under way are lost, and both see it close."""
        what = f"lost its connection with {other.name}"
        self.trace.note(self.clock.now, one.name, NodeEvent.DISCONNECTED, what)
        for flow in (self.bus.flow(one, other), self.bus.flow(other, one)):
            flow.broken = True
            for in_flight in flow.under_way:
                assert isinstance(in_flight, InFlight)
                in_flight.lost = True
        self.bus.send(one, other.peer, None)
        self.bus.send(other, one.peer, None)

    def pause(self, node: Node, for_s: float) -> None:
        """Stop a node for a while, as by SIGSTOP: it loses nothing and does nothing."""
        if node.alive:
            self.trace.note(self.clock.now, node.name, NodeEvent.PAUSED, f"paused for {for_s}")
            node.paused_until = max(node.paused_until, self.clock.now + for_s)

    def stop(self) -> None:
        """End the run early, as Ctrl-C does."""
        self.coordinator_node.send(self.coordinator.shutdown.stop("stopped", "interrupted"))

    def run(self, until_s: float | None = None) -> None:
        """Run until the run is over, or until a moment; raises Deadlock when nothing can happen any more."""
        clock, state, planned = self.clock, self.coordinator.state, self.clock.planned
        look_at, until_s, phase = clock.now + self.tick_s, inf if until_s is None else until_s, state.phase
        while phase != "over" and clock.now < until_s:
            if not planned and not clock.go_on():
                raise Deadlock(who_waits(self))
            clock.now, _, do = heappop(planned)  # clock.step(), inlined: this is the hottest loop
            do()
            if state.phase != phase:
                state = self.coordinator.state  # of another coordinator, if it was started again
                phase = state.phase
                clock.progress_at = clock.now
            if clock.now > look_at and len(planned) + clock.num_later == clock.idle:
                look_at = clock.now + self.tick_s
                if clock.now - clock.progress_at > self._patience_s() and not self.bus.has_waiting():
                    raise Deadlock(who_waits(self))

    def _patience_s(self) -> float:
        """Return a time longer than any deadline of the coordinator, which may yet declare a node lost."""
        state, timeout_s = self.coordinator.state, self.settings.failure_timeout_s
        slowest = max((w.slowest_s for w in state.workers.values()), default=0.0)
        silent = any(server.reported_silent for server in state.servers.values())
        return 10 * timeout_s + 20 * slowest + 10 * self.tick_s + silent * server_patience_s(timeout_s)


def who_waits(cluster: SimulatedCluster) -> str:
    """Return one line for each node that waits: for which node, for what, since when."""
    lines = [f"at {cluster.clock.now:.3f} s every node waits and no message is under way."]
    lines.append(f"  coordinator: {cluster.coordinator.waits_for()}")
    for node in cluster.workers.values():
        if node.alive and node.waiting is not None:
            what = _awaited_by(node, node.waiting)
            lines.append(f"  {node.name} waits for {what}, since {node.waiting_since:.3f} s")
    for server in cluster.servers.values():
        readers = sorted({str(to) for b in server.server.blocks.values() for to in b.waiting})
        if readers:
            versions = sorted({b.version for b in server.server.blocks.values()})
            at = f"its blocks are at version {', '.join(map(str, versions))}"
            lines.append(f"  {server.name} delays replies to {', '.join(readers)}: {at}")
    return "\n".join(lines)


def _awaited_by(node: WorkerNode, handle: Handle) -> str:
    client = node.client
    match handle:
        case Until():
            return handle.what
        case StateChanged():
            return "the coordinator: a lease, or the end"
        case PushHandle() if client is not None:
            silent = sorted({client.servers.port_of[b].peer for b, q in enumerate(client.pushes.unanswered) if q})  # type: ignore[attr-defined]
            return f"{', '.join(map(str, silent))} to answer {handle.left} blocks of a push"
        case PullHandle() if client is not None:
            what = f"round {handle.at_version}" if handle.at_version >= 0 else "the parameters"
            return f"the servers: {handle.left} of {len(client.servers.blocks)} blocks of {what}"
    return repr(handle)
