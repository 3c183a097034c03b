"""Messages between simulated nodes, which travel through the simulated network."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from rainband.protocol import messages
from rainband.protocol.messages import Message, Peer
from rainband.runtimes.simulation.models.clock import VirtualClock
from rainband.runtimes.simulation.models.network import Flow, Machine, Network, Parcel
from rainband.runtimes.simulation.models.trace import NodeEvent, Trace

HEADER_BYTES = 100  # a message without its payload, about
# Messages that ticks repeat: when only these are left, the run is stuck.
PERIODIC = frozenset(
    (messages.Heartbeat, messages.ReportRequest, messages.Report, messages.Revoke, messages.AcceptedBatches)
)
MAY_OVERTAKE = frozenset((messages.Push, messages.RelayedPush, messages.Ack))
MAY_BE_DUPLICATED = (
    *(
        messages.Push,
        messages.RelayedPush,
        messages.Ack,
        messages.Pull,
        messages.Revoke,
        messages.AcceptedBatches,
        messages.Return,
    ),
    *(messages.ReportRequest, messages.Report, messages.Lease, messages.LeaseRequest, messages.Heartbeat),
    *(messages.Finish, messages.Command, messages.Answer, messages.Evaluated),
)

Payload = Any  # a tensor, bytes, or None


class Node:
    """A simulated node; faults may pause and kill it."""

    __slots__ = (
        *("alive", "backlog", "clock", "disk_s", "flows", "killed_at", "machine", "name", "paused_until", "peer"),
        *("bus", "skew_s", "__dict__"),
    )

    def __init__(self, bus: MessageBus, peer: Peer, machine: Machine) -> None:
        self.bus = bus
        self.clock = bus.clock
        self.peer = peer
        self.machine = machine
        self.name = str(peer) + ("" if not peer.incarnation else f"'{peer.incarnation}")
        self.alive = True
        self.killed_at = inf
        self.paused_until = 0.0
        self.skew_s = 0.0  # by which its clock is ahead
        self.disk_s = 0.0  # by which saving takes longer
        self.backlog: list[Callable[[], None]] = []  # events that were due while it was paused
        self.flows: dict[Peer, Flow] = {}

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        raise AssertionError("each kind of node handles messages")

    def lost(self, peer: Peer) -> None:
        """The connection to a node has closed."""

    def wake(self, do: Callable[[], None]) -> None:
        """Do something now, or when the pause is over; never if the node has ended."""
        if self.clock.now < self.paused_until:
            if not self.backlog:
                self.clock.at(self.paused_until, self._go_on)
            self.backlog.append(do)
        elif self.alive:
            do()

    def _go_on(self) -> None:
        if self.clock.now < self.paused_until:  # paused again
            self.clock.at(self.paused_until, self._go_on)
            return
        self.clock.progress_at = self.clock.now  # the pause was no deadlock
        backlog, self.backlog = self.backlog, []
        for do in backlog:
            if self.alive:
                do()


class InFlight(Parcel):
    """A message from one node to another."""

    __slots__ = ("idle", "is_read_late", "lost", "may_overtake", "message", "payload", "read", "source", "target")

    def __init__(
        self, flow: Flow, source: Node, target: Node, message: Message | None, payload: Payload, num_bytes: int
    ) -> None:
        self.flow = flow
        self.num_bytes = num_bytes
        self.left_at = 0.0
        self.arrived = False
        self.source = source
        self.target = target
        self.message = message  # None: the connection closes
        self.payload = payload
        kind = type(message)
        self.idle = kind in PERIODIC
        self.may_overtake = kind in MAY_OVERTAKE
        self.is_read_late = False
        self.lost = False  # it never arrives
        self.read: Callable[[], tuple[Message, Payload]] | None = None

    def leave(self) -> None:
        assert self.read is not None
        if self.source.alive:
            self.message, self.payload = self.read()

    def deliver(self) -> None:
        source, target, message = self.source, self.target, self.message
        if self.lost or not target.alive:
            return
        bus = target.bus
        now = bus.clock.now
        if message is None:
            bus.trace.note(now, target.name, NodeEvent.LOST_PEER, f"lost {source.name}")
            target.wake(lambda: target.lost(source.peer))
            return
        if self.left_at > source.killed_at:
            return  # it had not left when the sender ended
        bus.trace.message(now, source.name, target.name, message)
        if now < target.paused_until:
            target.wake(lambda: target.receive(source.peer, message, self.payload))
        else:
            target.receive(source.peer, message, self.payload)


class MessageBus:
    """Carries messages between nodes; drops those to nodes that have ended, as a closed connection does."""

    def __init__(self, clock: VirtualClock, network: Network, trace: Trace) -> None:
        self.clock = clock
        self.network = network
        self.trace = trace
        self.nodes: dict[Peer, Node] = {}
        self.ended: list[Node] = []  # their last messages, and the end of their connections, may still be under way

    def send(
        self,
        source: Node,
        to: Peer,
        message: Message | None,
        payload: Payload = None,
        num_bytes: int = HEADER_BYTES,
        at_s: float | None = None,
        read: Callable[[], tuple[Message, Payload]] | None = None,
    ) -> None:
        """Send a message now or at a moment; `read` supplies it when its first byte leaves."""
        target = self.nodes.get(to)
        if target is None:
            return
        flow = source.flows.get(to) or self.flow(source, target)
        if flow.broken and message is not None:
            return
        in_flight = InFlight(flow, source, target, message, payload, num_bytes)
        if read is not None:
            in_flight.is_read_late, in_flight.read = True, read
        at_s = self.clock.now if at_s is None else at_s
        self.network.send(in_flight, at_s)
        if flow.duplicate_until > self.clock.now and isinstance(message, MAY_BE_DUPLICATED) and read is None:
            self.network.send(InFlight(flow, source, target, message, payload, num_bytes), at_s)

    def has_waiting(self) -> bool:
        """Return whether a message has arrived but waits for an earlier one of its flow, which ticks repeat."""
        flows = (flow for node in (*self.nodes.values(), *self.ended) for flow in node.flows.values())
        return any(parcel.arrived and not parcel.idle for flow in flows for parcel in flow.under_way)

    def flow(self, source: Node, target: Node) -> Flow:
        flow = source.flows.get(target.peer)
        if flow is None:
            flow = source.flows[target.peer] = Flow(source.machine, target.machine)
        return flow
