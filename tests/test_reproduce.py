"""The claims about data parallelism whose points are quick, and the results of the default."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reproduce.runs import Done


def test_mean_staleness_is_as_claimed_and_its_tail_is_that_of_the_machines() -> None:
    """With thirty workers and updates of ten gradients: mean 29 / 10."""
    from reproduce.claims.mean_staleness import CLAIM, point

    alike, exponential = (point(0, 3, task="digits", steps=120, **method.settings) for method in CLAIM.methods)
    assert alike["mean"] == pytest.approx(2.9, rel=0.03) and exponential["mean"] == pytest.approx(2.9, rel=0.06)
    assert alike["beyond"] == 0.0 and exponential["beyond"] > 5


@pytest.mark.slow
def test_asynchrony_of_four_is_a_momentum_of_three_quarters_with_a_quarter_of_the_rate() -> None:
    from reproduce.claims.asynchrony_is_momentum import point

    found = point(0, 4, runs=40, kind="exponential")
    assert found["momentum"] == pytest.approx(0.75, abs=0.04) and found["share"] == pytest.approx(0.25, abs=0.05)


def test_a_static_split_waits_for_the_slow_worker_and_portions_on_demand_do_not() -> None:
    """Eight workers with 12 of 90 batches of 10 ms: 120 ms if they are equal, 600 ms if one is five times slower."""
    from reproduce.claims.portions_on_demand import CLAIM, point

    demand, _, static = (method.settings for method in CLAIM.methods)
    assert point(100, 1, task="digits", **static)["ms"] == pytest.approx(120, rel=0.15)
    assert point(100, 5, task="digits", **static)["ms"] == pytest.approx(600, rel=0.15)
    assert point(100, 5, task="digits", **demand)["ms"] < 200


def test_what_a_run_took_to_a_loss_lies_between_two_reports() -> None:
    """The loss falls from 2.0 at 1 s to 0.5 at 2 s: it is 1.0 after two thirds of the way."""
    result: Any = None  # not looked at
    done = Done(result, [(1.0, 2.0), (2.0, 0.5), (3.0, 0.4)], 0.0, [], [(1.0, 10), (2.0, 40), (3.0, 50)])
    assert (done.seconds_to(1.0), done.samples_to(1.0)) == (pytest.approx(1 + 2 / 3), pytest.approx(30))
    assert (done.seconds_to(3.0), done.seconds_to(0.1), done.samples_to(0.1)) == (1.0, math.inf, math.inf)


def test_the_tables_of_the_default_are_those_of_its_results() -> None:
    from reproduce.default import __main__ as default

    for path, text in default.tables().items():
        assert default.written(path) == text, f"{path.name}: python -m reproduce.default --table"


def test_the_readme_has_the_results_of_the_page() -> None:
    from reproduce.default import __main__ as default

    both = default.PAGE, default.README
    page, short = ([row.split(" | ") for row in default.written(path).splitlines()] for path in both)
    rows = [row for row in page if len(row) > 5][1:]
    assert len(rows) == len(default.LOOPS) == len(short) - 2
    for own, row in zip(short[2:], rows, strict=True):
        assert own[1] == row[1]
        assert all(long.startswith(value.rstrip(" |")) for value, long in zip(own[2:], row[2:5], strict=True))
