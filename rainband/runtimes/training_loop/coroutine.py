"""A strategy's coroutine inside a custom training loop: suspended at the next gradient until the user steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from rainband.model.gradient import Gradient
from rainband.protocol.steps import Steps
from rainband.runtimes.processes.drive import drive_until
from rainband.strategy import Batch, Strategy, WorkItem
from rainband.worker.client import Client
from rainband.worker.lifecycle import live
from rainband.worker.pulls import PullHandle
from rainband.worker.pushes import PushHandle
from rainband.worker.work_items import StillNeeded
from rainband.worker.worker import LocalAccounting, buffers_of

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.stage import PipelineStage, StageVersions
    from rainband.worker.session import Session

SOME_BATCH = Batch(-1, -1, -1)  # in a work item whose batches the user has not drawn yet


class UsersTurn:
    """Something that only the user's loop can give."""

    come = False
    result: Any = None

    def give(self, result: Any) -> None:
        self.come, self.result = True, result

    def __await__(self) -> Generator[UsersTurn, None, Any]:
        while not self.come:
            yield self
        return self.result


class NextGradient(UsersTurn):
    """The gradient that the user's next step brings."""


class NextWorkItem(UsersTurn):
    """A request for the next work item; None at the end."""


class LoopEnd(UsersTurn):
    """The end of the user's loop."""


class LoopWorker:
    """The worker that a strategy uses when a custom training loop computes the gradients."""

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
        # In rounds a work item is a batch of the plan, known when it is drawn; otherwise a number of steps of the user.
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
        """Statistics count by the samples seen; of a loader of one's own only the steps are known."""
        return self.client.stats.samples or self.client.stats.steps

    def buffers(self) -> bytes:
        return buffers_of(self.client.flat.module)

    def gradient(self, batch: Batch) -> NextGradient:
        return NextGradient()

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule) -> UsersOptimizer:
        """The user's own, whatever the strategy would have chosen."""
        return UsersOptimizer(self)

    def still_needed(self, work_item: WorkItem) -> StillNeeded:
        return self.client.still_needed(work_item)

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> PipelineStage:
        raise ValueError(
            "a custom training loop computes the whole model: use rainband train --stages 2 for a pipeline."
        )

    def skip(self, batches: tuple[Batch, ...], reason: str) -> None:
        """Mark batches that no step will name."""
        nothing = Gradient([None] * len(self.client.flat.parameters), batches, 0, 0.0)
        if self.accounting is not None:
            self.accounting.add(nothing.push_id(), reason)
        elif batches:
            self.client.pushes.skip(nothing, reason)


class LoopServers:
    """The servers that a strategy uses; an empty gradient, which ends a work item early, is not sent."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def push(self, gradient: Gradient) -> PushHandle:
        return self.client.push(gradient) if _is_something(gradient) else PushHandle((), 0)

    def exchange(self, gradient: Gradient) -> PullHandle:
        return self.client.exchange(gradient) if _is_something(gradient) else self.client.pull()

    def pull(self, round: int | None = None, ahead: int = 0) -> PullHandle:
        return self.client.pull(round, ahead)


def _is_something(gradient: Gradient) -> bool:
    return bool(gradient.batches) or any(tensor is not None for tensor in gradient.tensors)


class LoopParameters:
    """The worker's own copy of the parameters; its steps follow the user's learning rates."""

    def __init__(self, client: Client, rates: Callable[[], Sequence[float]]) -> None:
        self.flat = client.flat
        self.rates = rates  # of each parameter group, now
        self.first_rate = rates()[0]

    def step(self, gradient: Gradient, lr: float) -> None:
        """params -= lr * gradient, where the user's schedule scales lr as it has scaled each group's rate."""
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
    """The user's own optimizer, stepping on this worker at the moment the strategy says so."""

    def __init__(self, worker: LoopWorker) -> None:
        self.worker = worker

    def step(self, gradient: Gradient) -> None:
        if not _is_something(gradient):
            return
        if not gradient.is_finite:
            self.worker.skip(gradient.batches, "not finite")
            return
        self.worker.step_now(gradient.tensors)
        if self.worker.accounting is not None:
            self.worker.accounting.add(gradient.push_id())


class LoopCoroutine:
    """Goes on with the worker's life whenever the user's loop gives it something, until it is the user's turn again."""

    def __init__(self, session: Session, wait: Callable[..., object]) -> None:
        self.session = session
        self.wait = wait
        self.life = Steps(live(session))
        self.wanted: UsersTurn | None = None
        self._go_on()

    @property
    def worker(self) -> LoopWorker:
        worker = self.session.worker
        assert isinstance(worker, LoopWorker)
        return worker

    @property
    def over(self) -> bool:
        """The strategy has returned, or was stopped."""
        return not self.session.training

    def _go_on(self) -> None:
        self.wanted = drive_until(self.life, self.wait, self.session, (UsersTurn,))

    def step(self, gradient: Gradient) -> None:
        """The user has stepped."""
        if self.over:
            return  # the run was stopped
        assert isinstance(self.wanted, NextGradient), "in rounds a step needs a batch"
        self.worker.given += 1
        gradient.began, gradient.read = self.worker.client.pushes.clock, tuple(self.worker.client.pulls.versions)
        self.wanted.give(gradient)
        self._go_on()

    def begin(self, work_item: WorkItem) -> bool:
        """Begin the work item that the user has drawn, in rounds; return False if it is no longer needed."""
        if isinstance(self.wanted, NextWorkItem):
            self.wanted.give(work_item)
            self._go_on()
        return isinstance(self.wanted, NextGradient)

    def end_item(self) -> bool:
        """End the work item early and let the strategy push; return False if it has nothing to push."""
        nothing = Gradient([None] * len(self.worker.client.flat.parameters), (), 0, 0.0)
        owes = isinstance(self.wanted, NextGradient) and bool(self.worker.given)
        while isinstance(self.wanted, NextGradient) and self.worker.given:
            self.step(nothing)
        return owes

    def end_round(self) -> None:
        """End the work item, which was skipped, in rounds."""
        self.worker.given += 1
        self.end_item()

    def finish(self) -> None:
        """The loop is over: let the strategy push what it has, and return; then the worker leaves the run."""
        self.worker.ending = True
        self.worker.given += 1  # also for a work item that has not begun
        self.end_item()
        if isinstance(self.wanted, NextWorkItem):
            self.wanted.give(None)
            self._go_on()
        assert isinstance(self.wanted, LoopEnd), "a strategy returns when there are no more work items"
        self.wanted.give(None)
        self._go_on()
