"""The contracts: what a strategy, a rule, a port and a worker are. Read this file first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.model.gradient import Gradient as Gradient
    from rainband.protocol.data_plan import DataPlan, PushId
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.messages import InitBlock, Message, Pull, Push, RoundChosen, StalenessLimit
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.protocol.parameter_buffers import ParameterBuffer
    from rainband.protocol.vectors import Operation
else:
    Gradient = Any  # strategies import the name for annotations only: no torch for --help


@dataclass(frozen=True)
class Requirements:
    """All that a run must know about a strategy before it starts. Options are checked against it."""

    servers: bool = True  # parameter servers hold the parameters, and server() says what they do
    max_replicas: int | None = None  # of the model; 1: one process (single); None: any number
    optimizer: Literal["servers", "workers", "commands"] = "servers"  # what changes the parameters
    waits: Literal["never", "bounded", "rounds"] = "never"  # for other workers: asynchronous, bounded, synchronous
    batches_per_item: int = 1  # batches of one work item, whose gradients are summed into one push
    warm_start_batches: int = 0  # one worker trains these alone before the others start
    coordinated: bool = False  # lead() runs on the coordinator, and decides how often the data is used
    shared_memory: bool = False  # all workers write to one copy of the parameters, on one machine
    whole_model: bool = False  # a worker must hold the whole model: no stages
    stages: StageVersions | None = None  # a pipeline whose stages step by themselves, with these weight versions
    custom_loop: bool = True  # a user's own training loop may use it
    guard: bool = False  # without servers: the divergence guard may lower the learning rate


class Straggler(NamedTuple):
    """A worker that is known to be slow, and from what."""

    who: str
    factor: float  # how many times slower
    always: bool = True  # not only now and then


@dataclass(frozen=True)
class Cluster:
    """What is known about a run before it starts."""

    replicas: int
    called: str = "workers"  # what people call the replicas
    straggler: Straggler | None = None

    def __str__(self) -> str:
        return f"{self.replicas} {self.called}"


class Strategy(ABC):
    """One algorithm: a frozen dataclass whose fields are its settings, its command line and its log line."""

    @abstractmethod
    async def run(self, worker: Worker) -> None:
        """The worker part: the paper's loop, written out."""

    @property
    def requires(self) -> Requirements:
        """What a run must know before it starts."""
        return Requirements()

    def server(self, num_workers: int) -> ServerPart | None:
        """The server part; None where `requires.servers` is false."""
        return None

    async def coordinate(self, coordinator: CoordinatorApi) -> None:
        """The coordinator part, if `requires.coordinated`; when it returns, the run is done."""
        raise NotImplementedError(f"{type(self).__name__} has no coordinator part.")

    def staleness(self, replicas: int) -> float:
        """Expected mean staleness in updates, for workers of equal speed."""
        return 0.0

    def advice(self, cluster: Cluster) -> list[str]:
        """Warnings about these settings on this cluster, one sentence each."""
        return []


class Evaluation(NamedTuple):
    """The loss over some cells; the sum of the gradients of all their samples is in the vector `gradient`."""

    loss: float  # the mean over the samples; not finite if it is so for any cell
    samples: int


class CoordinatorApi(Protocol):
    """All that `lead` may touch. Operations start at the call; awaiting waits."""

    @property
    def num_items(self) -> int:
        """Into how many cells the data is cut."""

    @property
    def seed(self) -> int: ...

    def compute(self, *operations: Operation) -> Awaitable[tuple[float, ...]]:
        """Vector arithmetic on every block of every server; the numbers of its dot products and norms, in order."""

    def evaluate(self, *operations: Operation, work_items: Sequence[int] | None = None) -> Awaitable[Evaluation]:
        """The same, and then the loss and its gradient at the parameters as they are now, over some cells or all."""

    def note(self, iteration: int, loss: float, gradient_norm: float, step: float, end: str = "") -> None:
        """An iteration is over; `end`: it was the last, because of this."""


@dataclass(frozen=True)
class ServerPart:
    """What every block of a server gets: a rule of its own, an optimizer, a learning-rate schedule."""

    rule: Callable[[], Rule]
    optimizer: OptimizerSpec
    schedule: Schedule
    vectors: int = 0  # that the coordinator's commands may make beside the parameters; 0: it gives no commands
    guard: bool = False  # lower the learning rate or tighten the bound when the loss runs away, and say so
    adapt: tuple[int, int] | None = None  # from where to where the rule's bound may be moved while all is well


class Rule:
    """Update rule: when a block applies gradients and who may read it. Pure: no I/O, no clock. One object per block.

    A rule overrides `absorb` and what else it needs; all else does nothing. Properties may be plain class attributes.
    """

    @property
    def reads(self) -> Literal["any", "admitted", "round"]:
        """Who may read: anyone without asking, those the rule admits, or exactly the version they name."""
        return "any"

    @property
    def clocked(self) -> bool:
        """Does it count how far each worker is? Then enter, tick, clock_of and holder are called."""
        return False

    @property
    def chooses(self) -> bool:
        """Does block 0 choose the cells of a round, and all other blocks the same?"""
        return False

    @property
    def keeps_reads(self) -> bool:
        """Does it keep a copy of what each reader was given?"""
        return False

    @property
    def buffered(self) -> int:
        """Batches that were accepted and are not in the parameters yet."""
        return 0

    @property
    def gradients_per_update(self) -> int | None:
        """Gradients that make the next update; None: as many as come."""
        return None

    @property
    def bound(self) -> int | None:
        """How far a reader may be ahead; None: there is no bound."""
        return None

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        """An accepted push has come (no gradient: its batches are skipped). The gradient is only lent."""
        raise NotImplementedError

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        """May this reader read now?"""
        return True

    def forget(self, block: RuleBlock, worker: int) -> None:
        """Do not wait for that worker; what it gave stays."""

    def flush(self, block: RuleBlock) -> None:
        """Apply what is buffered: the end of the run, or other numbers."""

    def retune(self, bound: int) -> None:
        """Use another bound from now on."""

    def limit(self) -> StalenessLimit | None:
        """The bound, and the most that a reader missed; None: it bounds nothing."""
        return None

    def enter(self, block: RuleBlock, worker: int, base: int) -> None:
        """A worker asks to read: from now on it is waited for. It has pushed nothing before clock `base`."""

    def tick(self, block: RuleBlock, worker: int, clock: int) -> None:
        """A push of this worker was answered, whatever became of it."""

    def clock_of(self, worker: int) -> int:
        return -1

    def holder(self, block: RuleBlock, pull: Pull, reader: int) -> int | None:
        """For whom does a reader wait that is not admitted? None: for its own pushes."""
        return None

    def take_chosen(self) -> list[RoundChosen]:
        """What block 0 has chosen since the last call, to be told to the others."""
        return []

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        """Block 0 has chosen."""

    def give(self, block: RuleBlock, reader: int) -> None:
        """A reader is admitted, and computes with the block as it is now."""

    def copy_of(self, reader: int, version: int) -> Tensor | None:
        return None


class RuleBlock(Protocol):
    """What a rule may touch of a block."""

    index: int
    plan: DataPlan
    buffer: ParameterBuffer
    values: Tensor  # the parameters, in the precision in which they are kept
    version: int

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        """One optimizer step; these pushes are now in the parameters, and the version goes up by one."""

    def advance(self, pushes: Sequence[Push]) -> None:
        """Go to the next version without a step: a round in which every cell was skipped."""

    def accumulate(self, gradient: Tensor, push: Push) -> None:
        """Add to the sum of the evaluation at hand; the parameters stay as they are."""

    def drop(self, names: Sequence[PushId], reason: str) -> None:
        """These batches come to nothing, for a reason: whether they have come or not, they are done with."""


class Worker(Protocol):
    """All that a strategy may touch."""

    @property
    def rank(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def params(self) -> Parameters: ...

    @property
    def servers(self) -> Servers: ...

    def work_items(self) -> AsyncIterator[WorkItem]:
        """The cells leased to this worker, until the run's data is done; in rounds, each when its round is open."""

    def still_needed(self, work_item: WorkItem) -> Awaitable[bool]:
        """Is a cell that was begun still this worker's to do? Looks at what has come; others may have delivered it."""

    def gradient(self, batch: Batch) -> Awaitable[Gradient]:
        """The gradient of a batch's mean loss at the worker's parameters, computed now."""

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule) -> LocalOptimizer:
        """An optimizer that runs on this worker, on its own parameters."""

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> PipelineStage:
        """The stage that this worker is, where several compute one model together."""


class Turn:
    """A batch on its way through a stage."""


@dataclass(frozen=True)
class StageVersions:
    """How a stage deals with the versions of its parameters."""

    stash: bool = True  # a backward uses those of its forward
    vertical_sync: bool = False  # a batch uses one version in all stages
    recompute: bool = False  # keep what is read, and run the forward again before the backward
    pipedream_2bw: bool = False  # two versions: a batch uses, in all stages, that of one update ago
    batches_per_update: int = 0  # double-buffered: so many batches make an update; 0: one for each stage


class PipelineStage(Protocol):
    """A worker's own stage of a pipeline that is never flushed."""

    ahead: int  # forwards before the first backward

    def turn(self, batch: Batch) -> Turn | None:
        """The next batch, numbered; None: it goes through another replica of this stage."""

    def forward(self, turn: Turn) -> Awaitable[None]:
        """With the parameters that are its own by `how`, which are kept for its backward."""

    def backward(self, turn: Turn) -> Awaitable[None]:
        """With the parameters of its forward; and then a step, if it was the last of an update."""

    def settle(self) -> Awaitable[None]:
        """All have come home; the last update may be of fewer batches, or of other replicas alone."""


class Servers(Protocol):
    """The way to the servers. Operations start at the call; awaiting the handle waits."""

    def push(self, gradient: Gradient) -> Awaitable[None]:
        """Send a gradient; it may be overwritten when this returns. Awaiting it waits for every block's answer."""

    def exchange(self, gradient: Gradient) -> Awaitable[bool]:
        """Push, and pull what comes of it; until awaited, the worker's parameters change under its hands."""

    def pull(self, round: int | None = None, ahead: int = 0) -> Awaitable[bool]:
        """Ask for the parameters; awaiting makes them the worker's. False: that round is over, the others went on.

        `ahead`: they are for the cell after so many that are computed but not pushed yet.
        """


class Parameters(Protocol):
    """The worker's own copy of the parameters."""

    def step(self, gradient: Gradient, lr: float) -> None:
        """The worker's own step: params -= lr * gradient."""


Tag = tuple[int | str, ...]  # what a message between workers is about


class Peers(Protocol):
    """The way to the other workers that compute one model together, by their machine in its plan."""

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        """Send a nest of tensors and plain values; they may be overwritten when this returns."""

    def recv(self, source: int, tag: Tag) -> Arrival:
        """What that worker sends under this tag, whether it has come or not."""


class Arrival(Protocol):
    """A message that comes, or has come. Awaiting it gives the payload; raises PeerLost if it cannot come any more."""

    def ready(self) -> bool: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class LocalOptimizer(Protocol):
    """Plain PyTorch on one worker."""

    def step(self, gradient: Gradient) -> None:
        """One step with this gradient, at the learning rate of its place in the plan; its batches are done."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch of the plan, and the lease under which it is computed."""

    portion: int
    k: int
    lease: int


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """The unit of pushing: batches that are summed into one push."""

    batches: tuple[Batch, ...]
    round: int = -1
    more: bool = True  # another one is at hand, as far as is known


class Port(Protocol):
    """A worker's link to one server."""

    direct: bool  # the server's parameters lie in shared memory

    def send(self, message: Message) -> None:
        """Send a message without payload."""

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        """Send a message with the values of a block; returns when they were copied or sent, may wait for room."""

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        """Direct only: copy a block's parameters; returns the version, or None if that round is over."""


class BlockValues(Protocol):
    """The values of one block that a message carries: part of a gradient, or of the parameters."""

    def write(self, out: Tensor) -> None:
        """Write them into memory that is sent from, 1-D and as long as the block."""

    def contiguous(self) -> Tensor | None:
        """Return the memory in which they lie in this order already, if there is one."""


@runtime_checkable
class BorrowingPort(Protocol):
    """A port that, during an exchange, sends from and receives into the worker's own memory, without copies."""

    def lend(self, sequence: int, views: Mapping[int, Tensor]) -> None:
        """Lend the parameters of these blocks for one exchange: until `settle` returns, nobody computes with them.

        Gradients that are pushed meanwhile stay unchanged until then.
        """

    def settle(self, pull: Settling) -> None:
        """Wait until the exchange is over."""


class Settling(Protocol):
    """What a port waits for."""

    def ready(self) -> bool: ...


Payload = Any  # a 1-D tensor whose bytes travel beside a message
