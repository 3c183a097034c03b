"""A simulated worker: its strategy's coroutine, driven by virtual time; the same client, the same protocol."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rainband.errors import ServerLost, Stop
from rainband.model.gradient import Gradient
from rainband.observer import Observer
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import COORDINATOR, Ack, InitBlock, Join, Message, Params, Peer, Push, Welcome
from rainband.protocol.steps import Handle, Steps, Until, Work
from rainband.runtimes.simulation.message_bus import HEADER_BYTES, MessageBus, Node, Payload
from rainband.runtimes.simulation.models.cluster_model import NodeModel
from rainband.runtimes.simulation.models.compute import ComputePace
from rainband.runtimes.simulation.models.network import Machine
from rainband.runtimes.simulation.shared_module import NOTHING, WrittenValues
from rainband.server.server import Server
from rainband.strategy import Batch, BlockValues, Port, Strategy
from rainband.worker.client import Client
from rainband.worker.lifecycle import run_worker
from rainband.worker.periodic_eval import PeriodicEval
from rainband.worker.pulls import PullHandle
from rainband.worker.session import FOR_THE_SESSION, Dismissed, Session
from rainband.worker.work_items import StillNeeded
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import WorkerModel

if TYPE_CHECKING:
    from rainband.runtimes.simulation.nodes import Processor

TAKES_TIME = frozenset((Compute, PullHandle))


class ComputeBody(WorkerModel[Any]):
    """What a simulated worker computes with: a module, or nothing where only time counts."""

    def sit_down(self) -> None:
        """The worker goes on: its parameters must be the module's."""

    def gradient(self, worker: ModuleWorker, batch: Batch) -> Gradient:
        raise NotImplementedError


class WorkerContext(Protocol):
    """Where a worker lives: what is the same for all of them."""

    bus: MessageBus
    strategy: Strategy
    join: Join
    costs: NodeModel
    cores: Processor
    heartbeat_s: float
    failure_timeout_s: float
    measure_s: float  # that one worker takes to measure
    goes_ahead: bool  # nothing fails and nobody shares a core: see WorkerNode._compute

    def port(self, worker: WorkerNode, server: int) -> Port:
        """Its way to a server."""

    def block_bytes(self, block: int) -> int:
        """The true size of a block."""

    def kill(self, node: Node) -> None: ...


class WorkerNode(Node):
    """Drives one worker's life by events of the clock: see lifecycle.py for what it does."""

    # There may be ten thousand: plain objects of so many attributes are large and slow.
    __slots__ = (
        *("block_bytes", "body", "busy_until", "computes_until", "copied_s", "costs", "eval_every_s", "inbox", "later"),
        *("life", "measuring", "over", "pace", "session", "stats", "waiting", "waiting_since", "observer", "cluster"),
    )

    def __init__(
        self,
        cluster: WorkerContext,
        peer: Peer,
        machine: Machine,
        body: ComputeBody,
        pace: ComputePace,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(cluster.bus, peer, machine)
        self.cluster = cluster
        self.block_bytes = cluster.block_bytes
        self.costs = cluster.costs
        self.body = body
        self.pace = pace
        self.observer = observer
        self.session = Session(peer, self, observer)
        self.session.prepare(cluster.strategy, cluster.join, body)
        self.stats = self.session.stats
        self.eval_every_s = 0.0  # it measures so often; 0: not it, or only at the end
        self.measuring: PeriodicEval | None = None
        self.inbox: list[tuple[Message, Payload]] = []
        self.later: list[tuple[float, Message]] = []  # comes then; looked at with the next message: see below
        self.life = Steps(run_worker(self.session))
        self.waiting: Handle | None = None
        self.waiting_since = 0.0
        self.busy_until = 0.0  # its thread copies until then
        self.copied_s = 0.0  # so long has it taken parameters over, since it waited last
        self.computes_until = 0.0  # if it has a core of its own
        self.over = False

    @property
    def client(self) -> Client | None:
        return self.session.client

    def start(self) -> None:
        self.clock.after(self.cluster.heartbeat_s, self._heartbeat, idle=True)
        self.wake(self._go_through)

    def tell(self, message: Message, body: bytes | None = None) -> None:
        """Tell the coordinator."""
        size = HEADER_BYTES + len(body or b"")
        self.bus.send(self, COORDINATOR, message, body, size, self.free_at())

    def free_at(self) -> float:
        now = self.clock.now
        return now if now > self.busy_until else self.busy_until

    def _heartbeat(self) -> None:
        if not self.alive or self.over:
            return
        self.clock.after(self.cluster.heartbeat_s, self._heartbeat, idle=True)
        if self.clock.now >= self.paused_until:
            self.bus.send(self, COORDINATOR, self.stats.heartbeat())

    # ---- what its life needs ---------------------------------------------------------------------------------------

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        return [self.cluster.port(self, server) for server in range(len(welcome.servers))]

    def before_training(self, worker: ModuleWorker) -> None:
        if self.eval_every_s:
            self.measuring = PeriodicEval(worker.task, worker.module, self.stats, self.eval_every_s, self.clock.now_s)

    def flush_output(self) -> None:
        """It prints where the simulator does."""

    async def failure_is_known(self) -> None:
        """A lost server is noticed by `lost`, after the failure timeout."""

    async def saved(self) -> None:
        if self.disk_s:
            saved_at = self.clock.now + self.disk_s
            self.clock.at(saved_at, lambda: self.wake(self._look_if_waiting))
            await Until("its disk", lambda: self.clock.now >= saved_at)

    # ---- what happens to it ----------------------------------------------------------------------------------------

    def join_again(self) -> None:
        """The coordinator was started again, and knows nobody."""
        self.tell(self.cluster.join)
        if self.session.client is not None:
            self.session.client.request_again()
        self._look_if_waiting()

    def lost(self, peer: Peer) -> None:
        """Without its coordinator it ends. Without a server, too, unless it soon hears that this is known."""
        if self.over or not self.alive:
            return
        if peer.role == "coordinator":
            self.cluster.kill(self)
        elif peer.role == "server":
            self.clock.after(self.cluster.failure_timeout_s, lambda: self.wake(partial(self._give_up, peer)))

    def _give_up(self, server: Peer) -> None:
        if not self.over:
            self._go_through(ServerLost(str(server), "waiting for its answers"))
            self.cluster.kill(self)

    # ---- being driven ----------------------------------------------------------------------------------------------

    def receive(self, sender: Peer, message: Message, payload: Payload) -> None:
        self.inbox.append((message, payload))
        if self.waiting is not None:
            self._look()

    def can_wait_with(self, ack: Ack) -> bool:
        """Would nothing come of an answer if it were looked at right when it comes? Not even a message."""
        client = self.session.client
        if client is None or not (self.waiting is None or isinstance(self.waiting, PullHandle)):
            return False
        return not client.pushes.may_end_lease(ack)

    def _look(self) -> None:
        """Take what has come, and go on if that was it. Only ever called while it waits."""
        if self.clock.now < self.busy_until:
            self.clock.at(self.busy_until, lambda: self.wake(self._look_if_waiting))
            return
        self._take_all()
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

    def _look_if_waiting(self) -> None:
        if self.waiting is not None:
            self._look()

    def _waited(self) -> None:
        until, since = self.busy_until, self.waiting_since  # taking parameters over counts: so it does really
        if until < self.clock.now:
            until = self.clock.now
        if until > since and self.observer is not None:
            self.observer.spent("wait", since, until)
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
                self.life.close()
            return
        if self.costs.worker_message_s:
            self.spend(self.costs.worker_message_s)
        if payload is not None and isinstance(message, Params):
            self.copies(message.block)
        client = self.session.client
        if client is None:
            self.session.receive(message)
        else:  # at once: nothing here happens more often
            client.receive(message, payload)

    def spend(self, amount_s: float) -> float:
        """Its thread works for so long, or longer where others want its core; returns how long that takes."""
        start = self.busy_until
        if start < self.clock.now:
            start = self.clock.now
        took_s = self.cluster.cores.alongside(start, amount_s, self.peer) if self.costs.cores else amount_s
        self.busy_until = start + took_s
        return took_s

    def copies(self, block: int) -> None:
        """It takes a block over, which takes time."""
        copying_s = self.spend(self.block_bytes(block) / self.costs.pull_bytes_per_s)
        if self.waiting is None:  # they were there when it asked
            self.copied_s += copying_s

    def _go_through(self, error: BaseException | None = None) -> None:
        """Let the coroutine run until it wants time to pass."""
        self.clock.progress_at = self.clock.now
        self.body.sit_down()
        wanted = self.life.go_on(error)
        # A pull is only waited for when it is not ready.
        while type(wanted) not in TAKES_TIME and isinstance(wanted, Handle) and self._is_ready(wanted):
            wanted = self.life.go_on()
        if self.life.over:  # it has failed, and reported that
            self.waiting, self.waiting_since = Until("the end of the run", lambda: False), self.clock.now
            return
        if isinstance(wanted, Work):
            self._compute(wanted)
        else:
            assert isinstance(wanted, Handle), f"a strategy may only await what its worker gave, not {wanted!r}"
            if self.over:  # it has looked, and found a goodbye
                return
            self.waiting, self.waiting_since = wanted, self.free_at()
            self.stats.waiting = True
            if self.later and type(wanted) is not PullHandle:
                for at_s, _ in self.later:
                    self.clock.at(max(at_s, self.clock.now), self._look_if_waiting)
            if self.inbox:
                self._look()

    def _is_ready(self, wanted: Handle) -> bool:
        if isinstance(wanted, StillNeeded):
            self._take_all()
            wanted.looked = not self.over
        return wanted.ready()

    def _compute(self, wanted: Work) -> None:
        now, started = self.clock.now, self.busy_until
        if started < now:
            started = now
        amount_s = wanted.share * self.pace.next_s() + started - now
        if self.measuring is not None:
            before = self.stats.metrics
            self.measuring.before_step()
            amount_s += 0.0 if self.stats.metrics is before else self.cluster.measure_s
        if self.cluster.goes_ahead and self.computes_until <= now:
            # What comes while it computes is looked at when it next waits. So until then it can go on at once, and
            # what it sends leaves when it has computed.
            self.computes_until = self.busy_until = now + amount_s
            self._computed(wanted, started)
            return
        self.computes_until = now + amount_s
        computed = partial(self._computed, wanted, started)
        if self.costs.cores:
            amount_s -= started - now  # of work that is waiting for its core already
        self.cluster.cores.work(amount_s, computed, self.peer)

    def _computed(self, wanted: Work, started: float) -> None:
        if self.clock.now < self.paused_until:
            self.wake(partial(self._computed, wanted, started))
            return
        if self.over or not self.alive:
            return
        self.stats.computed_s += self.free_at() - started
        if self.observer is not None:
            self.observer.spent("compute", started, self.clock.now, wanted.label)
        self.body.sit_down()
        try:
            if isinstance(wanted, Compute):
                if self.observer is not None:
                    self.observer.computing(wanted.worker, wanted.batch)
                wanted.result = self.body.gradient(wanted.worker, wanted.batch)
                if self.observer is not None:
                    self.observer.computed(wanted.worker, wanted.batch)
            else:
                wanted.perform()
        except Exception as error:
            self._go_through(error)
            return
        self._go_through()


class SimPort:
    """A worker's way to one simulated server."""

    def __init__(self, worker: WorkerNode, index: int, server: Callable[[], Server], real: bool) -> None:
        self.worker = worker
        self.peer = Peer("server", index)
        self.server = server  # to read in place, in shared memory
        self.real = real  # there are values, not only times
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
            payload = torch.empty(message.numel, dtype=getattr(torch, message.dtype))
            values.write(payload)
        worker = self.worker
        num_bytes = worker.block_bytes(message.block)
        worker.spend(worker.costs.worker_message_s + num_bytes / worker.costs.push_bytes_per_s)
        size = HEADER_BYTES if self.direct else HEADER_BYTES + num_bytes
        worker.bus.send(worker, self.peer, message, payload, size, worker.busy_until)

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        block = self.server().blocks[spec.index]
        if at_version >= 0 and block.version > at_version + len(block.buffer.tensors) - 1:
            return None
        version = at_version if at_version >= 0 else block.version
        self.worker.copies(spec.index)
        if self.real:
            out.copy_(block.buffer.at(version).view(out.dtype))
        return version
