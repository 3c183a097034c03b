"""Line searches on curves whose lowest points are known, and step for step beside torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lbfgs import _strong_wolfe  # type: ignore[attr-defined]

from rainband.full_batch.line_search import Search, Trial, armijo, cubic_minimum, strong_wolfe

Curve = Callable[[float], tuple[float, float]]  # step -> loss and slope


def follow(search: Search, curve: Curve) -> tuple[Trial, list[float]]:
    """Answer a search until it has chosen; returns what it chose, and where it looked."""
    looked = [next(search)]
    try:
        while True:
            looked.append(search.send(Trial(looked[-1], *curve(looked[-1]))))
    except StopIteration as done:
        return done.value, looked


def start_of(curve: Curve) -> Trial:
    return Trial(0.0, *curve(0.0))


def bowl(t: float) -> tuple[float, float]:
    """(t - 3)^2"""
    return (t - 3) ** 2, 2 * (t - 3)


# ---- by hand ----


def test_a_step_that_is_good_enough_is_taken_at_once() -> None:
    """At 3 the slope is gone; at 1 the loss fell from 9 to 4, and the slope from 6 to 4, less than 0.9 of it."""
    assert follow(strong_wolfe(start_of(bowl), 3.0), bowl)[1] == [3.0]
    assert follow(strong_wolfe(start_of(bowl), 1.0), bowl)[1] == [1.0]


def test_a_step_that_is_too_long_is_shortened_to_the_lowest_point_of_the_cubic() -> None:
    """Between 0 and 8 the cubic through a parabola is the parabola."""
    chosen, looked = follow(strong_wolfe(start_of(bowl), 8.0), bowl)
    assert looked == [8.0, 3.0] and chosen == (3.0, 0.0, 0.0)


def test_a_step_that_is_too_short_is_made_longer() -> None:
    """With c2 = 0.1 a step of 0.1 leaves too much slope. The lowest point of the cubic is 3, but 10 times is most."""
    _, looked = follow(strong_wolfe(start_of(bowl), 0.1, c2=0.1), bowl)
    assert looked == pytest.approx([0.1, 1.0, 3.0])


def test_a_second_step_that_is_higher_than_the_first_has_passed_the_lowest_point() -> None:
    """-1 at 1, where it still goes down, and only -0.5 at 2: the lowest point is between them, not behind 2."""

    def hill(t: float) -> tuple[float, float]:
        return {0.0: (0.0, -1.1), 1.0: (-1.0, -1.05)}.get(t, (-0.5, -0.1) if t > 1.0 else (-1.0, 0.0))

    search = strong_wolfe(start_of(hill), 1.0, c2=0.05)
    assert next(search) == 1.0
    second = search.send(Trial(1.0, *hill(1.0)))
    assert second > 1.0
    assert 1.0 < search.send(Trial(second, *hill(second))) < second


def test_backtracking_takes_the_lowest_point_of_the_parabola() -> None:
    """From 8, where the loss is 25 > 9: the parabola's lowest point is 3, between 0.8 and 4."""
    chosen, looked = follow(armijo(start_of(bowl), 8.0), bowl)
    assert looked == [8.0, 3.0] and chosen.step == 3.0


def test_backtracking_is_at_least_by_half_and_at_most_to_a_tenth() -> None:
    def wall(t: float) -> tuple[float, float]:
        return (-t if t < 0.5 else 1e9), -1.0

    assert follow(armijo(start_of(wall), 1.0), wall)[1] == [1.0, 0.1]
    assert follow(armijo(start_of(wall), 0.8), lambda t: (math.nan, 0.0) if t > 0.5 else (-t, -1.0))[1] == [0.8, 0.4]


def test_where_there_is_nothing_lower_it_ends_at_the_start_and_looks_there_last() -> None:
    def up(t: float) -> tuple[float, float]:
        return t, -1.0  # the slope lies

    for search in (armijo(start_of(up), 1.0), strong_wolfe(start_of(up), 1.0)):
        chosen, looked = follow(search, up)
        assert chosen.step == looked[-1] == 0.0 and len(looked) <= 28


def test_an_infinite_loss_is_a_step_too_long() -> None:
    def cliff(t: float) -> tuple[float, float]:
        return bowl(t) if t < 5 else (math.inf, math.nan)

    for search in (armijo(start_of(cliff), 64.0), strong_wolfe(start_of(cliff), 64.0)):
        chosen, _ = follow(search, cliff)
        assert 0 < chosen.step < 5 and chosen.loss < 9


@pytest.mark.parametrize(
    "one, other, at",
    [
        (Trial(0, 9, -6), Trial(8, 25, 10), 3.0),  # a parabola
        (Trial(8, 25, 10), Trial(0, 9, -6), 3.0),  # from the other side
        (Trial(0, 0, -3), Trial(2, 2, 9), 1.0),  # t^3 - 3 t
        (Trial(0, 0, -1), Trial(2, -2, -1), 1.0),  # a line has no lowest point: the middle
        (Trial(0, 0, -1), Trial(2, math.inf, 1), 1.0),
    ],
)
def test_the_lowest_point_of_a_cubic(one: Trial, other: Trial, at: float) -> None:
    assert cubic_minimum(one, other) == pytest.approx(at)


# ---- laws ----

numbers = st.floats(0.01, 100)


@given(numbers, numbers, numbers, st.floats(0.0, 3.0))
def test_what_it_chooses_keeps_the_wolfe_conditions_and_is_where_it_looked_last(
    lowest: float, curvature: float, step: float, wave: float
) -> None:
    def curve(t: float) -> tuple[float, float]:
        offset = t - lowest
        loss = curvature * offset**2 / 2 + wave * math.sin(offset)
        return loss, curvature * offset + wave * math.cos(offset)

    start = start_of(curve)
    if start.slope >= -1e-3:
        return
    chosen, looked = follow(strong_wolfe(start, step, c1=1e-4, c2=0.9, max_trials=60), curve)
    assert chosen == Trial(looked[-1], *curve(looked[-1]))
    assert chosen.loss <= start.loss + 1e-4 * chosen.step * start.slope + 1e-9
    assert abs(chosen.slope) <= 0.9 * abs(start.slope) + 1e-9
    simple, _ = follow(armijo(start, step), curve)
    assert simple.loss <= start.loss


@pytest.mark.parametrize("step", [0.01, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("c2", [0.1, 0.9])
def test_it_looks_where_torchs_own_search_looks(step: float, c2: float) -> None:
    """Along (x, y) = (-1.2, 1) + t (1, 0.2), over Rosenbrock's valley."""
    start, d = torch.tensor([-1.2, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.2], dtype=torch.float64)
    looked_torch: list[float] = []

    def rosenbrock(w: torch.Tensor) -> tuple[float, torch.Tensor]:
        w = w.detach().clone().requires_grad_()
        loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return float(loss.detach()), w.grad

    def curve(t: float) -> tuple[float, float]:
        loss, gradient = rosenbrock(start + t * d)
        return loss, float(gradient.dot(d))

    def for_torch(w: torch.Tensor, t: float, direction: torch.Tensor) -> tuple[float, torch.Tensor]:
        looked_torch.append(float(t))
        return rosenbrock(w + t * direction)

    loss, gradient = rosenbrock(start)
    slope = gradient.dot(d)
    _, _, chosen_torch, _ = _strong_wolfe(for_torch, start, step, d, loss, gradient, slope, c2=c2)
    length = float(d.abs().max())
    chosen, looked = follow(strong_wolfe(Trial(0.0, loss, float(slope)), step, c2=c2, length=length), curve)

    assert looked[: len(looked_torch)] == pytest.approx(looked_torch)
    assert chosen.step == pytest.approx(float(chosen_torch))
