"""All servers as one node, for timing-only runs with thousands of workers: a push to all servers is one message.

As in every runtime: the coordinator, the strategies, the client, and one real server, which stands for all of them; it
has one block without elements (accepted sets, rules, rounds, clocks, staleness, accounting). Modeled: all servers
handle messages in the same order, and each has its own times of receiving, applying and answering. Left out: uplinks
of racks, jitter, faults and shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf

import msgspec
from torch import Tensor

from rainband.protocol.layout import BlockSpec, Layout, cut, deal
from rainband.protocol.messages import Ack, Assign, InitBlock, Message, Params, Peer, Push, Welcome
from rainband.protocol.ports import BlockValues
from rainband.runtimes.simulation.message_bus import MessageBus, Node, Payload
from rainband.runtimes.simulation.models.aggregated_servers import AggregatedServers, Times
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.network import Machine
from rainband.runtimes.simulation.nodes import publish
from rainband.runtimes.simulation.shared_module import NOTHING, hollow
from rainband.runtimes.simulation.worker import WorkerNode
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from rainband.strategy import ServerPart

ALL = Peer("server", 0)  # the coordinator knows one server, which stands for all
Arriving = tuple[float, int, WorkerNode, Message, float]  # (arrives at, number, sender, message, first byte left at)


# size: one node for all servers: it inherits the state of a node, and counts for each of them
class AggregatedServersNode(Node):
    """All servers as one node, which needs no event of its own for each message.

    An effect of the servers reaches other nodes a latency later at the earliest. So messages may wait that long: then
    everything that was due is done at once, in the order of its time.
    """

    def __init__(
        self, bus: MessageBus, machine: Machine, server_part: Callable[[int], ServerPart], aggregated: AggregatedServers
    ) -> None:
        super().__init__(bus, ALL, machine)
        self.name = "servers"
        self.server = Server(server_part, publish)
        self.aggregated = aggregated
        self.latency_s = aggregated.latency_s
        self.arriving: list[Arriving] = []  # a heap: in the order in which they begin to arrive
        self.number = 0
        # The server in the middle handles one message after the other, and so does its NIC: both are in order of time.
        # (handled at, its sender, message, by each server) and (leaves at, reader, message, arrives at)
        self.taken: deque[tuple[float, WorkerNode, Message, Times]] = deque()
        self.leaving: deque[tuple[float, WorkerNode, Params, float]] = deque()
        self.looks_at = inf
        self.trace_message = bus.trace.message

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        """Handle a message of the coordinator; it takes the servers no time."""
        self._catch_up()
        for out in self.server.receive(sender, message, payload):
            self._send(out, self.aggregated.free(), self.clock.now)
        self._look_again()

    def expect(self, arrives: float, worker: WorkerNode, message: Message, left_at: float) -> None:
        """Expect a worker's message that begins to arrive then; `left_at` is when its first byte left."""
        self.number = number = self.number + 1
        heappush(self.arriving, (arrives, number, worker, message, left_at))
        if arrives + self.latency_s < self.looks_at:
            self._look_at(arrives + self.latency_s)

    def _look_at(self, at_s: float) -> None:
        self.looks_at = at_s
        self.clock.at(at_s, self._look)

    def _look(self) -> None:
        if self.clock.now == self.looks_at:  # otherwise an earlier message was expected meanwhile
            self._catch_up()
            self._look_again()

    def _look_again(self) -> None:
        """Look again a latency after the next message is due: its effects arrive no earlier."""
        heads = [queue[0][0] for queue in (self.arriving, self.taken, self.leaving) if queue]
        self.looks_at = inf
        if heads:
            self._look_at(max(self.clock.now, min(heads) + self.aggregated.latency_s))

    def _catch_up(self) -> None:
        """Do everything that is due, in the order of its time."""
        arriving, taken, leaving, now = self.arriving, self.taken, self.leaving, self.clock.now
        arrives = arriving[0][0] if arriving else inf
        handled = taken[0][0] if taken else inf
        leaves = leaving[0][0] if leaving else inf
        while arrives <= now or handled <= now or leaves <= now:
            if handled <= leaves and handled <= arrives:
                self._handle(*taken.popleft())
                handled = taken[0][0] if taken else inf
                leaves = leaving[0][0] if leaving else inf  # handling it may have added a reply
            elif leaves <= arrives:
                self._leave(*leaving.popleft())
                leaves = leaving[0][0] if leaving else inf
            else:
                self._take(*heappop(arriving))
                arrives = arriving[0][0] if arriving else inf
                handled = taken[0][0]

    def _take(self, arrives: float, number: int, worker: WorkerNode, message: Message, left_at: float) -> None:
        aggregated, kind = self.aggregated, type(message)
        if (kind is Push and not message.skip) or kind is InitBlock:  # type: ignore[attr-defined]
            times = aggregated.apply(left_at)
        else:
            times = aggregated.ask(arrives)
        self.taken.append((aggregated.in_the_middle(times), worker, message, times))

    def _handle(self, at_s: float, worker: WorkerNode, message: Message, times: Times) -> None:
        peer = worker.peer
        self.trace_message(at_s, worker.name, self.name, message)
        for out in self.server.receive(peer, message, NOTHING):
            if out.to is peer:
                self._answer(worker, out.message, times, at_s)
            else:
                self._send(out, times, at_s)

    def _send(self, out: ServerOutput, times: Times, at_s: float) -> None:
        worker = self.bus.nodes.get(out.to)
        if not isinstance(worker, WorkerNode):
            self.bus.send(self, out.to, out.message, at_s=at_s)
        else:
            self._answer(worker, out.message, times, at_s)

    def _answer(self, worker: WorkerNode, message: Message, times: Times, at_s: float) -> None:
        if type(message) is Params:
            leaves, arrives = self.aggregated.reply(worker.machine, times)
            self.leaving.append((leaves, worker, message, arrives))
            return
        last = self.aggregated.at_the_last(times)
        self._deliver_at((last if last > at_s else at_s) + self.aggregated.latency_s, worker, message, None)

    def _leave(self, at_s: float, worker: WorkerNode, params: Params, arrives: float) -> None:
        """Read a reply when it leaves: it contains what was applied while it was queued."""
        message, _ = self.server.read(params)
        self._deliver_at(arrives, worker, message, NOTHING)

    def _deliver_at(self, arrives: float, worker: WorkerNode, message: Message, payload: Payload) -> None:
        """Deliver a message. An answer that can wait until the worker handles the next message needs no event."""
        if payload is None and type(message) is Ack and worker.can_wait_with(message):
            worker.later.append((arrives, message))
        else:
            looks_at = max(arrives, worker.busy_until, self.clock.now)
            self.clock.at(looks_at, partial(worker.receive, self.peer, message, payload))
        self.trace_message(arrives, self.name, worker.name, message)


class AggregatedPort:
    """A worker's port to all servers at once."""

    direct = False

    def __init__(self, worker: WorkerNode, node: AggregatedServersNode) -> None:
        self.worker = worker
        self.node = node
        self.peer = node.peer
        self.copying_s = node.aggregated.total_bytes / worker.costs.push_bytes_per_s

    def send(self, message: Message) -> None:
        worker, node = self.worker, self.node
        now, at_s = node.clock.now, worker.busy_until  # free_at(), inlined
        if at_s < now:
            at_s = now
        node.expect(at_s + node.latency_s, worker, message, at_s)

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        worker, aggregated = self.worker, self.node.aggregated
        # The first shard leaves while the next ones are copied.
        now, at_s = worker.clock.now, worker.busy_until
        if at_s < now:
            at_s = now
        worker.busy_until = at_s + self.copying_s
        begin = aggregated.leave(worker.machine, at_s)
        worker.stats.pushed_bytes += aggregated.total_bytes
        self.node.expect(begin + aggregated.latency_s, worker, message, begin)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        raise AssertionError("parameters come with the answer, there is nothing to read in place")


def make_aggregated(model: ClusterModel, layout: Layout, num_servers: int) -> AggregatedServers:
    """Return the timing model of all servers, each with its shard."""
    if model.nodes.shared_memory or model.nodes.cores:
        raise ValueError(
            "servers that are simulated as one do not support shared_memory and cores: remove these from the network "
            "file."
        )
    if model.nodes.gather_bytes_per_s:
        raise ValueError(
            "servers that are simulated as one do not support gather_bytes_per_s: remove it from the network file."
        )
    blocks = cut(layout, num_servers)
    dealt = deal(blocks, num_servers)
    return AggregatedServers(model, [sum(blocks[b].num_bytes for b in mine) for mine in dealt], list(map(len, dealt)))


def as_one_block(message: Message) -> Message:
    """Replace the blocks in a message to nodes by one without elements, owned by the one server."""
    match message:
        case Welcome():
            return msgspec.structs.replace(message, blocks=(hollow(message.blocks[0]),), owners=(0,))
        case Assign():
            return msgspec.structs.replace(message, blocks=(hollow(message.blocks[0]),))
    return message
