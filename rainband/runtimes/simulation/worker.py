"""A simulated worker: the lifecycle, strategy and client of a real one, driven by virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rainband.checkpoints.read import Checkpoint
from rainband.errors import ServerLost, Stop
from rainband.model.gradient import Gradient
from rainband.observer import Observer
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    COORDINATOR,
    Ack,
    InitBlock,
    Message,
    Params,
    Peer,
    Push,
    ServerMoved,
    TakeSnapshot,
    Welcome,
)
from rainband.protocol.ports import BlockValues, Port
from rainband.protocol.saved_state import SavedBlock
from rainband.protocol.steps import Handle, Look, Steps, Until, Work
from rainband.runtimes.checkpoints.place import worker_file
from rainband.runtimes.checkpoints.restore import begin_checkpoints
from rainband.runtimes.checkpoints.write import write_worker
from rainband.runtimes.simulation.message_bus import HEADER_BYTES, Node, Payload
from rainband.runtimes.simulation.models.compute import ComputePace
from rainband.runtimes.simulation.models.network import Machine
from rainband.runtimes.simulation.rounds import mixing_s
from rainband.runtimes.simulation.shared_module import NOTHING, WrittenValues
from rainband.server.server import Server
from rainband.strategy import Batch, BatchPart
from rainband.worker.client import Client, StateChanged
from rainband.worker.lifecycle import failed, run_worker
from rainband.worker.periodic_eval import PeriodicEval
from rainband.worker.pulls import PullHandle
from rainband.worker.session import FOR_THE_SESSION, Dismissed, Session
from rainband.worker.shared_batches import examples
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import WorkerModel

if TYPE_CHECKING:
    from rainband.runtimes.simulation.cluster import SimulatedCluster

TAKES_TIME = frozenset((Compute, PullHandle))


class SimulatedCompute(WorkerModel[Any]):
    """Computes the gradients of a simulated worker, with a module, or only their timing."""

    def attach(self) -> None:
        """Attach the worker's parameters to the module, because the worker continues."""

    def gradient(self, worker: ModuleWorker, batch: Batch | BatchPart) -> Gradient:
        raise NotImplementedError


# size: one node's thread, messages and waiting; a simulation has up to ten thousand, and each call counts
class WorkerNode(Node):
    """Drives one worker's lifecycle (worker/lifecycle.py) by events of the clock."""

    # There may be ten thousand workers: plain objects with this many attributes are large and slow.
    __slots__ = (
        *("block_bytes", "busy_until", "cluster", "compute", "computes_until", "copied_s", "costs", "eval_every_s"),
        *(
            "inbox",
            "later",
            "life",
            "measuring",
            "copies_in_use",
            "observer",
            "over",
            "pace",
            "raises",
            "session",
            "stats",
        ),
        *("waiting", "waiting_since"),
    )

    def __init__(
        self,
        cluster: SimulatedCluster,
        peer: Peer,
        machine: Machine,
        compute: SimulatedCompute,
        pace: ComputePace,
        observer: Observer | None,
    ) -> None:
        super().__init__(cluster.bus, peer, machine)
        self.cluster = cluster
        self.block_bytes = cluster.block_bytes
        self.costs = cluster.model.nodes
        self.compute = compute
        self.pace = pace
        self.observer = observer
        self.session = Session(peer, self, observer)
        self.session.prepare(cluster.scenario.strategy, cluster.scenario.join, compute)
        self.session.codec, self.session.pull_codec = cluster.scenario.codecs
        self.stats = self.session.stats
        self.eval_every_s = 0.0  # seconds between two evaluations; 0: none before the end
        self.measuring: PeriodicEval | None = None
        self.inbox: list[tuple[Message, Payload]] = []
        self.later: list[tuple[float, Message]] = []  # (arrives at, message): see `can_wait_with`
        self.steps = Steps(run_worker(self.session))
        self.waiting: Handle | None = None
        self.waiting_since = 0.0
        self.busy_until = 0.0  # its thread copies until then
        self.copied_s = 0.0  # seconds of copying parameters since its last wait
        self.computes_until = 0.0  # if it has a core of its own
        self.over = False
        self.copies_in_use: dict[int, Peer] = {}  # server -> the copy that has taken over: earlier ones are not heard
        self.raises = False  # its next gradient, as an error in the user's code

    @property
    def client(self) -> Client | None:
        return self.session.client

    def start(self) -> None:
        self.clock.after(self.cluster.heartbeat_s, self._heartbeat, idle=True)
        self.wake(self._go_through)

    def tell(self, message: Message, body: bytes | None = None) -> None:
        """Send a message to the coordinator."""
        size = HEADER_BYTES + len(body or b"")
        self.bus.send(self, COORDINATOR, message, body, size, self.free_at())

    def free_at(self) -> float:
        """Return when its thread is free."""
        now = self.clock.now
        return now if now > self.busy_until else self.busy_until

    def _heartbeat(self) -> None:
        if not self.alive or self.over:
            return
        self.clock.after(self.cluster.heartbeat_s, self._heartbeat, idle=True)
        if self.clock.now >= self.paused_until:
            self.bus.send(self, COORDINATOR, self.stats.heartbeat())

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        return [self.cluster.port(self, server) for server in range(len(welcome.servers))]

    def open_link(self, moved: ServerMoved, part: int) -> Port:
        self.copies_in_use[moved.server.index] = moved.server
        return self.cluster.port(self, moved.server.index)

    def before_training(self, worker: ModuleWorker) -> None:
        checkpoints = self.cluster.scenario.checkpoints
        if checkpoints is not None:
            self.compute.attach()
            name = self.session.welcome.checkpoint
            source = Checkpoint(checkpoints.store, name) if name else checkpoints.source
            begin_checkpoints(worker, self.session, source, self._save_state)
        if self.eval_every_s:
            self.measuring = PeriodicEval(worker.task, worker.module, self.stats, self.eval_every_s, self.clock.now_s)
        if self.cluster.rounds is not None:
            self.compute.attach()
            board = self.cluster.rounds.board(self, examples(worker) if self.cluster.scenario.real else [])
            requires, equal_parts = self.session.strategy.requires, self.cluster.scenario.equal_parts
            codec = self.session.codec if self.cluster.scenario.real else None
            worker.enter_rounds(requires, board, self.clock.now_s, equal_parts, codec)

    def flush_output(self) -> None:
        """Do nothing: the output is that of the simulator."""

    async def failure_is_known(self) -> None:
        """A lost server is noticed by `lost`, after the failure timeout."""

    async def saved(self) -> None:
        if self.cluster.rounds is not None:
            self.cluster.rounds.saver = self
        if self.disk_s:
            saved_at = self.clock.now + self.disk_s
            self.clock.at(saved_at, lambda: self.wake(self.look_if_waiting))
            await Until("its disk", lambda: self.clock.now >= saved_at)

    def _save_state(self, snapshot: TakeSnapshot, state: object, block: SavedBlock | None) -> None:
        checkpoints = self.cluster.scenario.checkpoints
        assert checkpoints is not None
        name = worker_file(self.peer.index, self.cluster.settings.workers_per_replica)
        self.tell(write_worker(checkpoints.store, snapshot, state, block, name=name))

    def join_again(self) -> None:
        """Join a coordinator that was started again and knows no worker."""
        self.tell(self.cluster.scenario.join)
        if self.session.failure is not None:
            self.tell(failed(self.session, self.session.failure))
            return
        if self.session.client is not None:
            self.session.client.request_again()
        self.look_if_waiting()

    def lost(self, peer: Peer) -> None:
        """End without a coordinator; without a server fail after a while, unless the run is over first."""
        if self.over or not self.alive:
            return
        if peer.role == "coordinator":
            self.cluster.kill(self)
        elif peer.role == "server" and self.cluster.settings.copies == 1:
            self.clock.after(self.cluster.settings.failure_timeout_s, lambda: self.wake(partial(self._give_up, peer)))

    def _give_up(self, server: Peer) -> None:
        if not self.over:
            self._go_through(ServerLost(str(server), "waiting for its answers"))
            self.cluster.kill(self)

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        if self.copies_in_use and sender.role == "server" and self.copies_in_use.get(sender.index, sender) != sender:
            return
        if self.waiting is None or self.inbox or self.later or self.clock.now < self.busy_until:
            self.inbox.append((message, payload))
            if self.waiting is not None:
                self._look()
        elif not self.over:  # at once: this is the hottest call
            self._take(message, payload)
            self._continue_if_ready()

    def can_wait_with(self, ack: Ack) -> bool:
        """Return True if handling this answer would neither wake the worker nor send a message, so that it may wait."""
        client = self.session.client
        if client is None or not (self.waiting is None or isinstance(self.waiting, PullHandle)):
            return False
        return not client.pushes.may_end_lease(ack)

    def _look(self) -> None:
        """Handle the messages that have arrived, and continue if the wait is over. Only called while it waits."""
        if self.clock.now < self.busy_until:
            self.clock.at(self.busy_until, lambda: self.wake(self.look_if_waiting))
            return
        self._take_all()
        self._continue_if_ready()

    def _continue_if_ready(self) -> None:
        if self.over or self.waiting is None:
            return
        if self.waiting.ready():
            self._waited()
            self._go_through()
        elif self.session.must_stop(self.waiting):
            self.session.stopped = True
            self._waited()
            self._go_through(Stop())

    def _take_all(self) -> None:
        later, inbox = self.later, self.inbox
        while later and later[0][0] <= self.clock.now:
            self._take(later.pop(0)[1], None)
        while inbox and not self.over:
            message, payload = inbox.pop(0)
            self._take(message, payload)

    def look_if_waiting(self) -> None:
        if self.waiting is not None:
            self._look()

    def _waited(self) -> None:
        until, since = self.busy_until, self.waiting_since  # copying parameters counts, as in a real run
        if until < self.clock.now:
            until = self.clock.now
        if until > since and self.observer is not None:
            self.observer.spent("wait", since, until)
        if self.waiting is not None and (holder := self.waiting.holder()) is not None:
            self.stats.held_by = holder
        if until > since or self.copied_s:
            self.stats.waited((until - since if until > since else 0.0) + self.copied_s)
            self.copied_s = 0.0
        self.stats.waiting = False
        self.waiting = None

    def _take(self, message: Message, payload: Payload) -> None:
        if type(message) in FOR_THE_SESSION:
            try:
                self.session.receive(message, payload)
            except Dismissed:
                self.over = True
                self.waiting = None
                self.steps.close()
                if self.cluster.rounds is not None:
                    self.cluster.rounds.exclude(self.peer.index)
            return
        if self.costs.worker_message_s:
            self.spend(self.costs.worker_message_s)
        if payload is not None and isinstance(message, Params):
            self.copies(message.block)
        client = self.session.client
        if client is None:
            self.session.receive(message)
        else:  # not through the session: this is the hottest call
            client.receive(message, payload)

    def spend(self, amount_s: float) -> float:
        """Occupy its thread with work, which takes longer on shared cores; returns how long it takes."""
        start = self.busy_until
        if start < self.clock.now:
            start = self.clock.now
        took_s = self.cluster.cores.alongside(start, amount_s, self.peer) if self.costs.cores else amount_s
        self.busy_until = start + took_s
        return took_s

    def copies(self, block: int) -> None:
        """Occupy its thread with copying a block."""
        copying_s = self.spend(self.block_bytes(block) / self.costs.pull_bytes_per_s)
        if self.waiting is None:  # the parameters were there when it asked
            self.copied_s += copying_s

    def _go_through(self, error: BaseException | None = None) -> None:
        """Let the coroutine run until it needs time to pass."""
        self.compute.attach()
        wanted = self.steps.go_on(error)
        # A pull takes time even if it is ready: its blocks are copied.
        while type(wanted) not in TAKES_TIME and isinstance(wanted, Handle) and self._is_ready(wanted):
            wanted = self.steps.go_on()
        if not isinstance(wanted, StateChanged):  # the coordinator wakes idle workers at every tick: no progress
            self.clock.progress_at = self.clock.now
        if self.steps.over:  # it has failed, and reported that
            self.waiting, self.waiting_since = Until("the end of the run", lambda: False), self.clock.now
            return
        if isinstance(wanted, Work):
            self._compute(wanted)
        else:
            assert isinstance(wanted, Handle), f"a strategy may only await what its worker returns, not {wanted!r}"
            if self.over:  # it has handled messages, and the coordinator dismissed it
                return
            self.waiting, self.waiting_since = wanted, self.free_at()
            self.stats.waiting = True
            if self.later and type(wanted) is not PullHandle:
                for at_s, _ in self.later:
                    self.clock.at(max(at_s, self.clock.now), self.look_if_waiting)
            if self.inbox:
                self._look()

    def _is_ready(self, wanted: Handle) -> bool:
        if isinstance(wanted, Look):
            self._take_all()
            wanted.looked = not self.over
        return wanted.ready()

    def _compute(self, wanted: Work) -> None:
        now, started = self.clock.now, self.busy_until
        if started < now:
            started = now
        amount_s = wanted.share * self.pace.next_s() + started - now
        if wanted.exchanged_bytes:
            amount_s += mixing_s(self.cluster.model, wanted.exchanged_bytes, 1)
        if self.measuring is not None:
            before = self.stats.metrics
            self.measuring.before_step()
            amount_s += 0.0 if self.stats.metrics is before else self.cluster.model.compute.measure_s
        if self.cluster.scenario.aggregated and self.computes_until <= now:
            # Without faults and shared cores: messages that arrive while it computes are handled when it next waits.
            # So it can continue at once, and its messages leave when it has computed.
            self.computes_until = self.busy_until = now + amount_s
            self._computed(wanted, started)
            return
        self.computes_until = now + amount_s
        computed = partial(self._computed, wanted, started)
        if self.costs.cores:
            amount_s -= started - now  # the rest of its work is in the queue of its core already
        self.cluster.cores.work(amount_s, computed, self.peer)

    def _computed(self, wanted: Work, started: float) -> None:
        if self.clock.now < self.paused_until:
            self.wake(partial(self._computed, wanted, started))
            return
        if self.inbox and self.session.strategy.requires.in_rounds:
            self._take_all()  # as in a process: many batches may pass before it waits
        if self.over or not self.alive:
            return
        self.stats.computed_s += self.free_at() - started
        if self.observer is not None:
            self.observer.spent("compute", started, self.clock.now, wanted.label)
        self.compute.attach()
        try:
            if self.raises:
                raise RuntimeError("a fault was injected into the user's code")
            if isinstance(wanted, Compute):
                if self.observer is not None:
                    self.observer.computing(wanted.worker, wanted.batch)
                wanted.result = self.compute.gradient(wanted.worker, wanted.target)
                if self.observer is not None:
                    self.observer.computed(wanted.worker, wanted.batch)
            else:
                wanted.perform()
        except Exception as error:
            self._go_through(error)
            return
        self._go_through()


class ServerHost(Protocol):
    """A node that hosts a server."""

    server: Server


class SimPort:
    """A worker's port to one simulated server."""

    def __init__(self, worker: WorkerNode, peer: Peer, node: Callable[[], ServerHost], real: bool) -> None:
        self.worker = worker
        self.peer = peer
        self.node = node  # to read in place, in shared memory
        self.real = real  # with values, not only timing
        self.direct = worker.costs.shared_memory

    def send(self, message: Message) -> None:
        worker = self.worker
        if worker.costs.worker_message_s:
            worker.spend(worker.costs.worker_message_s)
        worker.bus.send(worker, self.peer, message, at_s=worker.free_at())

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        payload = NOTHING
        if isinstance(values, WrittenValues):
            payload = values.tensor
        elif self.real:
            dtype, number = message.payload
            payload = torch.empty(number, dtype=getattr(torch, dtype))
            values.write(payload)
        worker = self.worker
        num_bytes = worker.block_bytes(message.block)
        worker.spend(worker.costs.worker_message_s + num_bytes / worker.costs.push_bytes_per_s)
        num_bytes = self._sent_bytes(message, num_bytes)
        size = HEADER_BYTES if self.direct else HEADER_BYTES + num_bytes
        worker.bus.send(worker, self.peer, message, payload, size, worker.busy_until)

    def _sent_bytes(self, message: Push | InitBlock, num_bytes: int) -> int:
        """Return what a block's values become with the codec, if they are encoded."""
        codec = self.worker.session.codec
        if codec is None or not isinstance(message, Push) or message.residual:
            return num_bytes
        if self.real:
            return message.encoded or num_bytes
        return min(num_bytes, codec.num_bytes(num_bytes // 4))

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        block = self.node().server.readable[spec.index]
        if at_version >= 0 and block.version > at_version + len(block.buffer.tensors) - 1:
            return None
        version = at_version if at_version >= 0 else block.version
        self.worker.copies(spec.index)
        if self.real:
            out.copy_(block.buffer.at(version).view(out.dtype))
        return version
