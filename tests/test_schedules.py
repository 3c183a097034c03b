"""Learning-rate schedules: numbers at chosen places, and laws at all of them."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol.lr_schedules import Schedule, Shape

shapes = st.sampled_from(get_args(Shape))
positions = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    "schedule, at, scale",
    [
        (Schedule(), 0.0, 1.0),
        (Schedule(), 0.9, 1.0),
        (Schedule("linear"), 0.0, 1.0),
        (Schedule("linear"), 0.25, 0.75),
        (Schedule("cosine"), 0.0, 1.0),
        (Schedule("cosine"), 0.5, 0.5),
        (Schedule("cosine"), 1.0, 0.0),
        (Schedule(warmup_fraction=0.5), 0.0, 0.0),
        (Schedule(warmup_fraction=0.5), 0.25, 0.5),
        (Schedule(warmup_fraction=0.5), 0.5, 1.0),
        (Schedule("linear", warmup_fraction=0.5), 0.25, 0.5),
        (Schedule("linear", warmup_fraction=0.5), 0.5, 1.0),
        (Schedule("linear", warmup_fraction=0.5), 0.75, 0.5),
    ],
)
def test_the_factor_at_a_fraction_of_the_run_is(schedule: Schedule, at: float, scale: float) -> None:
    assert schedule.scale(at) == pytest.approx(scale, abs=1e-12)


@given(shapes, st.floats(0, 0.9), positions)
def test_the_factor_is_never_negative_and_never_above_1(shape: Shape, warmup: float, at: float) -> None:
    assert -1e-12 <= Schedule(shape, warmup).scale(at) <= 1 + 1e-12


@given(shapes, st.floats(0, 0.9), positions, positions)
def test_it_rises_in_the_warm_up_and_never_after(shape: Shape, warmup: float, a: float, b: float) -> None:
    schedule, (early, late) = Schedule(shape, warmup), sorted((a, b))
    if late < warmup:
        assert schedule.scale(early) <= schedule.scale(late)
    if early >= warmup:
        assert schedule.scale(early) >= schedule.scale(late) - 1e-12


@given(shapes, st.floats(0, 0.9), positions)
def test_a_schedule_that_says_it_is_constant_is(shape: Shape, warmup: float, at: float) -> None:
    schedule = Schedule(shape, warmup)
    assert not schedule.is_constant or schedule.scale(at) == 1.0


@pytest.mark.parametrize("warmup", [-0.1, 1.0, 2.0])
def test_a_warm_up_is_a_part_of_the_run(warmup: float) -> None:
    with pytest.raises(ValueError, match=f"warmup_fraction={warmup}: give a fraction from 0 to below 1"):
        Schedule(warmup_fraction=warmup)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no lr_schedule named 'cosin': choose constant, linear or cosine"):
        Schedule("cosin")  # type: ignore[arg-type]
