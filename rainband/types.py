"""The contracts: what a strategy, a rule, a port and a worker are. Read this file first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.blocks import BlockSpec
    from rainband.messages import Limit, Load, Message, Named, Pull, Push
    from rainband.optim_spec import OptimizerSpec
    from rainband.places import Place
    from rainband.portions import Name, Plan
    from rainband.schedules import Schedule
    from rainband.vectors import Operation

Kind = TypeVar("Kind")


@runtime_checkable
class Strategy(Protocol):
    """One algorithm: a frozen dataclass whose fields are its settings, its command line and its log line."""

    async def run(self, worker: Worker) -> None:
        """The worker's half: the paper's loop, written out."""

    def server(self, num_workers: int) -> ServerHalf | None:
        """The servers' half; None when the algorithm has no servers."""


@runtime_checkable
class LedStrategy(Protocol):
    """A strategy with a third half: the coordinator holds no parameters, and leads by commands to those who do."""

    async def lead(self, coordinator: Leading) -> None:
        """The paper's outer loop; when it returns, the run is done."""


class Evaluation(NamedTuple):
    """The loss over some cells; the sum of the gradients of all their samples is in the vector `gradient`."""

    loss: float  # the mean over the samples; not finite if it is so for any cell
    samples: int


class Leading(Protocol):
    """All that `lead` may touch. Operations start at the call; awaiting waits."""

    @property
    def num_cells(self) -> int:
        """Into how many cells the data is cut."""

    @property
    def seed(self) -> int: ...

    def compute(self, *operations: Operation) -> Awaitable[tuple[float, ...]]:
        """Vector arithmetic on every block of every server; the numbers of its dot products and norms, in order."""

    def evaluate(self, *operations: Operation, cells: Sequence[int] | None = None) -> Awaitable[Evaluation]:
        """The same, and then the loss and its gradient at the parameters as they are now, over some cells or all."""

    def note(self, iteration: int, loss: float, gradient_norm: float, step: float, end: str = "") -> None:
        """An iteration is over; `end`: it was the last, because of this."""


@dataclass(frozen=True)
class ServerHalf:
    """What every block of a server gets: a rule of its own, an optimizer, a learning-rate schedule."""

    rule: Callable[[], Rule]
    optimizer: OptimizerSpec
    schedule: Schedule
    vectors: int = 0  # that the coordinator's commands may make beside the parameters; 0: it gives no commands
    guard: bool = False  # lower the learning rate or tighten the bound when the loss runs away, and say so
    adapt: tuple[int, int] | None = None  # from where to where the rule's bound may be moved while all is well


class Rule(Protocol):
    """When a block applies what has come and who may read it: pure, no I/O, no clock. One object per block."""

    @property
    def reads(self) -> Literal["any", "admitted", "round"]:
        """Who may read: anyone without asking, those the rule admits, or exactly the version they name."""

    @property
    def buffered(self) -> int:
        """Batches that were accepted and are not in the parameters yet."""

    def absorb(self, block: Block, push: Push, gradient: Tensor | None) -> None:
        """An accepted push has come (no gradient: its batches are skipped). The gradient is only lent."""

    def admits(self, block: Block, pull: Pull, reader: int) -> bool:
        """May this reader read now?"""

    def forget(self, block: Block, worker: int) -> None:
        """Do not wait for that worker; what it gave stays."""

    def flush(self, block: Block) -> None:
        """Apply what is buffered: the end of the run, or other numbers."""


class ClockedRule(Protocol):
    """A rule that admits readers by how far everyone has come: a clock is the number of cells a worker is done with."""

    def enter(self, block: Block, worker: int, base: int) -> None:
        """A worker asks to read: from now on it is waited for. It has pushed nothing before clock `base`."""

    def tick(self, block: Block, worker: int, clock: int) -> None:
        """A push of this worker was answered, whatever became of it."""

    def clock_of(self, worker: int) -> int: ...

    def holder(self, block: Block, pull: Pull, reader: int) -> int | None:
        """For whom does a reader wait that is not admitted? None: for its own pushes."""


class NamingRule(Protocol):
    """A rule in which block 0 chooses, and all others must choose the same."""

    chosen: list[Named]  # by block 0, to be told to the others

    def names(self, block: Block, named: Named) -> None: ...


class KeepingRule(Protocol):
    """A rule that keeps a copy of what each reader was given."""

    def give(self, block: Block, reader: int) -> Tensor: ...

    def copy_of(self, reader: int, version: int) -> Tensor | None: ...


class TunableRule(Protocol):
    """A rule whose bound may change during the run."""

    bound: int

    def retune(self, bound: int) -> None: ...


class GatheringRule(Protocol):
    """A rule that makes one update of several gradients."""

    count: int  # of the update at hand


class LimitedRule(Protocol):
    """A rule that bounds what a reader may miss, and measures it."""

    def limit(self) -> Limit: ...


def offers(rule: object, kind: type[Kind]) -> Kind | None:
    """A rule as one that can do more, if it can.

    Not by isinstance: since Python 3.12 that does not see what a rule hands on to another one inside it.
    """
    wanted = {name for name in (*vars(kind), *getattr(kind, "__annotations__", {})) if not name.startswith("_")}
    return cast("Kind", rule) if all(hasattr(rule, name) for name in wanted) else None


class Block(Protocol):
    """What a rule may touch of a block."""

    index: int
    plan: Plan
    place: Place
    values: Tensor  # the parameters, in the precision in which they are kept
    version: int

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        """One optimizer step; these pushes are now in the parameters, and the version goes up by one."""

    def advance(self, pushes: Sequence[Push]) -> None:
        """Go to the next version without a step: a round in which every cell was skipped."""

    def accumulate(self, gradient: Tensor, push: Push) -> None:
        """Add to the sum of the evaluation at hand; the parameters stay as they are."""

    def drop(self, names: Sequence[Name], reason: str) -> None:
        """These batches come to nothing, for a reason: whether they have come or not, they are done with."""


class Worker(Protocol):
    """All that a strategy may touch."""

    index: int
    num_workers: int
    params: Parameters
    server: Servers

    def cells(self) -> AsyncIterator[Cell]:
        """The cells leased to this worker, until the run's data is done; in rounds, each when its round is open."""

    def still_wants(self, cell: Cell) -> Awaitable[bool]:
        """Is a cell that was begun still this worker's to do? Looks at what has come; others may have delivered it."""

    def gradient(self, batch: Batch) -> Awaitable[Gradient]:
        """The gradient of a batch's mean loss at the worker's parameters, computed now."""

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule) -> LocalOptimizer:
        """An optimizer that runs on this worker, on its own parameters."""

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: Stashes) -> StageOfPipeline:
        """The stage that this worker is, where several compute one model together."""


class Turn:
    """A batch on its way through a stage."""


@dataclass(frozen=True)
class Stashes:
    """How a stage deals with the versions of its parameters."""

    stash: bool = True  # a backward uses those of its forward
    vertical_sync: bool = False  # a batch uses one version in all stages
    recompute: bool = False  # keep what is read, and run the forward again before the backward
    double_buffered: bool = False  # two versions: a batch uses, in all stages, that of one update ago
    micros: int = 0  # double-buffered: so many batches make an update; 0: one for each stage


class StageOfPipeline(Protocol):
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


class Gradient(Protocol):
    """The sum of some batches' gradients; it knows which batches."""

    batches: tuple[Batch, ...]
    samples: int
    loss: float

    def __add__(self, other: Gradient) -> Gradient: ...

    def __mul__(self, factor: float) -> Gradient: ...

    def plus(self, other: Gradient, times: float) -> Gradient:
        """Add so many times another one. It takes over this gradient's memory: do not use the summands afterwards."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch of the plan, and the lease under which it is computed."""

    portion: int
    k: int
    lease: int


class Cell(msgspec.Struct, frozen=True, gc=False):
    """The unit of pushing: batches that are summed into one push."""

    batches: tuple[Batch, ...]
    round: int = -1
    more: bool = True  # another one is at hand, as far as is known


class Port(Protocol):
    """A worker's way to one server."""

    direct: bool  # the server's parameters can be read in place, without asking

    def send(self, message: Message) -> None:
        """Send a message without payload."""

    def push(self, message: Push | Load, fill: Callable[[Tensor], None]) -> None:
        """Send a message with a payload that `fill` writes; returns when it was written, may wait for room."""

    def read(self, spec: BlockSpec, point: int, out: Tensor) -> int | None:
        """Direct only: copy a block's parameters; returns the version, None if that point is gone."""


@runtime_checkable
class BorrowingPort(Protocol):
    """A port that, during an exchange, sends from and receives into the worker's own memory, without copies."""

    def lend(self, sequence: int, gradient: Mapping[int, Tensor], views: Mapping[int, Tensor]) -> None:
        """Until `settle` returns, these blocks of the gradient stay as they are, and nobody computes with the views."""

    def settle(self, pull: Settling) -> None:
        """Wait until the exchange is over."""


class Settling(Protocol):
    """What a port waits for."""

    def ready(self) -> bool: ...


Payload = Any  # a 1-D tensor whose bytes travel beside a message
