"""Delayed gradient descent on a quadratic is stable exactly up to a limit: both sides of it, with a server's own block.

    x_{t+1} = x_t - a * h * x_{t-d}         is stable if and only if  a * h < 2 sin(pi / (4 d + 2))

which is 2, 1, 0.618, 0.285, 0.101 for a delay of d = 0, 1, 2, 5, 15 updates: about pi / (2 d), hence learning rates
that are divided by the staleness.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.rules import ApplyEvery
from tests.builders import make_block, make_plan, make_push, make_server_part, named

DELAYS = (0, 1, 2, 5, 15)


def limit(delay: int) -> float:
    return 2 * math.sin(math.pi / (4 * delay + 2))


def descend(rate: float, delay: int, steps: int, by_staleness: bool = False) -> list[float]:
    """The sizes of x from step to step, where every gradient is of the parameters `delay` versions ago."""
    half = make_server_part(lambda: ApplyEvery(1, by_staleness), optimizer=OptimizerSpec("sgd", {"lr": rate}))
    block = make_block(make_plan(), half, dtype="float64")
    block.values.fill_(1.0)
    past = deque([block.values.clone()] * (delay + 1), maxlen=delay + 1)
    sizes = []
    for _ in range(steps):
        push = make_push(named(0, 0), version=block.version - delay)
        block.rule.absorb(block, push, past[0])  # the gradient of x * x / 2 is x
        past.append(block.values.clone())
        sizes.append(block.values[0].abs().item())
    return sizes


def growth(sizes: list[float]) -> float:
    """Return the ratio of the swings in the last tenth to those in the second."""
    tenth = len(sizes) // 10
    return max(sizes[-tenth:]) / max(sizes[tenth : 2 * tenth])


@pytest.mark.parametrize("delay", DELAYS)
def test_two_percent_below_the_limit_it_converges_and_two_percent_above_it_diverges(delay: int) -> None:
    steps = 400 * (delay + 1)
    assert growth(descend(0.98 * limit(delay), delay, steps)) < 0.5
    assert growth(descend(1.02 * limit(delay), delay, steps)) > 2.0


@pytest.mark.parametrize("delay", DELAYS)
def test_at_the_limit_the_largest_root_has_size_one(delay: int) -> None:
    """The recurrence's companion matrix: to nine digits, and on each side of it."""

    def radius(rate: float) -> float:
        matrix = np.diag(np.ones(delay), -1)
        matrix[0, 0] = 1.0
        matrix[0, delay] -= rate
        return float(np.abs(np.linalg.eigvals(matrix)).max())

    assert radius(limit(delay)) == pytest.approx(1.0, abs=1e-9)
    assert radius(limit(delay) * (1 - 1e-6)) < 1 < radius(limit(delay) * (1 + 1e-6))


@pytest.mark.parametrize("delay", [2, 5, 15])
def test_divided_by_the_staleness_what_diverges_converges(delay: int) -> None:
    """At half the rate that one process bears, far above the limit of a delayed one."""
    assert limit(delay) < 1.0 and 1.0 / delay < limit(delay)
    assert growth(descend(1.0, delay, 40 * (delay + 1))) > 10
    assert growth(descend(1.0, delay, 400 * (delay + 1), by_staleness=True)) < 0.01


def test_the_first_limits_are_those_of_the_table() -> None:
    assert [round(limit(delay), 3) for delay in (0, 1, 2, 5, 15, 30)] == [2.0, 1.0, 0.618, 0.285, 0.101, 0.051]
