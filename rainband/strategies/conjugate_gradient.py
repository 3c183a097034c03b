r"""Nonlinear conjugate gradient: full-batch, four vectors beside the parameters, no history (Polak & Ribiere 1969).

Each iteration searches along the negative gradient g, combined with the previous direction:

    beta = max(0, g.(g - g_before) / g_before.g_before)          0 restarts
    d    = -g + beta d
    w   <- w + t d                                               t by a strong Wolfe line search with a small c2

The vectors stay on the servers. The loss is evaluated as by sandblaster: workers request work items, and each item
counts once.

Use when a model is so large that the curvature pairs of sandblaster do not fit. Avoid otherwise: sandblaster needs
fewer evaluations of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband.coordinator_api import CoordinatorApi
from rainband.full_batch.descent import NO_LOWER_LOSS, START, Descent, FullBatch, SearchPoint, deliver_items
from rainband.full_batch.line_search import Trial, strong_wolfe
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.optimizer_spec import element_wise
from rainband.protocol.vectors import GRADIENT, PARAMS, axpy, copy, dot, drop, norm, scale
from rainband.rules import SumGradients
from rainband.strategy import ServerPart, Worker

DIRECTION, BEFORE = "direction", "before"  # BEFORE: the gradient of the previous iteration


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(FullBatch):
    """Polak-Ribiere conjugate gradient over all the data."""

    iterations: int = 200  # maximum number of iterations
    c2: float = 0.1  # curvature condition: the slope must shrink to at most c2 times its initial size

    async def run(self, worker: Worker) -> None:
        await deliver_items(worker)

    def server(self, num_replicas: int) -> ServerPart:
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
        coordinator.report(0, here.loss, here.gradient_norm, 0.0, end)
        while not end:
            iteration += 1
            chosen, there = await self._search(descent, here, slope, step)
            moved = there.loss < here.loss and chosen.step > 0
            end = limits.reached(iteration, here.loss, there) if moved else None
            if not moved and restarted:
                end = NO_LOWER_LOSS
            before, here = slope, there
            if not end:
                slope, restarted = await self._turn(coordinator, restart=not moved)
                step = chosen.step * before / slope if moved else self.first_step / here.gradient_norm
            coordinator.report(iteration, here.loss, here.gradient_norm, chosen.step, end)

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

    async def _turn(self, coordinator: CoordinatorApi, restart: bool) -> tuple[float, bool]:
        """Make the next direction; return the slope along it, and whether it is the negative gradient alone."""
        gg, gb, bb = await coordinator.compute(dot(GRADIENT, GRADIENT), dot(GRADIENT, BEFORE), dot(BEFORE, BEFORE))
        beta = 0.0 if restart or not bb else max(0.0, (gg - gb) / bb)
        turned = scale(DIRECTION, beta), axpy(DIRECTION, -1.0, GRADIENT)
        (slope,) = await coordinator.compute(*turned, dot(GRADIENT, DIRECTION))
        if slope < 0:
            return slope, beta == 0.0
        down = copy(DIRECTION, GRADIENT), scale(DIRECTION, -1.0)  # the combined direction would go up
        (slope,) = await coordinator.compute(*down, dot(GRADIENT, DIRECTION))
        return slope, True
