"""The divergence guard: what it takes for trouble, what it decides, and that a run is told and saved by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rainband.coordinator.divergence_guard import (
    CHECKS_TO_LOOSEN,
    CHECKS_TO_SETTLE,
    Decision,
    DivergenceGuard,
    GuardReading,
)
from rainband.protocol import events
from rainband.protocol.messages import COORDINATOR, AdjustRule
from rainband.rules import StalenessBound
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.strategies.adaptive_bound import AdaptiveBound
from tests.builders import make_push, make_server, named, send, value_of
from tests.test_clocks import make_server as make_bounded_server

WELL = GuardReading(loss=1.0, batches=10, not_finite=0)


def looked(
    guard: DivergenceGuard, *looks: GuardReading, bound: int | None = None, adapt: tuple[int, int] | None = None
) -> list[Decision]:
    decisions = [guard.check(look, bound, adapt) for look in looks]
    return [decision for decision in decisions if decision is not None]


def at(loss: float) -> GuardReading:
    return replace(WELL, loss=loss)


def test_a_loss_that_falls_or_wanders_is_no_trouble() -> None:
    assert looked(DivergenceGuard(), *(at(loss) for loss in (2.0, 1.0, 1.5, 0.5, 1.2, 0.6, 0.4))) == []


def test_a_loss_that_rises_by_more_than_twice_where_it_began_halves_the_learning_rate() -> None:
    decisions = looked(DivergenceGuard(), at(1.0), at(1.0), at(10.0), at(10.0))
    assert [(d.lr_factor, d.bound) for d in decisions] == [(0.5, None)]
    assert decisions[0].why == "the loss is at 3.7, its best was 1"  # 1 + 0.3 * 9


def test_noise_near_zero_and_a_negative_loss_are_no_trouble() -> None:
    assert looked(DivergenceGuard(), at(2.0), *[at(1e-6)] * 20, at(1e-4), at(1e-3), at(0.1)) == []
    assert looked(DivergenceGuard(), at(0.0), at(-10.0), at(-30.0), at(-20.0), at(-28.0)) == []


def test_where_there_is_a_bound_it_is_tightened_first() -> None:
    exploded = [at(1.0), at(100.0)]
    assert [(d.lr_factor, d.bound) for d in looked(DivergenceGuard(), *exploded, bound=5)] == [(1.0, 2)]
    assert [(d.lr_factor, d.bound) for d in looked(DivergenceGuard(), *exploded, bound=0)] == [(0.5, None)]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_trouble_at_once(loss: float) -> None:
    assert [d.why for d in looked(DivergenceGuard(), at(loss))] == ["the loss is not finite"]


def test_three_of_ten_gradients_that_are_not_finite_are_trouble_and_three_of_a_hundred_are_not() -> None:
    few, many = replace(WELL, not_finite=3), replace(WELL, not_finite=3, batches=100)
    assert looked(DivergenceGuard(), many) == []
    assert [d.why for d in looked(DivergenceGuard(), few)] == ["3 of 10 gradients were not finite"]


def test_after_a_decision_it_waits_to_see_what_comes_of_it() -> None:
    assert len(looked(DivergenceGuard(), *[at(math.nan)] * CHECKS_TO_SETTLE)) == 1
    assert len(looked(DivergenceGuard(), *[at(math.nan)] * (CHECKS_TO_SETTLE + 1))) == 2


def test_only_an_adaptive_bound_is_loosened_and_only_up_to_its_end() -> None:
    looks = [WELL] * CHECKS_TO_LOOSEN
    assert looked(DivergenceGuard(), *looks, bound=3) == []
    assert [d.bound for d in looked(DivergenceGuard(), *looks, bound=3, adapt=(0, 9))] == [4]
    assert looked(DivergenceGuard(), *looks, bound=9, adapt=(0, 9)) == []
    unknown = [WELL, replace(WELL, loss=None), *looks[1:]]
    assert looked(DivergenceGuard(), *unknown, bound=3, adapt=(0, 9)) == []


def test_an_adaptive_bound_is_not_tightened_below_its_lowest() -> None:
    assert [(d.bound, d.lr_factor) for d in looked(DivergenceGuard(), at(math.nan), bound=3, adapt=(2, 9))] == [
        (2, 1.0)
    ]
    assert [(d.bound, d.lr_factor) for d in looked(DivergenceGuard(), at(math.nan), bound=2, adapt=(2, 9))] == [
        (None, 0.5)
    ]


# ---- servers ----


def test_servers_go_on_with_the_other_learning_rate_and_a_decision_counts_once() -> None:
    server = make_server(lr=0.5)
    for _ in range(2):
        server.receive(COORDINATOR, AdjustRule(number=1, lr_factor=0.5))
    send(server, make_push(named(0, 0)), 4.0)
    assert value_of(server.blocks[0]) == -1.0  # 0.5 * 0.5 * 4

    server.receive(COORDINATOR, AdjustRule(number=2, lr_factor=0.5))
    send(server, make_push(named(0, 1)), 4.0)
    assert value_of(server.blocks[0]) == -1.5


def test_servers_go_on_with_the_other_bound() -> None:
    server = make_bounded_server(bound=4)
    server.receive(COORDINATOR, AdjustRule(number=1, bound=1))
    rule = server.blocks[0].rule
    assert isinstance(rule, StalenessBound) and rule.bound == 1 and server.report().bound == 1


# ---- runs ----


def simulated(folder: Path, strategy: str, **settings: object) -> tuple[sim.SimulatedResult, list[events.GuardActed]]:
    seen: list[events.AnyEvent] = []
    config = RunConfig(
        task="quadratic",
        strategy=strategy,
        strategy_settings=settings,
        num_workers=4,
        num_servers=1,
        epochs=6,
        directory=str(folder),
        runtime="sim",
        sim=SimSettings(model="lan"),
    )
    result = sim.run(config, seen.append)
    return result, [event for event in seen if isinstance(event, events.GuardActed)]


def test_a_run_that_would_diverge_is_reported_and_saved(tmp_path: Path) -> None:
    """Four asynchronous workers at a rate that one process bears and they do not."""
    ends = {}
    for guard in (False, True):
        folder = tmp_path / str(guard)
        folder.mkdir()
        ends[guard] = simulated(folder, "downpour", optimizer="sgd", lr=1.2, guard=guard)
    (wild, silent), (tame, told) = ends[False], ends[True]

    assert silent == [] and told and told[-1].lr_factor < 1 and "loss" in told[0].why
    assert tame.metrics["loss"] < 1e-3 * wild.metrics["loss"]


def test_a_run_that_is_well_is_left_alone(tmp_path: Path) -> None:
    _, told = simulated(tmp_path, "downpour", optimizer="sgd", lr=0.05)
    assert told == []


def test_an_adaptive_bound_begins_tight_and_loosens(tmp_path: Path) -> None:
    result, told = simulated(tmp_path, "adaptive_bound", lr=0.05, max_bound=3)
    assert result.outcome == "finished" and result.staleness["exceeded"] == 0
    assert [event.bound for event in told] == [1, 2, 3] and all(event.lr_factor == 1 for event in told)


def test_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="min_bound=3 max_bound=2: choose 0 <= min_bound <= max_bound"):
        AdaptiveBound(min_bound=3, max_bound=2)
