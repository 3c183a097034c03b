"""Rounds of split batches in a simulation: the members are real, and what they write into the shared memory takes time.

An exchange is priced as it is done between machines (runtimes/machines/rounds_relay.py), each of which has one member:
the first machine passes the tensors of every member on to all others, while it receives them. With n members,

    seconds = 2 * latency + (n - 1)^2 * bytes / bandwidth

after the last member has begun it. A member that reads the tensors of d neighbors only takes latency + d bytes /
bandwidth, as if it had links to them. On one machine (`shared_memory`) a member copies its tensors, and reads those of
the others. A state that is given to others takes latency + bytes / bandwidth, once for all of them. With an all-reduce
algorithm, its table is priced instead (collectives/cost.py). Jitter, and messages of others on the same network cards,
are left out. The optimizer's step is part of the time of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rainband.collectives.cost import LinkCosts, choose, predict_s
from rainband.collectives.group import Call, table_of
from rainband.rounds.board import Asking, LocalBoard, RoundEntry, SharedMemory
from rainband.rounds.view import BATCH_BITS, K_BITS, Header
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.trace import NodeEvent
from rainband.worker.shared_batches import OthersInRound

if TYPE_CHECKING:
    from rainband.coordinator.state import RunState
    from rainband.runtimes.simulation.cluster import SimulatedCluster
    from rainband.runtimes.simulation.worker import WorkerNode


def exchange_s(model: ClusterModel, num_bytes: int, members: int) -> float:
    """Return the seconds of an exchange, from the moment at which all members have begun it."""
    if members < 2:
        return 0.0
    nodes, network = model.nodes, model.network
    if nodes.shared_memory:
        return num_bytes / nodes.push_bytes_per_s + (members - 1) * num_bytes / nodes.pull_bytes_per_s
    latency_s, bytes_per_s = network.latency_s, network.bytes_per_s
    if network.rack_size and members > network.rack_size:
        latency_s += network.uplink_latency_s
        bytes_per_s = min(bytes_per_s, network.uplink_bytes_per_s)
    copies = (members - 1) ** 2 + (0 if network.duplex else members - 1)  # that pass the link of the first machine
    return 2 * latency_s + copies * num_bytes / bytes_per_s


def costs_of(model: ClusterModel, members: int) -> LinkCosts:
    """Return what messages of an all-reduce cost: in memory, or on the network, where each member has its own core."""
    nodes, network = model.nodes, model.network
    if nodes.shared_memory:
        return LinkCosts(nodes.message_s, 1 / nodes.pull_bytes_per_s, 0.0, nodes.cores or members)
    return LinkCosts(network.latency_s, 1 / network.bytes_per_s, 0.0, members)


@lru_cache(maxsize=256)
def all_reduce_s(algorithm: str, members: int, num_bytes: int, costs: LinkCosts) -> float:
    """Return the seconds of an all-reduce by this algorithm, or, with auto, by the fastest one."""
    name = choose(members, num_bytes, costs) if algorithm == "auto" else algorithm
    return predict_s(table_of(members, Call("all_reduce", name)), num_bytes, costs)


def mixing_s(model: ClusterModel, num_bytes: int, sources: int) -> float:
    """Return the seconds in which a member gives its tensors to some others, and receives theirs."""
    nodes, network = model.nodes, model.network
    if nodes.shared_memory:
        return num_bytes / nodes.push_bytes_per_s + sources * num_bytes / nodes.pull_bytes_per_s
    return network.latency_s + sources * num_bytes / network.bytes_per_s if sources else 0.0


class SimulatedRounds:
    """The shared memory of a simulated run. As the launcher of a real one, it excludes workers that are lost."""

    def __init__(self, cluster: SimulatedCluster, num_ranks: int, num_bytes: int, algorithm: str = "") -> None:
        """`algorithm`: of the all-reduce, with the default settings; empty: see above."""
        self.cluster = cluster
        self.num_ranks = num_ranks
        self.num_bytes = num_bytes  # of the parameters
        self.algorithm = algorithm
        self.memory: SharedMemory | None = None
        self.saver: WorkerNode | None = None  # the last one that began to save the model
        self.excluded_early: set[int] = set()  # before the first worker had joined

    def board(self, node: WorkerNode, like: Sequence[Tensor]) -> SimulatedBoard:
        """Return a worker's view of the memory; `like` has the shapes of the tensors, and none if only time counts."""
        if self.memory is None:
            self.memory = SharedMemory(self.num_ranks, like)
            for rank in sorted(self.excluded_early & set(range(self.num_ranks))):
                self.memory.exclude(rank)
        while len(self.memory.words) <= node.peer.index:  # a worker that is started later, besides those of the start
            self.memory.add_rank(like)
            if len(self.memory.words) <= node.peer.index:
                self.memory.exclude(len(self.memory.words) - 1)  # no worker waits for one that may never start
        return SimulatedBoard(self, self.memory, node)

    def exchange_s(self, num_bytes: int, members: int) -> float:
        """Return the seconds of an exchange among all members."""
        model = self.cluster.model
        if not self.algorithm or members < 2 or not num_bytes:
            return exchange_s(model, num_bytes, members)
        return all_reduce_s(self.algorithm, members, num_bytes, costs_of(model, members))

    def exclude(self, rank: int) -> None:
        """Exclude a worker that has ended, or is stopped."""
        if self.memory is None:
            self.excluded_early.add(rank)
        elif rank < len(self.memory.words):
            self.memory.exclude(rank)
            self.notify()

    def exclude_lost(self, state: RunState) -> None:
        """Exclude the workers that are inactive, as the launcher of a real run does at each tick."""
        for index, worker in state.workers.items():
            if not (worker.connected and worker.active):
                self.exclude(index)

    def notify(self) -> None:
        """Wake the nodes that waited for what has been written now."""
        clock = self.cluster.clock
        for node in self.cluster.workers.values():
            if node.alive and isinstance(node.waiting, OthersInRound) and node.waiting.ready():
                clock.at(clock.now, partial(node.wake, node.look_if_waiting))

    def members(self) -> int:
        """Return the number of workers that take part."""
        assert self.memory is not None
        return sum(words.life > words.excluded for words in self.memory.words)

    def is_split(self, one: int, other: int) -> bool:
        """Return True if the network between two workers is split now."""
        nodes, bus = self.cluster.workers, self.cluster.bus
        if one not in nodes or other not in nodes or not nodes[other].alive:
            return False
        return bus.flow(nodes[one], nodes[other]).split_until > self.cluster.clock.now


class SimulatedBoard(LocalBoard):
    """One node's view of the memory: positions are seen by others when the tensors would have arrived."""

    def __init__(self, rounds: SimulatedRounds, memory: SharedMemory, node: WorkerNode) -> None:
        super().__init__(memory, node.peer.index)
        self.rounds = rounds
        self.node = node
        self.clock = node.clock
        self.seen: dict[int, int] = {}  # positions of the others, as this node has seen them
        self.state_s = 0.0  # for sending a state, before its position is seen
        self.pending: list[int] = []  # positions that others will see later

    def position(self, rank: int) -> int:
        if not self.rounds.is_split(rank, self.rank):
            self.seen[rank] = super().position(rank)
        return self.seen.get(rank, 0)

    def set_position(self, value: int) -> None:
        if value:
            self._send(value, self.state_s)
        else:  # a new life: what the last one has sent does not count
            self.pending.clear()
            self.own.position = 0
        self.state_s = 0.0

    def publish(self, slot: int, position: int, header: Header) -> None:
        self.own.headers[slot] = header
        self.own.published[slot] = position
        model, members = self.rounds.cluster.model, self.rounds.members()
        num_bytes = self._num_bytes(slot, header) if header.kind == "mean" else 0
        exchanges = self.rounds.exchange_s(num_bytes, members)
        self._send(position, exchanges if header.sources < 0 else mixing_s(model, num_bytes, header.sources))

    def _num_bytes(self, slot: int, header: Header) -> int:
        """Return the bytes of the tensors that have a value."""
        sizes = [tensor.nbytes for tensor in self.tensors(self.rank, slot)]
        codec = self.node.session.codec
        if codec is not None and not sizes:  # none are computed for time alone
            return min(self.rounds.num_bytes, codec.num_bytes(self.rounds.num_bytes // 4))
        if header.encoded:
            return round(self.rounds.num_bytes * sum(header.encoded) / max(1, sum(sizes)))
        present = int.from_bytes(header.present, "little")
        given = sum(size for i, size in enumerate(sizes) if present >> i & 1)
        return self.rounds.num_bytes if not sizes else round(self.rounds.num_bytes * given / max(1, sum(sizes)))

    def _send(self, value: int, seconds: float) -> None:
        """Let others see a position after some seconds, in which this node is busy, too."""
        node = self.node
        node.busy_until = at_s = node.free_at() + seconds
        self.pending.append(value)
        if at_s <= self.clock.now:
            self._arrive(value, self.own.life)
        else:
            self.clock.at(at_s, partial(self._arrive, value, self.own.life))

    def _arrive(self, value: int, life: int) -> None:
        if not self.node.alive or self.own.life != life or self.own.excluded >= life or value not in self.pending:
            return
        del self.pending[: self.pending.index(value) + 1]
        self.own.position = value
        self.rounds.cluster.trace.note(self.clock.now, self.node.name, NodeEvent.ROUND, f"reached {_described(value)}")
        self.rounds.notify()

    def set_life(self, life: int) -> None:
        super().set_life(life)
        self.rounds.notify()

    def exclude(self) -> None:
        if self.pending:  # what it has sent before it leaves arrives
            self.own.position = self.pending[-1]
            self.pending.clear()
        super().exclude()
        self.rounds.notify()

    def ask(self, asking: Asking | None) -> None:
        super().ask(asking)
        self.rounds.notify()

    def admit(self, admission: RoundEntry) -> None:
        super().admit(admission)
        self.rounds.notify()

    def put_state(self, position: int, state: Any) -> None:
        super().put_state(position, state)
        if not position:
            return
        network = self.rounds.cluster.model.network
        self.state_s = network.latency_s + self.rounds.num_bytes / network.bytes_per_s


def _described(position: int) -> str:
    number, exchanges = position >> K_BITS & ((1 << BATCH_BITS) - 1), position & ((1 << K_BITS) - 1)
    return f"round {number}" + (f", exchange {exchanges}" if exchanges else "")
