"""A strategy's coroutine inside a custom training loop: suspended until the user's next step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rainband.model.gradient import Gradient
from rainband.model.model_vector import ModelVector
from rainband.protocol.accounting import NOT_FINITE
from rainband.runtimes.training_loop.users_turn import LoopLifecycle, UsersTurn
from rainband.strategy import Batch, BatchPart, Models, Strategy, WorkItem
from rainband.worker.client import Client, Refresh
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle
from rainband.worker.work_items import StillNeeded
from rainband.worker.worker import LocalAccounting, WorkerParameters, buffers_of

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.stage import PipelineStage, StageVersions

SOME_BATCH = Batch(-1, -1, -1)  # of a work item whose batches the user has not drawn yet


class NextGradient(UsersTurn):
    """The gradient of the user's next step."""


class NextWorkItem(UsersTurn):
    """The next work item; None at the end."""


class LoopWorker:
    """The worker that a strategy gets when a custom training loop computes the gradients."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        client: Client,
        params: LoopParameters,
        step_now: Callable[[Sequence[Tensor | None]], None],
        strategy: Strategy,
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.client = client
        self.params = params
        self.servers = LoopServers(client)
        self.step_now = step_now
        self.accounting = None if client.servers.ports else LocalAccounting(client)
        self.given = 0  # gradients of the current work item
        # In rounds a work item is a batch of the plan, known when it is drawn; otherwise it is a number of user steps.
        self.rounds = strategy.requires.waits == "rounds"
        self.steps_per_item = strategy.requires.batches_per_item
        self.ending = False

    async def work_items(self) -> AsyncIterator[WorkItem]:
        while (work_item := await self._next_item()) is not None:
            self.given = 0
            yield work_item

    async def _next_item(self) -> WorkItem | None:
        if self.rounds or self.ending:
            work_item: WorkItem | None = await NextWorkItem()
            return work_item
        return WorkItem((SOME_BATCH,) * self.steps_per_item)

    @property
    def seen(self) -> int:
        """Return the samples seen, or the steps if the user's own loader gives no samples."""
        return self.client.stats.samples or self.client.stats.steps

    def buffers(self) -> bytes:
        return buffers_of(self.client.flat.module)

    def gradient(self, batch: Batch | BatchPart) -> NextGradient:
        return NextGradient()

    def parts(self) -> AsyncIterator[BatchPart]:
        raise ValueError("a custom training loop that shares batches exchanges gradients itself.")

    def mean(self, gradient: Gradient) -> Awaitable[Gradient]:
        raise ValueError("a custom training loop that shares batches exchanges gradients itself.")

    @property
    def models(self) -> Models:
        raise ValueError(
            "this strategy exchanges the models of workers, which a custom training loop with servers cannot: use "
            "rainband train or rainband.fit."
        )

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule, counts: bool = True) -> UsersOptimizer:
        """Return the user's optimizer instead of the strategy's choice."""
        return UsersOptimizer(self)

    def still_needed(self, work_item: WorkItem) -> StillNeeded:
        return self.client.still_needed(work_item)

    def change(self, vector: ModelVector, batches: Sequence[Batch], samples: int) -> Gradient:
        return Gradient(list(vector.tensors), tuple(batches), samples, 0.0)

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> PipelineStage:
        raise ValueError(
            "a custom training loop computes the whole model: a pipeline requires rainband train --stages 2."
        )

    def skip(self, batches: tuple[Batch, ...], reason: str) -> None:
        """Report batches as skipped."""
        nothing = Gradient([None] * len(self.client.flat.parameters), batches, 0, 0.0)
        if self.accounting is not None:
            self.accounting.add(nothing.push_id(), reason)
        elif batches:
            self.client.pushes.skip(nothing, reason, ends_item=False)


class LoopServers:
    """The servers, as a strategy sees them. An empty gradient, which ends a work item early, is not sent."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def push(self, gradient: Gradient) -> PushHandle:
        return self.client.push(gradient) if _is_not_empty(gradient) else PushHandle((), 0)

    def exchange(self, gradient: Gradient) -> PullHandle:
        return self.client.exchange(gradient) if _is_not_empty(gradient) else self.client.pull()

    def pull(self, round: int | None = None, ahead: int = 0) -> PullHandle:
        return self.client.pull(round, ahead)

    def refresh(self) -> Refresh:
        return self.client.refresh()


def _is_not_empty(gradient: Gradient) -> bool:
    return bool(gradient.batches) or any(tensor is not None for tensor in gradient.tensors)


class LoopParameters(WorkerParameters):
    """The worker's copy of the parameters; its local steps follow the user's learning rates."""

    def __init__(self, client: Client, rates: Callable[[], Sequence[float]]) -> None:
        super().__init__(client.flat)
        self.rates = rates  # the current one of each parameter group
        self.first_rate = rates()[0]

    def step(self, gradient: Gradient, lr: float) -> None:
        """Step with params -= lr * gradient, where lr is scaled as the user's schedule scaled each group's rate."""
        if not gradient.is_finite:
            return
        factor = lr / self.first_rate if self.first_rate else 1.0
        rates = self.rates()
        for rate in dict.fromkeys(rates):
            of_rate = [
                tensor if rates[spec.group] == rate else None
                for spec, tensor in zip(self.flat.layout.parameters, gradient.tensors, strict=True)
            ]
            self.flat.add_(of_rate, -factor * rate)


class UsersOptimizer:
    """The user's optimizer, which steps on this worker when the strategy requests it."""

    def __init__(self, worker: LoopWorker) -> None:
        self.worker = worker

    def step(self, gradient: Gradient) -> None:
        if not _is_not_empty(gradient):
            return
        if not gradient.is_finite:
            self.worker.skip(gradient.batches, NOT_FINITE)
            return
        self.worker.step_now(gradient.tensors)
        if self.worker.accounting is not None:
            self.worker.accounting.add(gradient.push_id())


class LoopCoroutine(LoopLifecycle):
    """The lifecycle of a worker whose strategy gets its gradients from the user's loop."""

    @property
    def worker(self) -> LoopWorker:
        worker = self.session.worker
        assert isinstance(worker, LoopWorker)
        return worker

    @property
    def over(self) -> bool:
        """Return True if the strategy has returned or was stopped."""
        return not self.session.training

    def step(self, gradient: Gradient) -> None:
        """Give the strategy the gradient of a user's step."""
        if self.over:
            return  # the run was stopped
        assert isinstance(self.needed, NextGradient), "in rounds a step needs a batch"
        self.worker.given += 1
        gradient.began, gradient.read = self.worker.client.pushes.clock, tuple(self.worker.client.pulls.versions)
        self.needed.give(gradient)
        self._go_on()

    def begin(self, work_item: WorkItem) -> bool:
        """In rounds: begin the work item of the drawn batch; return False if the strategy does not need it anymore."""
        if isinstance(self.needed, NextWorkItem):
            self.needed.give(work_item)
            self._go_on()
        return isinstance(self.needed, NextGradient)

    def end_item(self) -> bool:
        """Let the strategy push a work item that is not full; return False if it has no gradient to push."""
        empty = Gradient([None] * len(self.worker.client.flat.parameters), (), 0, 0.0)
        has_gradients = isinstance(self.needed, NextGradient) and bool(self.worker.given)
        while isinstance(self.needed, NextGradient) and self.worker.given:
            self.step(empty)
        return has_gradients

    def end_round(self) -> None:
        """In rounds: end the current work item, which was skipped."""
        self.worker.given += 1
        self.end_item()

    def finish(self) -> None:
        """Let the strategy push what it has gathered, and return; then the worker leaves the run."""
        self.worker.ending = True
        self.worker.given += 1  # also if the work item has not begun
        self.end_item()
        if isinstance(self.needed, NextWorkItem):
            self.needed.give(None)
            self._go_on()
        self.end()
