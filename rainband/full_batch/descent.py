r"""What full-batch methods share: the loss with its decay, the search along a direction, and when to stop.

    f(w) = mean over the samples of the batch of  loss(w)  +  weight_decay / 2 |w|^2

Everything with as many elements as the model stays on the servers; here are only names and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from rainband.errors import Stop
from rainband.full_batch.line_search import Search, Trial
from rainband.protocol.vectors import GRADIENT, PARAMS, Operation, axpy, copy, dot, norm, scale
from rainband.strategy import Requirements, Strategy

if TYPE_CHECKING:
    from rainband.strategy import CoordinatorApi, Evaluation, Gradient, Worker

START = "start"  # the parameters where the iteration began


class SearchPoint(NamedTuple):
    """Where the search is: the loss and the length of its gradient, which is in the vector `gradient`."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class FullBatch(Strategy):
    """What can be set of every full-batch method."""

    iterations: int = 100  # at most
    c1: float = 1e-4  # how much the loss must go down
    c2: float = 0.9  # how much of the slope may be left
    first_step: float = 1.0  # length of the first trial, where nothing is known of the curvature
    weight_decay: float = 0.0
    gradient_tolerance: float = 1e-5  # stop when the gradient's norm is so small
    loss_tolerance: float = 1e-7  # stop when the loss changes by no more than this part of itself
    n_push: int = 4  # portions of the data, each one batch, that are summed into one push

    def __post_init__(self) -> None:
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.iterations < 1 or self.first_step <= 0:
            raise ValueError(f"iterations={self.iterations}, first_step={self.first_step}: both must be positive.")
        if not 0 < self.c1 < self.c2 < 1:
            raise ValueError(f"c1={self.c1}, c2={self.c2}: a line search needs 0 < c1 < c2 < 1, such as 1e-4 and 0.9.")
        if min(self.weight_decay, self.gradient_tolerance, self.loss_tolerance) < 0:
            raise ValueError("weight_decay and both tolerances must be at least 0.")

    @property
    def requires(self) -> Requirements:
        return Requirements(
            optimizer="commands",
            batches_per_item=self.n_push,
            coordinated=True,
            whole_model=True,
            custom_loop=False,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.iterations, self.gradient_tolerance, self.loss_tolerance)


async def deliver_items(worker: Worker) -> None:
    """The workers' half of every full-batch method: sum each cell's gradients, and push the sum once."""
    async for work_item in worker.work_items():
        if not await worker.servers.pull(round=work_item.round):  # once in an evaluation
            continue  # which is over
        owed: Gradient | None = None
        for batch in work_item.batches:
            if not await worker.still_needed(work_item):
                break
            gradient = await worker.gradient(batch)
            times = gradient.samples
            owed = gradient * times if owed is None else owed.plus(gradient, times)
        else:
            assert owed is not None, "a cell has at least one batch"
            worker.servers.push(owed)


@dataclass(frozen=True)
class Limits:
    """When to stop."""

    iterations: int
    gradient_tolerance: float
    loss_tolerance: float

    def reached(self, iteration: int, before: float, now: SearchPoint) -> str:
        """Why this iteration is the last; "" if it is not."""
        if not math.isfinite(now.loss):
            return "the loss is not finite"
        if now.gradient_norm <= self.gradient_tolerance:
            return f"the gradient norm is at most {self.gradient_tolerance:g}"
        if iteration and before - now.loss <= self.loss_tolerance * max(abs(before), abs(now.loss)):
            return f"the loss changed by at most {self.loss_tolerance:g} of itself"
        if iteration >= self.iterations:
            return f"{self.iterations} iterations are done"
        return ""


@dataclass(frozen=True)
class Sampling:
    """Which cells make the batch of an iteration: all, or a part of them that keeps a part of the one before."""

    part: float
    overlap: float

    @property
    def is_whole(self) -> bool:
        return self.part >= 1.0

    def draw(self, iteration: int, seed: int, num_items: int, before: tuple[int, ...]) -> tuple[int, ...]:
        wanted = max(1, round(self.part * num_items))
        if wanted >= num_items:
            return tuple(range(num_items))
        random = Random(f"batch {seed} {iteration}")
        kept = random.sample(before, min(len(before), round(self.overlap * wanted)))
        others = sorted(set(range(num_items)) - set(kept))
        return tuple(sorted(kept + random.sample(others, min(len(others), wanted - len(kept)))))


class Descent:
    """The loss along the way, as the servers and workers find it."""

    def __init__(self, coordinator: CoordinatorApi, weight_decay: float) -> None:
        self.coordinator = coordinator
        self.weight_decay = weight_decay
        self.work_items: tuple[int, ...] = ()  # the batch at hand

    async def evaluate(self, *first: Operation) -> SearchPoint:
        """Do some operations, then find the loss and the mean gradient at the parameters."""
        loss, gradient_norm, _ = await self._found(self.coordinator.evaluate(*first, work_items=self.work_items))
        return SearchPoint(loss, gradient_norm)

    async def _found(
        self, evaluating: Awaitable[Evaluation], *then: Operation
    ) -> tuple[float, float, tuple[float, ...]]:
        """What comes of an evaluation: the loss, the gradient's norm, and what is asked for besides."""
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
        """Follow a line search along a direction, from `start`; afterwards parameters and gradient are those it chose.

        `setup` makes the vector `start`, if it is not there yet: with the first trial, in one command. If the run is
        stopped meanwhile, the parameters are again those of the start: an iteration is done or it is not.
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
                    assert chosen.step == trial.step, "a search ends where it looked last"
                    return chosen, SearchPoint(loss, length)
        except Stop:
            if has_start:
                await self.coordinator.compute(copy(PARAMS, START))
            raise
