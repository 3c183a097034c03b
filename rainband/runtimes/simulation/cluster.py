"""A simulated run: nodes, network and clock put together, driven to its end or to the proof that it has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop
from math import inf
from random import Random

import msgspec

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.errors import Deadlock
from rainband.observer import Observer, join_observers
from rainband.protocol import events
from rainband.protocol.messages import COORDINATOR, Address, Join, Peer, ServerJoin
from rainband.protocol.steps import Handle, Until
from rainband.record.spans import Span, SpanRecorder
from rainband.runtimes.config import coordination_of
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.simulation.aggregated import AggregatedPort, AggregatedServersNode, as_one_block, make_aggregated
from rainband.runtimes.simulation.message_bus import InFlight, MessageBus, Node
from rainband.runtimes.simulation.models.clock import VirtualClock
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputePace
from rainband.runtimes.simulation.models.cores import Cores, OwnCore, nothing
from rainband.runtimes.simulation.models.network import Machine, Network
from rainband.runtimes.simulation.models.trace import NodeEvent, Trace
from rainband.runtimes.simulation.nodes import CoordinatorNode, Processor, ServerNode, as_they_are, without_elements
from rainband.runtimes.simulation.stages import StageCompute, StageNode
from rainband.runtimes.simulation.worker import ComputeBody, SimPort, WorkerNode
from rainband.server.server import Server
from rainband.strategy import Port, ServerPart, Strategy
from rainband.worker.client import StateChanged
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle

SLOTS_PER_TICK = 256  # of the clock, for thousands of workers
KERNEL_PATIENCE_S = 20.0  # until a connection to a machine that is gone is closed

Show = Callable[[events.AnyEvent], None]


def shown_to_nobody(event: events.AnyEvent) -> None:
    """What happens is of no interest."""


def observed_by_nobody(peer: Peer) -> None:
    """Nodes have no observer but the one for spans."""


def all_of_it(in_flight: InFlight) -> bool:
    return True


@dataclass
class Notes:
    """What is kept of a run."""

    trace: Trace = field(default_factory=Trace)
    spans: list[Span] | None = None  # none: nobody draws it
    show: Show = shown_to_nobody
    observe: Callable[[Peer], Observer | None] = observed_by_nobody  # of each node, when it is made


@dataclass
class Scenario:
    """What is simulated: the same for every schedule of it."""

    strategy: Strategy
    join: Join
    body: Callable[[], ComputeBody]
    real: bool  # with gradients, not only times
    bulk: bool = False  # all servers as one: for thousands of workers
    eval_every_s: float = 0.0  # one worker measures so often, where there are gradients; 0: only at the end
    hogwild_server: HogwildServer | None = None  # of the one memory that all workers share, if they do
    stage_compute: Callable[[int], StageCompute] | None = (
        None  # the share of a worker, where several compute one model together
    )


class SimulatedCluster:
    """One simulated run."""

    def __init__(
        self,
        play: Scenario,
        settings: RunSettings,
        model: ClusterModel,
        notes: Notes,
        tick_s: float = 1.0,
        shuffle: Random | None = None,
        seed: int | None = None,
    ) -> None:
        """`seed` is that of times and faults; None: the plan's."""
        self.play = play
        self.strategy, self.join = play.strategy, play.join
        self.settings = settings
        self.failure_timeout_s = settings.failure_timeout_s
        self.model = model
        self.costs = model.nodes
        self.goes_ahead = play.bulk
        self.measure_s = model.compute.measure_s
        self.trace = notes.trace
        self.spans = notes.spans
        self.observe = notes.observe
        self.tick_s = tick_s
        # With every tick; of thousands of workers just often enough that none is given up.
        self.heartbeat_s = max(tick_s, 0.8 * settings.failure_timeout_s) if play.bulk else tick_s
        self.clock = VirtualClock(shuffle, SLOTS_PER_TICK / tick_s if play.bulk else 0.0)
        self.seed = settings.seed if seed is None else seed
        self.network = Network(model.network, self.clock, self.seed)
        self.bus = MessageBus(self.clock, self.network, self.trace)
        alone = play.bulk or play.hogwild_server is not None
        known = msgspec.structs.replace(settings, num_servers=1) if alone else settings
        self.coordinator = Coordinator(known, coordination_of(play.strategy))
        costs = self.costs
        self.cores: Processor = (
            Cores(self.clock, costs.cores, costs.crowding, costs.wake_s, costs.moves)
            if costs.cores
            else OwnCore(self.clock)
        )
        fitting = as_they_are if play.real else as_one_block if play.bulk else without_elements
        machine = self._machine()
        self.coordinator_node = CoordinatorNode(
            self.bus,
            COORDINATOR,
            machine,
            self.coordinator,
            notes.show,
            tick_s,
            fitting,
            self.observe(COORDINATOR),
        )
        self.bus.nodes[COORDINATOR] = self.coordinator_node
        self.coordinator_node.hogwild_server = play.hogwild_server
        self._share_cores(self.coordinator_node)
        if play.hogwild_server is not None:
            play.hogwild_server.join(self.coordinator)
        self.servers: dict[int, ServerNode | AggregatedServersNode] = {}
        self.workers: dict[int, WorkerNode] = {}
        self.comebacks = 0  # of the coordinator, that are still to come

    def _machine(self) -> Machine:
        return self.network.machine()

    def _share_cores(self, coordinator_node: CoordinatorNode) -> None:
        if self.costs.cores:
            coordinator_node.occupy = partial(self.cores.work, self.costs.message_s, nothing, COORDINATOR)

    # ---- who is there ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.play.bulk:
            self._add_aggregated()
        else:
            for index in range(self.settings.num_servers):
                self.add_server(index)
        for index in range(self.settings.num_workers):
            self.add_worker(index)

    def add_server(self, index: int) -> None:
        node = ServerNode(
            self.bus,
            Peer("server", index),
            self._machine(),
            self._half,
            self.costs,
            self.cores,
            self.block_bytes,
            self._observer(Peer("server", index)),
        )
        self.servers[index] = self.bus.nodes[node.peer] = node
        node.join(COORDINATOR)

    def _add_aggregated(self) -> None:
        aggregated = make_aggregated(self.model, self.play.join.layout, self.settings.num_servers)
        node = AggregatedServersNode(self.bus, self._machine(), self._half, aggregated)
        self.servers[0] = self.bus.nodes[node.peer] = node
        self.bus.send(node, COORDINATOR, ServerJoin(Address("", 0, node.name)))

    def _half(self, num_workers: int) -> ServerPart:
        half = self.strategy.server(num_workers)
        assert half is not None, "a strategy without servers was given one"
        return half

    def add_worker(self, index: int, incarnation: int = 0) -> WorkerNode:
        pace = ComputePace(self.model.compute, self.seed, index + 1_000_003 * incarnation)
        peer = Peer("worker", index, incarnation)
        observer = self._observer(peer)
        node = (
            WorkerNode(self, peer, self._machine(), self.play.body(), pace, observer)
            if self.play.stage_compute is None
            else StageNode(self, peer, self._machine(), self.play.stage_compute(index), pace, observer)
        )
        if index == 0 and self.play.real and self.play.stage_compute is None:
            node.eval_every_s = self.play.eval_every_s
        self.workers[index] = self.bus.nodes[node.peer] = node
        node.start()
        return node

    def _observer(self, peer: Peer) -> Observer | None:
        observers = [self.observe(peer)]
        if self.spans is not None:
            observers.append(SpanRecorder(f"{peer.role} {peer.index}", self.clock.now_s, self.spans.append))
        return join_observers(filter(None, observers))

    def port(self, worker: WorkerNode, server: int) -> Port:
        node = self.servers.get(server)  # a memory's keeper is none of them
        if isinstance(node, AggregatedServersNode):
            return AggregatedPort(worker, node)
        return SimPort(worker, server, lambda: self._server(server), self.play.real)

    def _server(self, index: int) -> Server:
        return self.servers[index].server

    def block_bytes(self, block: int) -> int:
        """The true size of a block, also where nodes were given hollow ones."""
        return self.coordinator_node.block_bytes[block]

    # ---- what happens to nodes -------------------------------------------------------------------------------------

    def kill(self, node: Node, keep: Callable[[InFlight], bool] = all_of_it, silent: bool = False) -> None:
        """End a node at this moment. What it has not sent is gone; of what is under way, what `keep` keeps arrives.

        The others see its connections close; if `silent`, only when their kernels give the machine up.
        """
        if not node.alive:
            return
        event = NodeEvent.CRASHED if silent else NodeEvent.KILLED
        self.trace.note(self.clock.now, node.name, event, event.name.lower())
        node.alive, node.killed_at = False, self.clock.now
        self.bus.nodes.pop(node.peer)
        for flow in node.flows.values():
            gone = False
            for in_flight in flow.under_way:  # a connection breaks off: nothing comes after what was lost
                assert isinstance(in_flight, InFlight)
                gone = gone or not keep(in_flight)
                in_flight.lost = gone
        if node is self.coordinator_node and self.coordinator.journal is not None and self.comebacks:
            self.coordinator_node.show(events.Lost(at_s=self.clock.now, node=node.name, why="killed"))
            return  # the others wait for the next one
        if node is self.coordinator_node:
            self.coordinator.failed("the coordinator was lost, and with it the run.")
            self.coordinator.state.phase = "over"
        if isinstance(node, WorkerNode):
            node.waiting = None
            with suppress(RuntimeError):  # a strategy that would not end is simply dropped
                node.life.close()
        self.clock.after(KERNEL_PATIENCE_S if silent else 0.0, lambda: self._close(node))

    def start_coordinator(self) -> None:
        """Start the coordinator again, with the journal of the one before; the others call it."""
        before, self.comebacks = self.coordinator_node, self.comebacks - 1
        journal = self.coordinator.journal
        if before.alive or journal is None:
            return
        self.trace.note(self.clock.now, before.name, NodeEvent.STARTED, "started again")
        self.coordinator.state.phase = "replaced"
        self.coordinator = Coordinator(
            self.coordinator.state.settings, coordination_of(self.strategy), journal.taken_up()
        )
        self.coordinator_node = CoordinatorNode(
            self.bus,
            COORDINATOR,
            before.machine,
            self.coordinator,
            before.show,
            self.tick_s,
            before.fitting,
            before.observer,
        )
        self.coordinator_node.block_bytes = before.block_bytes
        self._share_cores(self.coordinator_node)
        self.bus.nodes[COORDINATOR] = self.coordinator_node
        self.coordinator_node.send(self.coordinator.take_up(self.clock.now))
        for node in [*self.servers.values(), *self.workers.values()]:
            if not node.alive:
                self.coordinator_node.lost(node.peer)
            elif isinstance(node, WorkerNode):
                node.wake(node.join_again)

    def _close(self, node: Node) -> None:
        for other in list(self.bus.nodes.values()):
            self.bus.send(node, other.peer, None)

    def disconnect(self, one: Node, other: Node) -> None:
        """Break the connection of two nodes: what is under way is lost, and both see it close."""
        self.trace.note(self.clock.now, one.name, NodeEvent.DISCONNECTED, f"lost its connection with {other.name}")
        for flow in (self.bus.flow(one, other), self.bus.flow(other, one)):
            flow.broken = True
            for in_flight in flow.under_way:
                assert isinstance(in_flight, InFlight)
                in_flight.lost = True
        self.bus.send(one, other.peer, None)
        self.bus.send(other, one.peer, None)

    def pause(self, node: Node, for_s: float) -> None:
        """Stop a node for a while, as by a signal: nothing is lost, nothing goes on."""
        if node.alive:
            self.trace.note(self.clock.now, node.name, NodeEvent.PAUSED, f"paused for {for_s}")
            node.paused_until = max(node.paused_until, self.clock.now + for_s)

    # ---- driving it ------------------------------------------------------------------------------------------------

    def run(self, until_s: float | None = None) -> None:
        """Until the run is over, or a moment; raises Deadlock when nothing can happen any more."""
        clock, state, planned = self.clock, self.coordinator.state, self.clock.planned
        look_at, until_s, phase = clock.now + self.tick_s, inf if until_s is None else until_s, state.phase
        while phase != "over" and clock.now < until_s:
            if not planned and not clock.go_on():
                raise Deadlock(self.who_waits())
            clock.now, _, do = heappop(planned)  # clock.step(), written out: nothing here happens more often
            do()
            if state.phase != phase:
                state = self.coordinator.state  # another one's, if it was started again
                phase = state.phase
                clock.progress_at = clock.now
            if clock.now > look_at and len(planned) + clock.num_later == clock.idle:
                look_at = clock.now + self.tick_s
                if clock.now - clock.progress_at > self._patience_s():
                    raise Deadlock(self.who_waits())

    def _patience_s(self) -> float:
        """Longer than any deadline of the coordinator: it may yet give someone up."""
        slowest = max((w.slowest_s for w in self.coordinator.workers.values()), default=0.0)
        return 10 * self.settings.failure_timeout_s + 20 * slowest + 10 * self.tick_s

    # ---- who waits for whom ----------------------------------------------------------------------------------------

    def who_waits(self) -> str:
        """One line for each node that waits: for whom, for what, since when."""
        lines = [f"at {self.clock.now:.3f} s everyone waits and nothing is under way."]
        lines.append(f"  coordinator: {self.coordinator.waits_for()}")
        for node in self.workers.values():
            if node.alive and node.waiting is not None:
                what = self._worker_waits(node, node.waiting)
                lines.append(f"  {node.name} waits for {what}, since {node.waiting_since:.3f} s")
        for server in self.servers.values():
            readers = sorted({str(to) for b in server.server.blocks.values() for to in b.waiting})
            if readers:
                versions = sorted({b.version for b in server.server.blocks.values()})
                at = f"its blocks are at version {', '.join(map(str, versions))}"
                lines.append(f"  {server.name} holds back replies to {', '.join(readers)}: {at}")
        return "\n".join(lines)

    def _worker_waits(self, node: WorkerNode, handle: Handle) -> str:
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
