r"""Non-linear conjugate gradient: full-batch, four vectors beside the parameters, no history (Polak & Ribiere 1969).

Each iteration goes down the gradient g, bent by the direction of the one before:

    beta = max(0, g.(g - g_before) / g_before.g_before)          0 begins anew
    d    = -g + beta d
    w   <- w + t d                                               t by a strong Wolfe line search with a small c2

The vectors stay on the servers and the loss is evaluated as by sandblaster: cells on demand, each counted once.

Use it where a model is so large that the pairs of sandblaster do not fit. Not otherwise: sandblaster needs fewer
evaluations of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband.full_batch.descent import START, Descent, FullBatch, SearchPoint, deliver_items
from rainband.full_batch.line_search import Trial, strong_wolfe
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.optimizer_spec import element_wise
from rainband.protocol.vectors import GRADIENT, PARAMS, axpy, copy, dot, drop, norm, scale
from rainband.rules import SumGradients
from rainband.strategy import CoordinatorApi, ServerPart, Worker

DIRECTION, BEFORE = "direction", "before"  # the latter is the gradient of the iteration before


@dataclass(frozen=True)
class ConjugateGradient(FullBatch):
    """Polak-Ribiere conjugate gradient over all the data, led by commands."""

    iterations: int = 200  # at most
    c2: float = 0.1  # how much of the slope may be left: directions are conjugate only after a good search

    async def run(self, worker: Worker) -> None:
        await deliver_items(worker)

    def server(self, num_workers: int) -> ServerPart:
        return ServerPart(SumGradients, element_wise("sgd", 1.0), Schedule(), vectors=4)

    async def coordinate(self, coordinator: CoordinatorApi) -> None:
        descent = Descent(coordinator, self.weight_decay)
        limits = self.limits
        descent.work_items = tuple(range(coordinator.num_items))
        here = await descent.evaluate()
        await coordinator.compute(copy(DIRECTION, GRADIENT), scale(DIRECTION, -1.0))
        step = min(1.0, self.first_step / here.gradient_norm) if here.gradient_norm else 1.0
        slope, restarted = -(here.gradient_norm**2), True
        iteration, end = 0, limits.reached(0, float("inf"), here)
        coordinator.note(0, here.loss, here.gradient_norm, 0.0, end)
        while not end:
            iteration += 1
            chosen, there = await self._search(descent, here, slope, step)
            moved = there.loss < here.loss and chosen.step > 0
            end = limits.reached(iteration, here.loss, there) if moved else ""
            if not moved and restarted:
                end = "no lower loss was found down the gradient"
            before, here = slope, there
            if not end:
                slope, restarted = await self._turn(coordinator, anew=not moved)
                step = chosen.step * before / slope if moved else self.first_step / here.gradient_norm
            coordinator.note(iteration, here.loss, here.gradient_norm, chosen.step, end)

    async def _search(
        self, descent: Descent, here: SearchPoint, slope: float, step: float
    ) -> tuple[Trial, SearchPoint]:
        start = Trial(0.0, here.loss, slope)
        compute = descent.coordinator.compute
        (length,) = await compute(copy(START, PARAMS), copy(BEFORE, GRADIENT), norm(DIRECTION))
        begin = partial(strong_wolfe, start, step, self.c1, self.c2, length)
        chosen = await descent.search(DIRECTION, begin)
        await compute(drop(START))
        return chosen

    async def _turn(self, coordinator: CoordinatorApi, anew: bool) -> tuple[float, bool]:
        """The next direction; returns the slope along it, and whether it is that of the gradient alone."""
        gg, gb, bb = await coordinator.compute(dot(GRADIENT, GRADIENT), dot(GRADIENT, BEFORE), dot(BEFORE, BEFORE))
        beta = 0.0 if anew or not bb else max(0.0, (gg - gb) / bb)
        turned = scale(DIRECTION, beta), axpy(DIRECTION, -1.0, GRADIENT)
        (slope,) = await coordinator.compute(*turned, dot(GRADIENT, DIRECTION))
        if slope < 0:
            return slope, beta == 0.0
        down = copy(DIRECTION, GRADIENT), scale(DIRECTION, -1.0)  # bent too far: it would go up
        (slope,) = await coordinator.compute(*down, dot(GRADIENT, DIRECTION))
        return slope, True
