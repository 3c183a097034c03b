"""A worker's session: its identity, the coordinator's orders, and the runtime and model that it runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rainband.codecs.codec import Codec
from rainband.codecs.pushes import CompressedPushes
from rainband.errors import RainbandError
from rainband.protocol.layout import Layout
from rainband.protocol.messages import (
    Address,
    BlockReady,
    Conclude,
    Dataset,
    Go,
    Join,
    Message,
    Opened,
    Peer,
    Saved,
    ServerMoved,
    Shutdown,
    TakeSnapshot,
    Welcome,
)
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.ports import Port
from rainband.protocol.steps import Handle, Work
from rainband.protocol.worker_stats import Stats
from rainband.strategy import Strategy
from rainband.worker.client import Client
from rainband.worker.saving.snapshots import SnapshotRequests
from rainband.worker.worker_model import Buffers, RunningWorker, WorkerModel

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.observer import Observer


# All others are for the client.
FOR_THE_SESSION = frozenset((Shutdown, Welcome, Go, Conclude, BlockReady, Opened, TakeSnapshot, ServerMoved))


class Dismissed(RainbandError):
    """The coordinator has ended this worker."""


class WorkerRuntime(Protocol):
    """The services of a runtime for one worker; it also waits and computes, see `drive`."""

    def tell(self, message: Message, body: bytes | None = None) -> None:
        """Send a message to the coordinator."""

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        """Open the links to the servers, and to the other stages of its replica."""

    def open_link(self, moved: ServerMoved, part: int) -> Port:
        """Open a link to the copy that has taken over a server."""

    def before_training(self, worker: Any) -> None:
        """Prepare the worker; its strategy begins when this returns."""

    def flush_output(self) -> None:
        """Return when the output of the user's code has left the process."""

    async def saved(self) -> None:
        """Return when the files that were written are on disk."""

    async def failure_is_known(self) -> None:
        """Return when the coordinator should have noticed a lost server by itself."""


def join_of(
    strategy: Strategy,
    layout: Layout,
    data: Dataset,
    custom_loop: bool = False,
    optimizer: OptimizerSpec | None = None,
    address: Address | None = None,
) -> Join:
    """Return the message with which a worker joins."""
    requires = strategy.requires
    return Join(
        fingerprint=data.fingerprint,
        num_samples=data.num_samples,
        layout=layout,
        batch_size=data.batch_size,
        epochs=data.epochs,
        batches_per_item=requires.batches_per_item,
        rounds=requires.waits == "rounds" and not requires.in_rounds,  # those of servers
        warm_start_batches=requires.warm_start_batches,
        custom_loop=custom_loop,
        optimizer=optimizer,
        coordinated=requires.coordinated,
        shares_batches=requires.split_batches,
        address=address,
        drop_last=data.drop_last and not requires.coordinated,  # full-batch strategies use every sample
    )


# size: one attribute for each order of the coordinator, and what the runtime and the model supply
class Session:
    """One worker of one run. Messages arrive through `receive`; the coroutine in `lifecycle.py` waits for them."""

    __slots__ = (
        *(
            "before_step",
            "client",
            "codec",
            "conclusion",
            "snapshots",
            "early",
            "failure",
            "first_buffers",
            "go",
            "is_welcome",
            "join",
            "me",
        ),
        *(
            "model",
            "observer",
            "perform",
            "pull_codec",
            "runtime",
            "stats",
            "stopped",
            "strategy",
            "training",
            "welcome",
            "worker",
        ),
    )

    strategy: Strategy  # set by `prepare`: a process connects first, so that errors in loading them are reported
    join: Join
    model: WorkerModel[Any]
    welcome: Welcome  # the last one received

    def __init__(self, me: Peer, runtime: WorkerRuntime, observer: Observer | None = None) -> None:
        self.me = me
        self.runtime = runtime
        self.observer = observer
        self.stats = Stats()
        self.client: Client | None = None
        self.codec: Codec | None = None  # for what it pushes
        self.pull_codec: Codec | None = None  # for what servers send it
        self.worker: RunningWorker | None = None  # when it has joined the run
        self.is_welcome = False
        self.go = False
        self.first_buffers: Buffers = None  # those that all workers begin with, if this one's are others
        self.conclusion: tuple[Conclude, Buffers] | None = None  # what to save, when all workers have ended
        self.snapshots: SnapshotRequests | None = None  # writes this worker's part of checkpoints
        self.early: list[Message] = []  # messages received before there was a client
        self.training = False  # the strategy runs: only then it can be stopped, and its waiting is counted
        self.stopped = False  # `Stop` was raised in the strategy
        self.failure: Exception | None = None  # the error that ended it
        self.before_step: Callable[[], None] | None = None
        self.perform: Callable[[Work], None] | None = None  # in place of the work's own `perform`

    def prepare(self, strategy: Strategy, join: Join, model: WorkerModel[Any]) -> None:
        """Set the strategy, the message to join with, and the model."""
        self.strategy, self.join, self.model = strategy, join, model

    def receive(self, message: Message, payload: Tensor | Buffers = None) -> None:
        """Take a message of the coordinator or a server; raise Dismissed when the run is over."""
        if type(message) in FOR_THE_SESSION:
            self._take_order(message, payload)  # type: ignore[arg-type]
        elif self.client is None:
            self.early.append(message)
        else:
            self.client.receive(message, payload)  # type: ignore[arg-type]

    def _take_order(self, message: Message, body: Buffers) -> None:
        match message:
            case Shutdown():
                raise Dismissed(message.reason or "the run is over.")
            case Welcome():
                self.welcome, self.is_welcome = message, True
                self.first_buffers = body if body is not None else self.first_buffers
            case Go():
                self.go = True
            case Conclude():
                self.conclusion = message, body
            case ServerMoved():
                if self.client is None:
                    self.early.append(message)
                else:
                    self._server_moved(self.client, message)
            case TakeSnapshot():
                if self.snapshots is None:
                    self.runtime.tell(Saved(message.number, error=f"{self.me} has not begun to train"))
                else:
                    self.snapshots.request(message, self.training)

    def _server_moved(self, client: Client, moved: ServerMoved) -> None:
        client.server_moved(moved.server.index, self.runtime.open_link(moved, client.servers.part))

    def open(self, welcome: Welcome, ports: Sequence[Port]) -> Client:
        """Make the client, and deliver the messages that arrived before."""
        self.client = client = self.model.make_client(self.me, welcome, list(ports), self.runtime.tell)
        client.servers.stats, client.servers.observer = self.stats, self.observer
        if welcome.via >= 0:
            client.servers.use(welcome.via)
        client.pulls.codec = self.pull_codec
        if self.codec is not None and client.servers.port_of:
            client.pushes.compressed = CompressedPushes(self.codec, self.me.index, client.flat.layout)
        if self.observer is not None:
            self.observer.joined(client, welcome)
        if welcome.copies > 1:
            client.servers.unanswered = {}
        for message in self.early:  # the run may have ended meanwhile
            if isinstance(message, ServerMoved):
                self._server_moved(client, message)
            else:
                client.receive(message)
        return client

    def must_stop(self, handle: Handle) -> bool:
        """Return True if the run stops and the strategy, not stopped yet, waits for what may never happen."""
        if not self.training or self.stopped or self.client is None:
            return False
        return handle.may_never_complete(self.client.stopping)
