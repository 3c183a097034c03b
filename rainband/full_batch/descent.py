r"""Shared parts of full-batch methods: the loss with weight decay, the search along a direction, stopping criteria.

    f(w) = mean over the samples of  loss(w)  +  weight_decay / 2 |w|^2

Vectors with as many elements as the model stay on the servers; only their names and numbers appear here.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from rainband.coordinator_api import End
from rainband.errors import Stop
from rainband.full_batch.line_search import Search, Trial
from rainband.protocol.events import EndCause
from rainband.protocol.vectors import GRADIENT, PARAMS, Operation, axpy, copy, dot, norm, scale
from rainband.strategy import Requirements, Strategy

if TYPE_CHECKING:
    from rainband.coordinator_api import CoordinatorApi, Evaluation
    from rainband.strategy import Gradient, Worker

NO_LOWER_LOSS = End(EndCause.NO_LOWER_LOSS, "no lower loss was found along the negative gradient")
START = "start"  # the parameters where the iteration began


class SearchPoint(NamedTuple):
    """The loss at the current parameters and the norm of its gradient, which is in the vector `gradient`."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class FullBatch(Strategy):
    """The settings of every full-batch method."""

    iterations: int = 100  # maximum number of iterations
    c1: float = 1e-4  # sufficient decrease: the loss must fall by at least c1 x step x slope
    c2: float = 0.9  # curvature condition: the slope must shrink to at most c2 times its initial size
    first_step: float = 1.0  # length of the first trial step, before any curvature is known
    weight_decay: float = 0.0  # adds weight_decay / 2 |w|^2 to the loss
    gradient_tolerance: float = 1e-5  # stop when the norm of the gradient is at most this
    loss_tolerance: float = 1e-7  # stop when the loss changes by at most this fraction of itself
    n_push: int = 4  # batches of one work item, whose gradients are summed into one push

    def __post_init__(self) -> None:
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.iterations < 1 or self.first_step <= 0:
            raise ValueError(
                f"iterations={self.iterations} first_step={self.first_step}: choose 1 iteration or more, and a first "
                "step above 0, such as iterations=30 first_step=1."
            )
        if not 0 < self.c1 < self.c2 < 1:
            raise ValueError(f"c1={self.c1}, c2={self.c2}: choose 0 < c1 < c2 < 1, such as 1e-4 and 0.9.")
        if min(self.weight_decay, self.gradient_tolerance, self.loss_tolerance) < 0:
            raise ValueError(
                f"weight_decay={self.weight_decay} gradient_tolerance={self.gradient_tolerance} "
                f"loss_tolerance={self.loss_tolerance}: choose 0 or more for each."
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(optimizer="commands", batches_per_item=self.n_push, coordinated=True, custom_loop=False)

    @property
    def limits(self) -> Limits:
        return Limits(self.iterations, self.gradient_tolerance, self.loss_tolerance)


async def deliver_items(worker: Worker) -> None:
    """Run the worker part of every full-batch method: sum the gradients of each work item, and push the sum once."""
    async for work_item in worker.work_items():
        if not await worker.servers.pull(round=work_item.round):  # copied once in an evaluation
            continue  # that evaluation is over
        total: Gradient | None = None
        for batch in work_item.batches:
            if not await worker.still_needed(work_item):
                break
            gradient = await worker.gradient(batch)
            times = gradient.samples
            total = gradient * times if total is None else total.plus(gradient, times)
        else:
            assert total is not None, "a work item has at least one batch"
            worker.servers.push(total)


@dataclass(frozen=True)
class Limits:
    """The stopping criteria."""

    iterations: int
    gradient_tolerance: float
    loss_tolerance: float

    def reached(self, iteration: int, before: float, now: SearchPoint) -> End | None:
        """Return why this iteration is the last; None if it is not."""
        if not math.isfinite(now.loss):
            return End(EndCause.NOT_FINITE, "the loss is not finite")
        if now.gradient_norm <= self.gradient_tolerance:
            return End(EndCause.CONVERGED, f"the gradient norm is at most {self.gradient_tolerance:g}")
        if iteration and before - now.loss <= self.loss_tolerance * max(abs(before), abs(now.loss)):
            text = f"the loss changed by at most a fraction of {self.loss_tolerance:g}"
            return End(EndCause.CONVERGED, text)
        if iteration >= self.iterations:
            return End(EndCause.OUT_OF_ITERATIONS, f"{self.iterations} iterations are done")
        return None


@dataclass(frozen=True)
class Sampling:
    """The work items used by an iteration: all of them, or a fraction that keeps some of the previous iteration's."""

    fraction: float
    overlap: float

    @property
    def is_whole(self) -> bool:
        return self.fraction >= 1.0

    def draw(self, iteration: int, seed: int, num_items: int, before: tuple[int, ...]) -> tuple[int, ...]:
        wanted = max(1, round(self.fraction * num_items))
        if wanted >= num_items:
            return tuple(range(num_items))
        random = Random(f"batch {seed} {iteration}")
        kept = random.sample(before, min(len(before), round(self.overlap * wanted)))
        others = sorted(set(range(num_items)) - set(kept))
        return tuple(sorted(kept + random.sample(others, min(len(others), wanted - len(kept)))))


class Descent:
    """Evaluates the loss and searches along directions, by commands to the servers."""

    def __init__(self, coordinator: CoordinatorApi, weight_decay: float) -> None:
        self.coordinator = coordinator
        self.weight_decay = weight_decay
        self.work_items: tuple[int, ...] = ()  # used by the current iteration

    async def evaluate(self, *first: Operation) -> SearchPoint:
        """Do some operations, then evaluate the loss and the mean gradient at the parameters."""
        loss, gradient_norm, _ = await self._found(self.coordinator.evaluate(*first, work_items=self.work_items))
        return SearchPoint(loss, gradient_norm)

    async def _found(
        self, evaluating: Awaitable[Evaluation], *then: Operation
    ) -> tuple[float, float, tuple[float, ...]]:
        """Return the loss of an evaluation, the norm of its gradient, and the results of `then`."""
        found = await evaluating
        mean = scale(GRADIENT, 1.0 / max(1, found.samples))
        if not self.weight_decay:
            length, *others = await self.coordinator.compute(mean, norm(GRADIENT), *then)
            return found.loss, length, tuple(others)
        decayed = mean, axpy(GRADIENT, self.weight_decay, PARAMS), dot(PARAMS, PARAMS)
        square, length, *others = await self.coordinator.compute(*decayed, norm(GRADIENT), *then)
        return found.loss + 0.5 * self.weight_decay * square, length, tuple(others)

    async def search(
        self, direction: str, begin: Callable[[], Search], setup: tuple[Operation, ...] = ()
    ) -> tuple[Trial, SearchPoint]:
        """Run a line search along a direction, from `start`; parameters and gradient are then those at the chosen step.

        `setup` creates the vector `start`, if it does not exist yet, in the same command as the first trial. If the run
        is stopped meanwhile, the parameters return to the start: an iteration is complete or has no effect.
        """
        search = begin()
        step = next(search)
        has_start = not setup
        try:
            while True:
                moved = *setup, copy(PARAMS, START), axpy(PARAMS, step, direction)
                evaluating = self.coordinator.evaluate(*moved, work_items=self.work_items)
                setup, has_start = (), True
                loss, length, (slope,) = await self._found(evaluating, dot(GRADIENT, direction))
                trial = Trial(step, loss if math.isfinite(loss) else math.inf, slope)
                try:
                    step = search.send(trial)
                except StopIteration as done:
                    chosen: Trial = done.value
                    assert chosen.step == trial.step, "a search returns its last trial"
                    return chosen, SearchPoint(loss, length)
        except Stop:
            if has_start:
                await self.coordinator.compute(copy(PARAMS, START))
            raise
