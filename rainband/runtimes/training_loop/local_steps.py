"""A custom training loop whose workers train models of their own, which the strategy averages between steps.

    with rainband.join(model, optimizer) as run:
        for epoch in run.epochs(10):
            for x, y in run.batches(dataset, batch_size=64):    the batches that the strategy gives this worker
                ...                                              the user's zero_grad, forward, backward, step

The user's optimizer steps on this worker's model. When a round ends with a step, that step returns when the strategy
has averaged the models. After the `with` block, all workers have the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rainband.model.gradient import Gradient
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.messages import Conclude
from rainband.rounds.encoded import EncodedExchange
from rainband.runtimes.training_loop.batches import Indices, LoopBatches
from rainband.runtimes.training_loop.coroutine import LoopParameters, LoopWorker, NextWorkItem, UsersOptimizer
from rainband.runtimes.training_loop.loop import LoopModel, TrainingLoop
from rainband.runtimes.training_loop.loop_state import LocalLoopState
from rainband.runtimes.training_loop.users_turn import LoopEnd
from rainband.strategy import Batch, Strategy, WorkItem
from rainband.transports.shared_rounds import SharedBoard
from rainband.worker.model_rounds import ModelRounds
from rainband.worker.sampler import Sampler
from rainband.worker.shared_batches import batch_at, examples
from rainband.worker.worker import state_vectors

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from rainband.model.flat_parameters import Flat
    from rainband.protocol.data_plan import DataPlan
    from rainband.protocol.lr_schedules import Schedule
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.rounds.board import Board
    from rainband.worker.client import Client
    from rainband.worker.worker_model import Buffers


# size: ModelRounds has all but two of its attributes
class LoopModels(ModelRounds):
    """The rounds of a worker whose user may begin late, and end early."""

    worker: LocalStepsWorker

    def __init__(self, worker: LocalStepsWorker, board: Board, clock: Callable[[], float]) -> None:
        super().__init__(worker, board, clock)
        self.has_begun = False

    async def begin(self) -> bool:
        if not self.has_begun:  # the data is known at the first batch
            self.has_begun = await NextWorkItem() is not None
        if self.worker.ending:
            await self.leave()
            return False
        return await super().begin()

    def _each(self, numbers: Sequence[int]) -> Iterator[Batch]:
        for batch in super()._each(numbers):
            if self.worker.ending:
                return
            yield batch

    @property
    def _is_stopping(self) -> bool:
        return self.worker.ending or super()._is_stopping


class LocalStepsWorker(LoopWorker):
    """The worker that a strategy gets when a custom loop trains a model of its own."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        client: Client,
        params: LoopParameters,
        step_now: Callable[[Sequence[Tensor | None]], None],
        strategy: Strategy,
        optimizers: Sequence[Optimizer],
        state: LocalLoopState,
    ) -> None:
        super().__init__(rank, num_workers, client, params, step_now, strategy)
        self.state = state
        self.accounting = None  # the workers count together
        self.optimizers = optimizers
        self.local_optimizer = UsersOptimizers(self)
        self.skips = ""  # the reason for which the loop leaves out the current batch
        self.model_rounds: LoopModels | None = None

    @property
    def models(self) -> LoopModels:
        assert self.model_rounds is not None, "rounds are entered before training"
        return self.model_rounds

    @property
    def flat(self) -> Flat:
        return self.client.flat

    @property
    def module(self) -> nn.Module:
        return self.client.flat.module

    @property
    def plan(self) -> DataPlan:
        return self.client.plan

    def at_boundary(self) -> bool:
        """Note that a round begins, for checkpoints. Return True."""
        self.state.begin_round()
        return True

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule, counts: bool = True) -> UsersOptimizers:
        return self.local_optimizer


class UsersOptimizers(UsersOptimizer):
    """The user's optimizers, and their state, which workers that join receive."""

    worker: LocalStepsWorker

    def step(self, gradient: Gradient) -> None:
        if not gradient.batches:
            return
        skips = self.worker.skips or ("" if gradient.is_finite else NOT_FINITE)
        if not skips:
            self.worker.step_now(gradient.tensors)
        self.worker.models.processed(gradient, skips)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.worker.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, optimizer in enumerate(self.worker.optimizers):
            optimizer.load_state_dict(state[str(number)])

    def state_vectors(self) -> list[list[Tensor | None]]:
        return state_vectors(self.worker.optimizers, self.worker.flat.parameters)


class LocalBatches(LoopBatches):
    """The batches of each round that the strategy gives this worker, in order."""

    def __init__(self, loop: LocalStepsLoop) -> None:
        super().__init__(loop.client, lambda timeout_s: loop.member.wait(timeout_s), lambda: False)
        self.loop = loop

    def put_back(self) -> None:
        """Forget what was fetched: it is the same that is fetched next."""
        self.ahead.clear()

    def _is_leased(self, batch: Batch) -> bool:
        return True

    def _next(self, may_wait: bool) -> Batch | None:
        self.wait(0)  # handle messages that have arrived
        coroutine = self.loop.coroutine
        if isinstance(coroutine.needed, NextWorkItem):
            coroutine.begin(WorkItem(()))
        if coroutine.over or isinstance(coroutine.needed, LoopEnd) or self.client.stopping:
            self.pass_is_over = True
            return None
        rounds, begun = coroutine.worker.models, len(self.ahead) + len(self.unstepped)
        assert isinstance(rounds, LoopModels)
        numbers = rounds.round.assigned[rounds.member.rank][rounds.round.tried + begun :]
        if not numbers:
            return None  # the next round begins with the step that ends this one
        batch = batch_at(self.client.plan, numbers[0])
        if self.client.plan.epoch_of(batch.portion) >= self.passes:
            self.pass_is_over = not begun
            return None
        return batch

    def __iter__(self) -> Iterator[Indices]:
        sampler = Sampler(self.client.plan)
        while (batch := self._next(may_wait=not self.ahead)) is not None:
            self.ahead.append(batch)
            yield sampler.indices(batch).tolist()


# size: TrainingLoop has all but one of its attributes
class LocalStepsLoop(TrainingLoop):
    """The training loop of one worker that trains a model of its own: the `run` of `with rainband.join(...) as run`."""

    logged: float | None = None  # the loss, since the last step
    state: LocalLoopState

    def _make_state(self) -> LocalLoopState:
        # Its rounds have the optimizers' state.
        return LocalLoopState(self.model, self.flat, self.optimizers, True, self.member.save_state, self.rank)

    def _make_model(self) -> LocalStepsModel:
        return LocalStepsModel(self)

    def _make_batches(self) -> LocalBatches:
        return LocalBatches(self)

    def _plan(self, dataset: Any, batch_size: int, arguments: dict[str, Any]) -> None:
        if not self.num_epochs:
            raise ValueError(f"{self._name} needs the number of epochs: write `for epoch in run.epochs(10):`.")
        super()._plan(dataset, batch_size, arguments)

    def _gradient(self, optimizer: Optimizer, unscale: float, batches: tuple[Batch, ...]) -> Gradient:
        gradient = super()._gradient(optimizer, unscale, batches)
        if self.logged is None and self.strategy.requires.needs_loss:
            raise ValueError(
                f"{self._name} follows the loss: call run.log(loss=loss) before each optimizer.step(), on every worker."
            )
        gradient.loss, self.logged = self.logged or 0.0, None
        return gradient

    def log(self, *, loss: float | Tensor | None = None, **metrics: float) -> None:
        """Report the loss of the current batch, or metrics, for progress views; a strategy may follow the loss."""
        super().log(loss=loss, **metrics)
        if loss is not None:
            self.logged = loss.item() if isinstance(loss, Tensor) else float(loss)

    def _skip(self, batches: tuple[Batch, ...], reason: str) -> None:
        worker, plan = self.coroutine.worker, self.client.plan
        assert isinstance(worker, LocalStepsWorker)
        samples = sum(plan.samples_in(batch.portion, batch.k) for batch in batches)
        worker.skips = reason
        self.coroutine.step(Gradient([None] * len(self.flat.parameters), batches, samples, 0.0))
        worker.skips = ""

    def _begin(self, batch: Batch) -> bool:
        return True  # the strategy waits for its gradient

    def _await_round(self, batches: tuple[Batch, ...]) -> None:
        """Return at once: the strategy has waited where it averages."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Raise ValueError: the others wait for this worker's model."""
        self._refuse("run.paused(): the other workers wait for this one at each mean")
        yield


class LocalStepsModel(LoopModel):
    """The user's module and optimizers, as the model of a worker that meets others in rounds."""

    loop: LocalStepsLoop

    def worker(self, index: int, client: Client) -> LocalStepsWorker:
        loop = self.loop
        params = LoopParameters(client, lambda: [settings["lr"] for settings in loop.settings])
        worker = LocalStepsWorker(
            index, loop.num_workers, client, params, loop._step_now, loop.strategy, loop.optimizers, loop.state
        )
        board = SharedBoard(loop.member.round_files, index, examples(worker))
        rounds = worker.model_rounds = loop.state.rounds = LoopModels(worker, board, time.monotonic)
        if (codec := loop.member.session.codec) is not None:
            rounds.member.encoded = EncodedExchange(codec, len(worker.flat.parameters))
        loop.begin_checkpoints()
        return worker

    async def ended(self, worker: LoopWorker) -> None:
        assert isinstance(worker, LocalStepsWorker)
        await worker.models.leave()
        await super().ended(worker)

    def return_leases(self, worker: LoopWorker) -> None:
        assert isinstance(worker, LocalStepsWorker)
        super().return_leases(worker)
        worker.models.tell()

    async def conclude(self, worker: LoopWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float]:
        assert isinstance(worker, LocalStepsWorker)
        if worker.ending:  # it may have left before others, which have trained on
            await worker.models.through(worker.models.member.take_final())
        return await super().conclude(worker, conclude, buffers)
