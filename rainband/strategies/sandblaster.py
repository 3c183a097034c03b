r"""Sandblaster L-BFGS: full-batch quasi-Newton optimization whose vectors never leave the servers (Dean et al. 2012).

The coordinator holds no parameters. In each iteration it computes a direction from the gradient g and the last m pairs
s_i = w_{i+1} - w_i, y_i = g_{i+1} - g_i, kept on the servers, by the two-loop recursion (Nocedal 1980):

    d = -g
    newest to oldest:    a_i = s_i.d / y_i.s_i          d = d - a_i y_i
    d = d * (s.y / y.y  of the newest pair)
    oldest to newest:    b_i = y_i.d / y_i.s_i          d = d + (a_i - b_i) s_i

then searches for a step t along it, each trial one evaluation of the loss over the data, and takes it:

    w <- w + t d          t by a strong Wolfe or an Armijo line search

A pair is used only if the curvature y.s is positive beyond rounding. An evaluation is the sum over work items (n_push
batches each), which workers request and deliver once; near its end idle workers compute copies of overdue items.

Departures from the paper, which leaves history and line search open: m pairs take at most 2m + 4 vectors, so the oldest
pair is dropped when a search begins; and the products s_i.y_j are kept, so that the recursion takes three commands for
any m. With data_fraction < 1 an iteration uses only a part of the data, and both gradients of a pair are over the same
part; the next part keeps `overlap_fraction` of it.

Use for small and medium-sized models that must be fitted well: physics, potentials, regression. Avoid when the data is
so large that one pass over it costs as much as a thousand steps of downpour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from rainband.coordinator_api import CoordinatorApi
from rainband.full_batch.descent import NO_LOWER_LOSS, START, Descent, FullBatch, Sampling, SearchPoint, deliver_items
from rainband.full_batch.line_search import Search, Trial, armijo, strong_wolfe
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.optimizer_spec import element_wise
from rainband.protocol.vectors import GRADIENT, PARAMS, axpy, copy, dot, drop, norm, scale
from rainband.rules import SumGradients
from rainband.strategy import ServerPart, Worker

ROUNDING = 2.3e-16  # curvature below this fraction of y.y is noise


class CurvaturePair(NamedTuple):
    """One pair of the history: the names of its vectors, and their products."""

    s: str
    y: str
    ys: float
    yy: float


@dataclass
class History:
    """The last pairs, oldest first, and s.y of every older s with every newer y, which saves dot products."""

    pairs: list[CurvaturePair] = field(default_factory=list)
    products: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sandblaster(FullBatch):
    """L-BFGS over all the data."""

    history: int = 10  # m, the number of pairs kept
    line_search: Literal["strong_wolfe", "armijo"] = "strong_wolfe"
    data_fraction: float = 1.0  # fraction of the data used by an iteration
    overlap_fraction: float = 0.5  # with data_fraction below 1: fraction of it that the next iteration uses again

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise ValueError(f"history={self.history}: choose at least 1.")
        if not 0 < self.data_fraction <= 1 or not 0 <= self.overlap_fraction <= 1:
            raise ValueError(
                f"data_fraction={self.data_fraction}, overlap_fraction={self.overlap_fraction}: both must be from 0 to "
                "1, and data_fraction above 0."
            )

    async def run(self, worker: Worker) -> None:
        await deliver_items(worker)

    def server(self, num_replicas: int) -> ServerPart:
        return ServerPart(SumGradients, element_wise("sgd", 1.0), Schedule(), vectors=2 * self.history + 3)

    async def coordinate(self, coordinator: CoordinatorApi) -> None:
        descent = Descent(coordinator, self.weight_decay)
        limits = self.limits
        sampling = Sampling(self.data_fraction, self.overlap_fraction)
        descent.work_items = sampling.draw(0, coordinator.seed, coordinator.num_items, ())
        here = await descent.evaluate()
        history = History()
        iteration, end = 0, limits.reached(0, float("inf"), here)
        coordinator.report(0, here.loss, here.gradient_norm, 0.0, end)
        while not end:
            iteration += 1
            before, had_history = here.loss, bool(history.pairs)
            step, here = await self._iterate(descent, here, history)
            if step:
                end = limits.reached(iteration, before, here)
            elif had_history:  # the history misleads: drop it, and use the negative gradient
                await coordinator.compute(*(drop(name) for pair in history.pairs for name in (pair.s, pair.y)))
                history = History()
            else:
                end = NO_LOWER_LOSS
            if not end and not sampling.is_whole:
                descent.work_items = sampling.draw(
                    iteration, coordinator.seed, coordinator.num_items, descent.work_items
                )
                here = await descent.evaluate()
            coordinator.report(iteration, here.loss, here.gradient_norm, step, end)

    async def _iterate(self, descent: Descent, here: SearchPoint, history: History) -> tuple[float, SearchPoint]:
        """Make one direction, one search and one new pair; return the step taken, and the point it led to."""
        compute, pairs = descent.coordinator.compute, history.pairs
        used = {pair.s for pair in pairs}
        slot = next(n for n in range(self.history + 1) if f"s{n}" not in used)
        s, y = f"s{slot}", f"y{slot}"  # until they are a pair: the direction, and the previous gradient
        slope, length = await self._direction(descent.coordinator, s, history)
        if slope >= 0:  # not a descent direction: the history has more rounding than curvature
            await compute(drop(s))
            return 0.0, here
        first = 1.0 if pairs else min(1.0, self.first_step / here.gradient_norm)
        oldest = [pairs.pop(0)] if len(pairs) == self.history else []  # makes room for the vectors of the search
        dropped = (drop(name) for pair in oldest for name in (pair.s, pair.y))
        setup = *dropped, copy(START, PARAMS), copy(y, GRADIENT)
        start = Trial(0.0, here.loss, slope)
        chosen, there = await descent.search(s, partial(self._search, start, first, length), setup)
        made = drop(START), scale(s, chosen.step), scale(y, -1.0), axpy(y, 1.0, GRADIENT)
        ys, yy, *sy = await compute(*made, dot(y, s), dot(y, y), *(dot(pair.s, y) for pair in pairs))
        if chosen.step and ys > ROUNDING * yy:
            history.products.update({(pair.s, y): product for pair, product in zip(pairs, sy, strict=True)})
            pairs.append(CurvaturePair(s, y, ys, yy))
        else:
            await compute(drop(s), drop(y))
        return chosen.step, there

    async def _direction(self, coordinator: CoordinatorApi, d: str, history: History) -> tuple[float, float]:
        """The two-loop recursion, in three commands; returns the slope along the direction, and its length."""
        pairs, products = history.pairs, history.products
        sg = await coordinator.compute(*(dot(pair.s, GRADIENT) for pair in pairs)) if pairs else ()
        a = [0.0] * len(pairs)
        for i, pair in reversed(list(enumerate(pairs))):
            sd = -sg[i] - sum(a[j] * products[pair.s, pairs[j].y] for j in range(i + 1, len(pairs)))
            a[i] = sd / pair.ys
        todo = [copy(d, GRADIENT), scale(d, -1.0)]
        todo += [axpy(d, -a_i, pair.y) for a_i, pair in reversed(list(zip(a, pairs, strict=True)))]
        yd: tuple[float, ...] = ()
        if pairs:
            todo.append(scale(d, pairs[-1].ys / pairs[-1].yy))
            yd = await coordinator.compute(*todo, *(dot(pair.y, d) for pair in pairs))
            todo = []
        c = [0.0] * len(pairs)
        for i, pair in enumerate(pairs):
            c[i] = a[i] - (yd[i] + sum(c[j] * products[pairs[j].s, pair.y] for j in range(i))) / pair.ys
            todo.append(axpy(d, c[i], pair.s))
        slope, length = await coordinator.compute(*todo, dot(GRADIENT, d), norm(d))
        return slope, length

    def _search(self, start: Trial, first: float, length: float) -> Search:
        if self.line_search == "armijo":
            return armijo(start, first, self.c1)
        return strong_wolfe(start, first, self.c1, self.c2, length)
