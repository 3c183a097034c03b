"""The simulated coordinator and servers: the state machines of real runs, with queues in virtual time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from rainband.coordinator.coordinator import Coordinator, CoordinatorOutput
from rainband.observer import Observer
from rainband.protocol import events, messages
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import COORDINATOR, Address, InitBlock, Message, Params, Peer, Push, RelayedPush
from rainband.protocol.parameter_buffers import ParameterBuffer
from rainband.runtimes.checkpoints.background import AtOnce
from rainband.runtimes.checkpoints.committer import Committer
from rainband.runtimes.checkpoints.restore import restore_server
from rainband.runtimes.checkpoints.write import ServerWriter
from rainband.runtimes.coordinator_host import CoordinatorHost
from rainband.runtimes.hogwild.saving import MemoryWriter
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.simulation.message_bus import HEADER_BYTES, Node, Payload
from rainband.runtimes.simulation.models.network import Machine
from rainband.runtimes.simulation.shared_module import NOTHING, hollow
from rainband.server.copied import CopiedServer
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from rainband.transports.hub import FRAMES_BEFORE_FLUSH

if TYPE_CHECKING:
    from rainband.runtimes.simulation.cluster import SimulatedCluster


# size: it inherits the queue and the cores of a node, and adds those of the coordinator
class CoordinatorNode(Node):
    """Hosts the coordinator. Its work takes no time, but occupies the cores where it shares them."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        machine: Machine,
        coordinator: Coordinator,
        show: Callable[[events.AnyEvent], None],
        adapt: Callable[[Message], Message],
        occupy: Callable[[], None],
        hogwild_server: HogwildServer | None,
        observer: Observer | None,
    ) -> None:
        """`adapt` changes the blocks in messages to nodes; `occupy` is called for each message."""
        super().__init__(cluster.bus, COORDINATOR, machine)
        self.cluster = cluster
        self.coordinator = coordinator
        self.show = show
        self.tick_s = cluster.tick_s
        self.adapt = adapt
        self.occupy = occupy
        self.block_bytes: list[int] = []  # the true sizes
        self.looks_at: float | None = None  # when a node may be overdue
        view = lambda event: self.show(event)  # noqa: E731  # tests replace `show`
        self.host = CoordinatorHost(
            coordinator, self._now, self._post, view, hogwild_server, observer, phase_time=self.clock.now_s
        )
        if (access := cluster.scenario.checkpoints) is not None:
            self.host.committer = Committer(
                coordinator, access.store, access.facts, access.keep, AtOnce(), lambda: f"{self.clock.now:.3f} s"
            )
            if hogwild_server is not None:
                self.host.memory_writer = MemoryWriter(hogwild_server, access.store, AtOnce())
        self.clock.after(self.tick_s, self._tick, idle=True)

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        self.occupy()
        self.host.receive(sender, message, payload)
        self._plan_look()

    def lost(self, peer: Peer) -> None:
        self.host.lost(peer, "its connection closed", for_good=not self.cluster.settings.restarts)
        self.cluster.restart_soon(peer)
        rounds, known = self.cluster.rounds, self.cluster.workers.get(peer.index)
        if rounds is not None and known is not None and known.peer == peer:  # not an earlier life of it
            rounds.exclude(peer.index)
        self._plan_look()

    def _now(self) -> float:
        """Return the time on its own clock."""
        return self.clock.now + self.skew_s

    def _tick(self) -> None:
        self.clock.after(self.tick_s, self._tick, idle=True)
        self.wake(self._ticked)

    def _ticked(self) -> None:
        self.send(self.coordinator.tick(self._now()))
        for copy in self.coordinator.copies.to_start():
            self.cluster.add_copy(copy)
        if self.cluster.rounds is not None:
            self.cluster.rounds.exclude_lost(self.coordinator.state)

    def send(self, outs: list[CoordinatorOutput]) -> None:
        self.host.send(outs)
        self._plan_look()

    def _post(self, out: CoordinatorOutput) -> None:
        to, message, body = out
        if isinstance(message, messages.ServerMoved):
            self.cluster.use_copy(message.server)
        if type(message) in OF_BLOCKS:
            message = self._adapted(message)
        self.bus.send(self, to, message, body, HEADER_BYTES + len(body or b""))

    def _plan_look(self) -> None:
        if self.coordinator.full_batch is None:
            return
        due_at = self.coordinator.due_at()
        if due_at is not None and (self.looks_at is None or due_at < self.looks_at):
            self.looks_at = due_at
            look_at = max(self.clock.now, due_at - self.skew_s)
            while look_at + self.skew_s < due_at:  # rounded: nothing would be due yet, and this moment never end
                look_at = math.nextafter(look_at, math.inf)
            self.clock.at(look_at, lambda: self.wake(self._look))

    def _look(self) -> None:
        """Let the coordinator check for overdue nodes."""
        self.looks_at = None
        self.send(self.coordinator.look(self._now()))

    def _adapted(self, message: Message) -> Message:
        adapted = self.adapt(message)
        if isinstance(message, messages.Welcome) and not self.block_bytes:
            sizes = [block.num_bytes for block in message.blocks]
            assert isinstance(adapted, messages.Welcome)
            self.block_bytes = sizes if len(adapted.blocks) == len(sizes) else [sum(sizes)]  # one stands for all
        return adapted


OF_BLOCKS = frozenset((messages.Welcome, messages.Assign))


def unchanged(message: Message) -> Message:
    return message


def without_elements(message: Message) -> Message:
    """Replace the blocks in a message to nodes by hollow ones."""
    assert isinstance(message, (messages.Welcome, messages.Assign))
    return msgspec.structs.replace(message, blocks=tuple(map(hollow, message.blocks)))


# size: it inherits the queue and the cores of a node, and adds those of a server
class ServerNode(Node):
    """Hosts a server: one thread that handles messages one after the other; applying a gradient takes time."""

    def __init__(
        self, cluster: SimulatedCluster, peer: Peer, machine: Machine, observer: Observer | None = None
    ) -> None:
        super().__init__(cluster.bus, peer, machine)
        self.observer = observer
        self.server = Server(cluster.scenario.server_part, publish, observer, *cluster.scenario.codecs)
        self.copied = CopiedServer(peer, self.server) if cluster.settings.copies > 1 else None
        self.checkpoints = checkpoints = cluster.scenario.checkpoints
        self.writer = (
            None
            if checkpoints is None
            else ServerWriter(f"server-{peer.index}", self.server, lambda: checkpoints.store, AtOnce())
        )
        self.costs = costs = cluster.model.nodes
        self.cores = cluster.cores
        self.block_bytes = cluster.block_bytes
        self.real = cluster.scenario.real
        # On one machine several messages wait at once: then their answers leave together, as a hub sends them.
        self.flushes_after = FRAMES_BEFORE_FLUSH if costs.cores else 1
        self.found = 0  # messages that were waiting when it last looked and are not handled yet
        self.unsent: list[ServerOutput] = []
        self.unsent_for = 0  # messages
        self.gather_bytes_per_s = costs.gather_bytes_per_s or costs.apply_bytes_per_s
        self.queue: deque[tuple[Peer, Message | None, Payload]] = deque()  # None: its connection has closed
        self.busy = False
        self.began_at = 0.0
        self.owed_s = 0.0  # work for replies that were just sent; it comes before the next message

    def join(self, coordinator: Peer) -> None:
        self.bus.send(self, coordinator, messages.ServerJoin(Address("", 0, self.name)))

    def receive(self, sender: Peer, message: Message | None, payload: Payload) -> None:
        self.queue.append((sender, message, payload))
        if not self.busy:
            self._next()

    def _next(self) -> None:
        if not self.queue:
            return
        self.busy = True
        self.found = self.found or len(self.queue)
        sender, message, payload = self.queue.popleft()
        self.began_at = self.clock.now
        handle = partial(self._handle, sender, message, payload)
        self.cores.work(self._cost_s(message, payload), lambda: self.wake(handle), self.peer)

    def _cost_s(self, message: Message | None, payload: Payload) -> float:
        if isinstance(message, (Push, RelayedPush, InitBlock, Params)) and payload is not None:
            return self.costs.message_s + self.block_bytes(message.block) / self.gather_bytes_per_s
        return self.costs.message_s

    def _handle(self, sender: Peer, message: Message | None, payload: Payload) -> None:
        server = self.copied or self.server
        if message is None:
            self._answer(server.lost(sender) or [])
            return
        updates = self.server.updates
        outs = [] if isinstance(message, messages.Shutdown) else server.receive(sender, message, payload)
        if isinstance(message, messages.Assign) and message.restores:
            assert self.checkpoints is not None and self.checkpoints.source is not None
            restore_server(self.server, self.checkpoints.source)
            outs = [*outs, *self.server.restored()]
        if self.writer is not None:
            self.writer.advance(lambda saved: self.bus.send(self, COORDINATOR, saved))
        if not isinstance(message, (Push, RelayedPush)):
            self._answer(outs)
            return
        step_s = self._step_s(message) if self.server.updates > updates else 0.0
        done = partial(self._pushed, outs)
        if step_s:
            self.cores.work(step_s, lambda: self.wake(done), self.peer)
        else:
            done()

    def _step_s(self, push: Push | RelayedPush) -> float:
        """Return how much longer an optimizer step takes than adding a gradient to others."""
        num_bytes = self.block_bytes(push.block)
        return max(0.0, num_bytes / self.costs.apply_bytes_per_s - num_bytes / self.gather_bytes_per_s)

    def _pushed(self, outs: list[ServerOutput]) -> None:
        if self.observer is not None:
            self.observer.spent("apply", self.began_at, self.clock.now)
        self._answer(outs)

    def _answer(self, outs: list[ServerOutput]) -> None:
        self.busy = False
        self.unsent += outs
        self.unsent_for += 1
        self.found -= 1
        if not self.found or self.unsent_for == self.flushes_after:
            outs, self.unsent, self.unsent_for = self.unsent, [], 0
            for out in outs:
                self._send(out)
        if self.owed_s:
            owed_s, self.owed_s, self.busy = self.owed_s, 0.0, True
            self.cores.work(owed_s, lambda: self.wake(self._free), self.peer)
        else:
            self._next()

    def _free(self) -> None:
        self.busy = False
        self._next()

    def _send(self, out: ServerOutput) -> None:
        if not out.read or (self.costs.shared_memory and out.to.role != "server"):
            self.bus.send(self, out.to, out.message)
            return
        message = out.message
        if isinstance(message, (messages.Forwarded, messages.CopyContents)):
            _, payload = self._read(message)  # it was copied before
            num_bytes = 0 if payload is None else payload.nbytes
            self.bus.send(self, out.to, message, payload, HEADER_BYTES + num_bytes)
            return
        assert isinstance(message, (Params, RelayedPush))
        num_bytes = self.block_bytes(message.block)
        self.owed_s += num_bytes / self.costs.read_bytes_per_s
        codec = self.server.readers.codec
        if isinstance(message, Params) and message.encoded and codec is not None:
            num_bytes = min(num_bytes, codec.num_bytes(num_bytes // 4))
        self.bus.send(self, out.to, message, num_bytes=HEADER_BYTES + num_bytes, read=lambda: self._read(message))

    def _read(self, message: Message) -> tuple[Message, Tensor | None]:
        """Read a message's values when it leaves; a private copy, because the block keeps changing."""
        if not self.real and isinstance(message, Params):
            message = msgspec.structs.replace(message, encoded=0)  # only its bytes are counted
        message, values = (self.copied or self.server).fill(message)
        return message, None if values is None else values.clone() if values.numel() else NOTHING

    def lost(self, peer: Peer) -> None:
        self.receive(peer, None, None)  # in its turn, after earlier messages


def publish(specs: Sequence[BlockSpec], buffers: int) -> list[ParameterBuffer]:
    """Allocate buffers for blocks in this process's own memory."""
    return [
        ParameterBuffer([0], 0, [torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(buffers)])
        for spec in specs
    ]
