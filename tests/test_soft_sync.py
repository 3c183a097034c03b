"""Soft synchronisation: the mean of c gradients, what it is divided by, and how stale it is, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol import events
from rainband.rules import ApplyEvery
from rainband.strategies.soft_sync import SoftSync
from rainband.tasks.linear import Linear
from tests.builders import make_plan, make_push, named
from tests.test_rules import Recorder, number
from tests.test_simulation import INSTANT, cluster_of


def test_1_2_and_6_give_3_from_any_workers() -> None:
    rule, block = ApplyEvery(count=3), Recorder(make_plan())

    rule.absorb(block, make_push(named(0, 0), worker=1, absent=(4, 5)), number(1.0))
    rule.absorb(block, make_push(named(0, 1), worker=1, absent=(5,)), number(2.0))
    assert block.numbers() == [] and rule.buffered == 2

    rule.absorb(block, make_push(named(0, 2), worker=0, absent=(5, 6)), number(6.0))
    assert block.numbers() == [pytest.approx(3.0)] and rule.buffered == 0 and block.absent == [{5}]


def test_of_two_gradients_the_one_that_has_missed_4_updates_weighs_a_quarter() -> None:
    rule, block = ApplyEvery(count=2, by_staleness=True), Recorder(make_plan())
    block.version = 4

    rule.absorb(block, make_push(named(0, 0), version=4), number(3.0))
    rule.absorb(block, make_push(named(0, 1), version=0), number(8.0))

    assert block.numbers() == [2.5]  # (3 + 8 / 4) / 2


def test_a_gradient_that_has_missed_one_update_or_none_weighs_the_same() -> None:
    rule, block = ApplyEvery(count=1, by_staleness=True), Recorder(make_plan())
    for version in (0, 0, 0):
        rule.absorb(block, make_push(named(0, 0), version=version), number(6.0))
    assert block.numbers() == [6.0, 6.0, 3.0]  # it has missed 0, 1 and 2


def test_what_is_left_at_the_end_is_applied_with_the_same_weight() -> None:
    rule, block = ApplyEvery(count=4), Recorder(make_plan())
    rule.absorb(block, make_push(named(0, 0), worker=1), number(4.0))
    rule.absorb(block, make_push(named(0, 1), skip="not finite"), None)

    rule.forget(block, worker=1)
    rule.flush(block)
    assert block.numbers() == [1.0]
    rule.flush(block)
    assert block.numbers() == [1.0]


def test_a_gradient_is_only_lent() -> None:
    rule, block = ApplyEvery(count=2), Recorder(make_plan())
    lent = number(4.0)
    rule.absorb(block, make_push(named(0, 0)), lent)
    lent.fill_(100.0)
    rule.absorb(block, make_push(named(0, 1)), lent.fill_(2.0))

    assert block.numbers() == [3.0] and lent.item() == 2.0


@pytest.mark.parametrize(
    "scaling, lr, by_staleness", [("none", 0.6, False), ("n", 0.2, False), ("staleness", 0.6, True)]
)
def test_thirty_workers_and_n_3_make_updates_of_10(
    scaling: Literal["none", "n", "staleness"], lr: float, by_staleness: bool
) -> None:
    server_part = SoftSync(n=3, lr=0.6, scaling=scaling).server(num_replicas=30)
    rule = server_part.rule()
    assert isinstance(rule, ApplyEvery)
    assert (rule.gradients_per_update, rule.by_staleness) == (10, by_staleness)
    assert server_part.optimizer.settings["lr"] == pytest.approx(lr)


def test_with_fewer_workers_than_n_every_gradient_is_an_update() -> None:
    assert SoftSync(n=8).gradients_per_update(5) == 1


# ---- workers come and go ----


def four_workers_two_updates() -> tuple[ApplyEvery, Recorder]:
    rule = SoftSync(n=2, scaling="none").server(num_replicas=4).rule()
    assert isinstance(rule, ApplyEvery)
    return rule, Recorder(make_plan())


def test_when_two_of_four_workers_are_lost_an_update_is_of_one_gradient() -> None:
    rule, block = four_workers_two_updates()
    for worker in (3, 2):
        rule.forget(block, worker)
    rule.absorb(block, make_push(named(0, 0), worker=0), number(5.0))
    assert block.numbers() == [5.0]


def test_the_update_at_hand_is_finished_as_it_was_begun_and_the_next_one_is_smaller() -> None:
    rule, block = four_workers_two_updates()
    rule.absorb(block, make_push(named(0, 0), worker=3), number(4.0))
    for worker in (3, 2):
        rule.forget(block, worker)

    assert block.numbers() == [] and rule.buffered == 1
    rule.absorb(block, make_push(named(0, 1), worker=0), number(8.0))
    rule.absorb(block, make_push(named(0, 2), worker=1), number(7.0))
    assert block.numbers() == [6.0, 7.0]


def test_who_comes_back_or_is_new_counts_from_its_first_push_on() -> None:
    rule, block = four_workers_two_updates()
    for worker in (3, 2):
        rule.forget(block, worker)
    for worker, gradient in ((2, 1.0), (9, 3.0), (0, 5.0), (1, 7.0)):
        rule.absorb(block, make_push(named(0, 0), worker=worker), number(gradient))

    assert block.numbers() == [1.0, 4.0] and rule.buffered == 1  # three workers: 1; four: 2


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60), st.integers(1, 4))
def test_the_number_of_gradients_of_an_update_follows_the_workers_at_its_beginning(
    story: list[tuple[int, bool]], n: int
) -> None:
    strategy, block = SoftSync(n=n, scaling="none"), Recorder(make_plan())
    rule = strategy.server(num_replicas=5).rule()
    there, left = set(range(5)), 0  # of the update at hand, none: it has not begun
    for worker, pushes in story:
        if not pushes:
            rule.forget(block, worker)
            there.discard(worker)
            continue
        there.add(worker)
        left = (left or strategy.gradients_per_update(len(there))) - 1
        before = block.version
        rule.absorb(block, make_push(named(0, 0), worker=worker), number(1.0))
        assert (block.version > before) is (left == 0)


def test_in_a_run_with_a_kill_c_follows_and_an_event_says_so() -> None:
    """Six workers and n = 2: updates of 3. Two are lost: updates of 2, and the mean staleness is that of four."""
    seen: list[events.AnyEvent] = []
    task = Linear(dimension=16, samples=1200, batch_size=1, epochs=1)
    cluster = cluster_of(SoftSync(n=2, lr=0.25), 6, INSTANT, num_servers=1, task=task)
    cluster.coordinator_node.show = seen.append
    cluster.start()
    cluster.run(until_s=40.25)
    (block,) = cluster.servers[0].server.blocks.values()
    before = block.version
    assert block.rule.gradients_per_update == 3 and before == 80  # 40 s of 6 gradients

    for worker in (1, 4):
        cluster.kill(cluster.workers[worker])
    cluster.run()
    assert block.rule.gradients_per_update == 2
    assert [event.gradients for event in seen if isinstance(event, events.UpdateSizeChanged)] == [2]
    accounting = cluster.coordinator.reporting.accounting()
    assert accounting is not None and accounting.balanced and accounting.applied == 1200


def test_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="n=0: choose from 1"):
        SoftSync(n=0)
    with pytest.raises(ValueError, match="adagrad normalizes that away: use scaling=n"):
        SoftSync(optimizer="adagrad")


# ---- how stale ----


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.integers(0, 5), max_size=200))
def test_mean_staleness_is_lambda_minus_1_over_c_for_any_order_of_workers(
    num_workers: int, count: int, order: list[int]
) -> None:
    """Each update makes the gradients of all others one older: nothing is lost but what is still being computed."""
    rule, block = ApplyEvery(count), Recorder(make_plan())
    read = dict.fromkeys(range(num_workers), 0)  # each computes at this version
    missed = 0
    for worker in (w for w in order if w < num_workers):
        missed += block.version - read[worker]
        rule.absorb(block, make_push(named(0, 0), worker, version=read[worker]), number(1.0))
        read[worker] = block.version

    under_way = sum(block.version - version for version in read.values())
    assert missed + under_way == (num_workers - 1) * block.version


@pytest.mark.parametrize("kind", ["constant", "lognormal", "exponential"])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_mean_staleness_of_a_run_is_lambda_minus_1_over_c_for_any_mix_of_speeds(
    kind: Literal["constant", "lognormal", "exponential"], n: int
) -> None:
    """Six workers, one of them three times slower, looked at while all of them compute."""
    compute = replace(INSTANT.compute, kind=kind, slow_workers=(2,), slow_factor=3.0)
    task = Linear(dimension=16, samples=1200, batch_size=1, epochs=1)
    cluster = cluster_of(SoftSync(n=n, lr=0.25), 6, replace(INSTANT, compute=compute), num_servers=1, task=task)
    cluster.start()
    cluster.run(until_s=100.25)

    (block,) = cluster.servers[0].server.blocks.values()
    assert isinstance(block.rule, ApplyEvery)
    gathered = sum(block.version - push.version for push in block.rule.pushes)
    clients = [node.client for node in cluster.workers.values() if node.client is not None]
    under_way = sum(block.version - client.pulls.versions[0] for client in clients)

    assert len(clients) == 6 and block.accounting.missed(0).total + gathered + under_way == 5 * block.version
    assert cluster.coordinator.reporting.staleness().mean == pytest.approx(5 / (6 // n), rel=0.05)
