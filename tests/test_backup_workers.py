"""Rounds with backup workers: the first work items count, the same on every block; and learning rates that scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rainband.protocol.data_plan import bits
from rainband.protocol.messages import RoundChosen
from rainband.rules import FirstArrivalsOfRound
from rainband.rules.rounds import TOO_LATE
from rainband.strategies.sync import Sync
from rainband.tasks.linear import Linear
from tests.builders import item_push, rounds_plan
from tests.harness import Faults, run
from tests.ledger import LR, Case, number_of
from tests.random_runs import run_seed
from tests.test_rules import Recorder, number
from tests.test_simulation import INSTANT, cluster_of

Dropped = list[tuple[int, int]]


class Chooser(Recorder):
    """A block with a number, that writes down what is dropped: (portion, batch)."""

    def __init__(self, index: int, items_per_round: int = 3) -> None:
        super().__init__(rounds_plan(items_per_round=items_per_round))
        self.index = index
        self.dropped: Dropped = []

    def drop(self, names, reason: str) -> None:  # type: ignore[no-untyped-def]
        assert reason == TOO_LATE
        self.dropped += [(r.portion, r.first) for name in names for r in name]


def test_of_three_work_items_the_first_two_make_the_round_and_the_last_is_dropped() -> None:
    rule, block = FirstArrivalsOfRound(needed=2), Chooser(index=0)

    rule.absorb(block, item_push(block.plan, 0, position=2), number(6.0))
    assert block.numbers() == [] and rule.buffered == 1
    rule.absorb(block, item_push(block.plan, 0, position=0), number(2.0))

    assert block.numbers() == [4.0] and rule.buffered == 0
    assert rule.chosen == [RoundChosen(0, (0, 2))] and block.dropped == [(1, 0)]


def test_another_block_waits_until_it_knows_the_choice_and_takes_the_same() -> None:
    rule, block = FirstArrivalsOfRound(needed=2), Chooser(index=1)
    for position, value in ((1, 100.0), (2, 6.0)):
        rule.absorb(block, item_push(block.plan, 0, position=position), number(value))
    assert block.numbers() == [] and rule.buffered == 2

    rule.choose(block, RoundChosen(0, (0, 2)))
    assert block.numbers() == []  # one of them has yet to come
    rule.absorb(block, item_push(block.plan, 0, position=0), number(2.0))

    assert block.numbers() == [4.0] and block.dropped == [(1, 0)] and rule.buffered == 0


def test_a_choice_that_comes_twice_or_too_late_changes_nothing() -> None:
    rule, block = FirstArrivalsOfRound(needed=2), Chooser(index=1)
    for position in (0, 2):
        rule.absorb(block, item_push(block.plan, 0, position=position), number(1.0))
    for _ in range(2):
        rule.choose(block, RoundChosen(0, (0, 2)))

    assert block.numbers() == [1.0] and block.version == 1 and rule.this_round is None


def test_a_short_last_round_needs_no_more_work_items_than_it_has() -> None:
    rule, block = FirstArrivalsOfRound(needed=2), Chooser(index=0)
    block.plan = rounds_plan(num_batches=4, items_per_round=3)
    block.version = 1
    rule.absorb(block, item_push(block.plan, 1, position=0), number(7.0))
    assert block.numbers() == [7.0] and block.dropped == []


# ---- runs ----


@pytest.mark.parametrize("direct", [False, True], ids=["asked", "in place"])
def test_every_batch_is_applied_or_dropped_and_the_same_ones_are_dropped_on_every_block(direct: bool) -> None:
    dropped_ever = 0
    for seed in range(8):
        case = Case(
            Sync(batch_per_worker=True, lr=LR, backup_workers=1), 3, num_servers=3, num_samples=48, direct=direct
        )
        outcome = run(seed, case, Faults(kills=seed % 2))
        dropped = {
            frozenset(
                number_of(b.plan, p, k)
                for (p, why), mask in b.accounting.skipped.items()
                if why == TOO_LATE
                for k in bits(mask)
            )
            for b in outcome.blocks.values()
        }
        accounting = outcome.coordinator.reporting.accounting()
        assert len(dropped) == 1 and accounting is not None
        number_dropped = len(next(iter(dropped)))
        assert accounting.applied + number_dropped == accounting.batches == 24
        assert accounting.skipped == ({TOO_LATE: number_dropped} if number_dropped else {})
        dropped_ever += number_dropped
    assert dropped_ever > 8 * 4


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_whatever_goes_wrong_the_round_is_made_of_the_same_work_items_everywhere(seed: int) -> None:
    run_seed(seed, "backup")


def test_nobody_waits_for_the_slow_one() -> None:
    """Worker 2 takes 10 s a step, the others 1 s: 12 rounds of 3 batches take 12 s, and all of its own are dropped."""
    model = replace(INSTANT, compute=replace(INSTANT.compute, slow_workers=(2,), slow_factor=10.0))
    task = Linear(dimension=48, samples=36, batch_size=1, epochs=1)
    times = {}
    for backup in (0, 1):
        cluster = cluster_of(Sync(batch_per_worker=True, lr=0.25, backup_workers=backup), 3, model, task=task)
        cluster.start()
        cluster.run()
        accounting = cluster.coordinator.reporting.accounting()
        assert cluster.spans is not None and accounting is not None
        times[backup] = max(s.to_s for s in cluster.spans if s.what == "compute" and s.node != "worker 2")
        assert sum(accounting.skipped.values()) == 12 * backup
    assert times[1] == pytest.approx(12.0) and times[0] > 30


# ---- learning rates ----


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_the_learning_rate_scales_with_the_work_items_of_a_round(scaling: str, factor: float) -> None:
    half = Sync(batch_per_worker=True, lr=0.1, scaling=scaling, backup_workers=2).server(num_replicas=11)  # type: ignore[arg-type]
    assert half.optimizer.settings["lr"] == pytest.approx(0.1 * factor)


def test_linear_scaling_takes_as_large_a_step_on_the_mean_as_all_workers_would_one_by_one() -> None:
    """Gradients of this task do not depend on where they are taken: then the two are equal."""
    task = Linear(dimension=16, samples=16, batch_size=1, epochs=1)
    ends = []
    for num_workers in (1, 4):
        cluster = cluster_of(
            Sync(batch_per_worker=True, lr=0.25, scaling="linear"), num_workers, num_servers=1, task=task
        )
        cluster.start()
        cluster.run()
        (block,) = cluster.servers[0].server.blocks.values()
        ends.append(block.values.clone())
    assert torch.equal(ends[0], ends[1])


def test_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="backup_workers=-1: choose 0"):
        Sync(batch_per_worker=True, backup_workers=-1)
