"""The contract of a strategy: what its author writes, and what it may use. Read this file first.

A strategy is one algorithm in one file. It has up to three parts, and each part sees one small interface:

    run(worker)              on every worker: compute gradients, exchange them with the servers
    server(num_replicas)     on every server: an update rule (rules/rule.py), an optimizer, a learning-rate schedule
    coordinate(coordinator)  on the coordinator: the outer loop of full-batch methods (coordinator_api.py)

`requires` declares all that a run must know before it starts. Nothing else is ever asked of a strategy.
This file does not import torch, so that `rainband --help` stays fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import msgspec

from rainband.settings import check_arguments

if TYPE_CHECKING:
    from rainband.coordinator_api import CoordinatorApi
    from rainband.model.gradient import Gradient as Gradient
    from rainband.model.model_vector import ModelVector as ModelVector
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.rules.rule import Rule
    from rainband.stage import PipelineStage, StageVersions
else:
    Gradient = ModelVector = Any  # strategies import the names for annotations only


# ---- what a strategy declares ---------------------------------------------------------------------------------------


# size: one field for each fact
@dataclass(frozen=True)
class Requirements:
    """The facts that a run must know about a strategy before it starts. Options are checked against it."""

    servers: bool = True  # parameter servers hold the parameters, and server() describes what they do
    max_replicas: int | None = None  # replicas of the model; 1: one process (single); None: any number
    tree_arity: int = 0  # children of each server in a tree of servers, of which the root has all blocks; 0: no tree
    optimizer: Literal["servers", "workers", "commands"] = "servers"  # where the task's optimizer runs
    waits: Literal["never", "bounded", "rounds"] = "never"  # for other workers: asynchronous, bounded, synchronous
    batches_per_item: int = 1  # batches of one work item, whose gradients are summed into one push
    warm_start_batches: int = 0  # one worker trains these alone before the others start
    coordinated: bool = False  # coordinate() runs on the coordinator, and decides how often the data is used
    shared_memory: bool = False  # workers write to parameters that all of them see, on one machine
    in_pairs: bool = (
        False  # each worker has a model in that memory, and averages it with another's (`params.average_with`)
    )
    split_batches: bool = False  # workers share each batch (`worker.parts`, `worker.mean`)
    in_stages: Mapping[str, Any] = field(default_factory=dict)  # settings that make the same updates with stages
    algorithm: str = ""  # of the all-reduce by which workers that share batches average; empty: each reads all others
    local_steps: bool = False  # workers train models of their own, and average them in rounds (`worker.models`)
    needs_loss: bool = False  # of each batch: a custom training loop must report it before its step
    whole_model: bool = False  # a worker must hold the whole model: no stages
    stages: StageVersions | None = None  # a pipeline whose stages step by themselves, with these weight versions
    custom_loop: bool = True  # it can be used in a user's own training loop
    guard: bool = False  # the divergence guard may lower the learning rate or tighten the bound
    bound_range: tuple[int, int] | None = None  # the guard may also loosen the rule's bound, within these limits
    not_replayable: str = ""  # why the order of pushes and reads is not enough to repeat a run; empty: it is enough

    @property
    def in_rounds(self) -> bool:
        """Return True if workers meet in rounds, in memory that they share, instead of at servers."""
        return self.split_batches or self.local_steps

    @property
    def computes_whole_batches(self) -> bool:
        """Return True if every batch is computed at once: by one process, or by workers that share it."""
        return self.split_batches or (self.max_replicas == 1 and self.stages is None)

    def replay_obstacle(self) -> str:
        """Return why a recorded run cannot be replayed; empty: it can."""
        if not self.servers:
            return "has no servers, and the order of their updates is what is recorded"
        if self.coordinated:
            return "goes by iterations, and only asynchronous runs can be replayed"
        if self.waits != "never":
            return "makes workers wait for each other, and only runs in which no worker waits can be replayed"
        return self.not_replayable


# Of strategies whose workers make steps of their own and exchange models in rounds.
LOCAL_STEPS = Requirements(servers=False, optimizer="workers", waits="rounds", local_steps=True, whole_model=True)


class Straggler(NamedTuple):
    """A worker that is known to be slow, from settings or from an earlier run."""

    who: str
    factor: float  # how many times slower
    always: bool = True  # False: only now and then


@dataclass(frozen=True)
class Cluster:
    """The numbers of a run that are known before it starts, for advice."""

    replicas: int
    called: str = "workers"  # what messages call replicas
    straggler: Straggler | None = None

    def __str__(self) -> str:
        return f"{self.replicas} {self.called}"


class Strategy(ABC):
    """The base class of every algorithm. Subclasses are frozen dataclasses whose fields are their settings."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the names and types of the settings."""
        if settings and is_dataclass(cls):
            check_arguments(cls, settings)
        return super().__new__(cls)

    @abstractmethod
    async def run(self, worker: Worker) -> None:
        """Run the worker part: the paper's loop, written out. It may await only what `worker` returns."""

    @property
    def requires(self) -> Requirements:
        """Declare what a run must know before it starts."""
        return Requirements()

    def server(self, num_replicas: int) -> ServerPart | None:
        """Return the server part; None where `requires.servers` is false."""
        return None

    async def coordinate(self, coordinator: CoordinatorApi) -> None:
        """Run the coordinator part, if `requires.coordinated`; the run ends when it returns."""
        raise NotImplementedError(f"{type(self).__name__} has no coordinator part.")

    def staleness(self, replicas: int) -> float | None:
        """Return the expected mean staleness in updates, for workers of equal speed; None: unknown."""
        return None

    def advice(self, cluster: Cluster) -> list[str]:
        """Return warnings about these settings on this cluster: one sentence each, with the number and a remedy."""
        return []

    def lr_factor(self, num_replicas: int) -> float:
        """Return by what a learning rate of one process is multiplied, also that of a custom training loop."""
        return 1.0

    def with_optimizer(self, spec: OptimizerSpec) -> Self:
        """Return this strategy with a custom loop's optimizer, learning rate and momentum in place of its own."""
        if not is_dataclass(self):
            return self
        of_loop = {"optimizer": spec.name, **{name: spec.settings.get(name) for name in ("lr", "momentum")}}
        declared = {field.name for field in fields(self)}
        return replace(self, **{k: v for k, v in of_loop.items() if k in declared and v is not None})


# ---- the worker part ------------------------------------------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch of the data plan, and the lease (a fencing token) under which it is processed."""

    portion: int
    k: int
    lease: int


class BatchPart(msgspec.Struct, frozen=True):
    """A part of a batch that workers share. It is empty if the batch has fewer samples than there are workers."""

    batch: Batch
    positions: Sequence[int]  # of its samples in the batch
    size: int  # samples of the whole batch


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """The unit of work: batches whose gradients are summed into one push."""

    batches: tuple[Batch, ...]
    round: int = -1  # -1: the strategy has no rounds
    more: bool = True  # another item is ready, as far as is known


class Worker(Protocol):
    """The operations that the worker part may use. Operations start when called; awaiting the result waits."""

    @property
    def rank(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def params(self) -> Parameters: ...

    @property
    def servers(self) -> Servers: ...

    def work_items(self) -> AsyncIterator[WorkItem]:
        """Yield the work items leased to this worker until the data is processed; in rounds, as each round opens."""

    def still_needed(self, work_item: WorkItem) -> Awaitable[bool]:
        """Check whether an item that was begun is still this worker's; another may have delivered it."""

    def parts(self) -> AsyncIterator[BatchPart]:
        """Yield this worker's part of each batch, in order, the same batches on all workers; with `split_batches`."""

    def mean(self, gradient: Gradient) -> Awaitable[Gradient]:
        """Return the mean of all workers' gradients of their parts, weighted by samples: that of the whole batch.

        All workers await it once or more for each part. If one is lost, the others compute its part before it returns.
        A worker that did not take part, because it was paused, gets a gradient that optimizers ignore.
        """

    @property
    def models(self) -> Models:
        """Return the rounds in which workers exchange their models; only with `local_steps`."""

    def gradient(self, batch: Batch | BatchPart) -> Awaitable[Gradient]:
        """Compute the gradient of the mean loss of a batch, or of a part of it, at `params`.

        With `in_pairs`, `params` first becomes a copy of this worker's model, which others may have changed.
        """

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule, counts: bool = True) -> LocalOptimizer:
        """Return an optimizer that steps this worker's `params`; in a custom loop, the user's own.

        `counts`: batches are applied by its steps; False: by what is pushed to servers later.
        """

    def change(self, vector: ModelVector, batches: Sequence[Batch], samples: int) -> Gradient:
        """Return a vector, made from these batches, as something that can be pushed to the servers."""

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> PipelineStage:
        """Return the pipeline stage that this worker is; only with `requires.stages`."""


class Parameters(Protocol):
    """The worker's copy of the parameters."""

    def step(self, gradient: Gradient, lr: float) -> None:
        """Subtract lr * gradient from the worker's copy."""

    def copy(self) -> ModelVector:
        """Return a copy of this worker's parameters."""

    def replace(self, vector: ModelVector) -> None:
        """Set this worker's parameters."""

    def average_with(self, partner: int, step: ModelVector, gradient: Gradient) -> Awaitable[None]:
        """Replace the models of this worker and its partner by their mean, then add a step to this worker's.

        No worker sees the two models in between. The step counts the gradient's batch. A partner that is this worker
        itself is no partner: the step alone is added. Only with `in_pairs`.
        """


class LocalOptimizer(Protocol):
    """A torch optimizer on this worker."""

    def step(self, gradient: Gradient) -> None:
        """Make one step, at the scheduled learning rate of the gradient's batch; its batches count as applied."""


class Models(Protocol):
    """The models of all workers, seen from one of them: in each round, every worker makes steps of its own.

    If a worker is lost, the others go on, and process its batches of the open round in the next ones: what it had
    changed since the last mean is lost with it. A worker that joins receives another worker's model, optimizer state
    and `shared`.
    """

    shared: dict[
        str, Any
    ]  # vectors and numbers; is equal on all workers, and given to those that join: replace its values

    @property
    def members(self) -> Sequence[int]:
        """Return the ranks of the workers that take part in this round."""

    async def begin(self) -> bool:
        """End the round before, and begin the next one; False: all data is processed, or the run stops."""

    def batches(self, number: int) -> Iterable[Batch]:
        """Return this worker's next batches of the data, once in each round.

        All workers must give the same number, of batches for each worker; at the end of the data, some get fewer.
        """

    async def mean(
        self, weights: ModelVector | None = None, part: range | None = None, equally: bool = False
    ) -> ModelVector:
        """Return the mean over the workers, of their parameters unless given, weighted by the samples of this round.

        `part`: only of these parameters; the others are returned as given. `equally`: every worker counts alike. All
        workers must await it at the same place, once or more in each round.
        """

    async def mix(self, row: Callable[[int, int], Sequence[float]]) -> ModelVector:
        """Return a weighted sum of the workers' parameters, as they were before this round's steps.

        `row(i, n)` returns the n weights that the i-th of n workers gives to all of them; those of 0 are not read. The
        batches of this round count when the next one is mixed, and one more round without batches follows the last.
        """

    async def mean_of_optimizers(self) -> None:
        """Replace the state of this worker's optimizer by the mean over the workers."""

    @property
    def loss(self) -> float:
        """Return the mean loss of the last round's batches, over all workers; NaN before the first mean."""

    @property
    def is_last(self) -> bool:
        """Return True if no data is left after this round."""

    @property
    def is_over(self) -> bool:
        """Return True if no data is left for this round: it is one more, for a last mean."""

    @property
    def progress(self) -> float:
        """Return the fraction of the data that was processed before this round."""


class Servers(Protocol):
    """The parameter servers, seen from a worker."""

    def push(self, gradient: Gradient) -> Awaitable[None]:
        """Send a gradient, which may be overwritten at once; awaiting waits for the answer of every block."""

    def pull(self, round: int | None = None, ahead: int = 0) -> Awaitable[bool]:
        """Copy the servers' parameters into `params` when awaited. False: that round is over already.

        `ahead`: work items that are computed but not pushed before the one that these parameters are for.
        """

    def refresh(self) -> Awaitable[None]:
        """Take the parameters that have arrived into `params`, and request newer ones if all have; never wait."""

    def exchange(self, gradient: Gradient) -> Awaitable[bool]:
        """Push, then pull the result; `params` may change until it is awaited."""


# ---- the server part ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerPart:
    """The server part of a strategy: the rule and optimizer of every block."""

    rule: Callable[[], Rule]  # decides when a gradient is applied and who may read; one object per block
    optimizer: OptimizerSpec
    schedule: Schedule
    vectors: int = 0  # vectors that the coordinator's commands may create beside the parameters
