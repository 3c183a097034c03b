"""A strategy's coroutine inside a user's own loop: suspended at the next gradient until the user steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING

from rainband.client import Client, Handle, PullHandle, PushHandle
from rainband.errors import Stop
from rainband.gradient import ModuleGradient
from rainband.types import Batch, Cell, Strategy
from rainband.worker import OwnMarks
from rainband.worlds.drive import wait_for

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.optim_spec import OptimizerSpec
    from rainband.schedules import Schedule

SOME_BATCH = Batch(-1, -1, -1)  # in a cell of which nobody knows yet what the user will draw


class NextGradient:
    """The gradient that the user's next step brings."""

    def __init__(self) -> None:
        self.result: ModuleGradient | None = None

    def __await__(self) -> Generator[NextGradient, None, ModuleGradient]:
        while self.result is None:
            yield self
        return self.result


class NextCell:
    """The cell that comes next; none at the end."""

    def __init__(self) -> None:
        self.come = False
        self.result: Cell | None = None

    def give(self, cell: Cell | None) -> None:
        self.come, self.result = True, cell

    def __await__(self) -> Generator[NextCell, None, Cell | None]:
        while not self.come:
            yield self
        return self.result


class LoopWorker:
    """What a strategy may touch, when the computing is done by somebody's own loop."""

    def __init__(
        self,
        index: int,
        num_workers: int,
        client: Client,
        params: LoopParameters,
        step_now: Callable[[Sequence[Tensor | None]], None],
    ) -> None:
        self.index = index
        self.num_workers = num_workers
        self.client = client
        self.params = params
        self.server = LoopServers(client)
        self.step_now = step_now
        self.marks = None if client.ports else OwnMarks(client)
        self.given = 0  # gradients of the cell at hand

    async def cells(self) -> AsyncIterator[Cell]:
        while (cell := await NextCell()) is not None:
            self.given = 0
            yield cell

    def gradient(self, batch: Batch) -> NextGradient:
        return NextGradient()

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule) -> UsersOptimizer:
        """The user's own, whatever the strategy would have chosen."""
        return UsersOptimizer(self)

    def skip(self, batches: tuple[Batch, ...], reason: str) -> None:
        """Mark batches that no step will name."""
        nothing = ModuleGradient([None] * len(self.client.flat.parameters), batches, 0, 0.0)
        if self.marks is not None:
            self.marks.add(nothing.name(), reason)
        elif batches:
            self.client.skip(nothing, reason)


class LoopServers:
    """The servers, as a strategy sees them. A gradient of nothing, which ends a cell early, is not sent."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def push(self, gradient: ModuleGradient) -> Handle:
        return self.client.push(gradient) if _is_something(gradient) else PushHandle((), 0)

    def exchange(self, gradient: ModuleGradient) -> PullHandle:
        return self.client.exchange(gradient) if _is_something(gradient) else self.client.pull()

    def pull(self, round: int | None = None, ahead: int = 0) -> PullHandle:
        return self.client.pull(round, ahead)


def _is_something(gradient: ModuleGradient) -> bool:
    return bool(gradient.batches) or any(tensor is not None for tensor in gradient.tensors)


class LoopParameters:
    """The worker's own copy of the parameters; its steps follow the user's learning rates."""

    def __init__(self, client: Client, rates: Callable[[], Sequence[float]]) -> None:
        self.flat = client.flat
        self.rates = rates  # of each parameter group, now
        self.first_rate = rates()[0]

    def step(self, gradient: ModuleGradient, lr: float) -> None:
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

    def step(self, gradient: ModuleGradient) -> None:
        if not _is_something(gradient):
            return
        if not gradient.is_finite:
            self.worker.skip(gradient.batches, "not finite")
            return
        self.worker.step_now(gradient.tensors)
        if self.worker.marks is not None:
            self.worker.marks.add(gradient.name())


class Suspended:
    """Goes on with the strategy whenever the user's loop gives it something, until it wants a gradient again."""

    def __init__(self, strategy: Strategy, worker: LoopWorker, wait: Callable[[], object]) -> None:
        self.worker = worker
        self.wait = wait
        self.coroutine = strategy.run(worker)  # type: ignore[arg-type]
        # In rounds a cell is a batch of the plan, given when it is drawn; otherwise it is so many steps of the user.
        self.rounds = bool(getattr(strategy, "rounds", False))
        self.steps_per_cell: int = getattr(strategy, "cell_batches", 1)
        self.wanted: NextGradient | NextCell | None = None
        self.ending = False
        self.over = False
        self._go_on()

    def step(self, gradient: ModuleGradient) -> None:
        """The user has stepped."""
        if self.over:
            return  # the run was stopped
        assert isinstance(self.wanted, NextGradient), "in rounds a step needs a batch"
        self.worker.given += 1
        gradient.began, gradient.read = self.worker.client.clock, tuple(self.worker.client.versions)
        self.wanted.result = gradient
        self._go_on()

    def begin(self, cell: Cell) -> bool:
        """In rounds: the user has drawn this cell. False: the strategy found that it is not needed any more."""
        if isinstance(self.wanted, NextCell):
            self.wanted.give(cell)
            self._go_on()
        return isinstance(self.wanted, NextGradient)

    def end_cell(self) -> bool:
        """Let the strategy push what it has: what is missing of the cell is nothing. False: it has nothing."""
        nothing = ModuleGradient([None] * len(self.worker.client.flat.parameters), (), 0, 0.0)
        owes = not self.over and isinstance(self.wanted, NextGradient) and bool(self.worker.given)
        while not self.over and isinstance(self.wanted, NextGradient) and self.worker.given:
            self.step(nothing)
        return owes

    def end_round(self) -> None:
        """In rounds: the cell at hand was skipped, nothing comes of it."""
        self.worker.given += 1
        self.end_cell()

    def finish(self) -> None:
        """The loop is over: let the strategy push what it has, and return."""
        self.ending = True
        self.worker.given += 1  # also a cell that has not begun
        self.end_cell()
        if isinstance(self.wanted, NextCell) and not self.over:
            self.wanted.give(None)
            self._go_on()
        assert self.over, "a strategy returns when there are no more cells"

    def _go_on(self) -> None:
        stop = False
        while not self.over:
            try:
                wanted = self.coroutine.throw(Stop()) if stop else self.coroutine.send(None)
            except (StopIteration, Stop):
                self.over = True
                return
            if isinstance(wanted, NextCell) and not self.rounds and not self.ending:
                wanted.give(Cell((SOME_BATCH,) * self.steps_per_cell))
                stop = False
            elif isinstance(wanted, NextGradient | NextCell):
                self.wanted = wanted
                return
            else:
                stop = not wait_for(wanted, self.worker.client, self.wait, may_stop=not stop)
