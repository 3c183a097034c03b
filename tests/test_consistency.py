"""The spectrum between lock-step and fully asynchronous in virtual time: who waits for whom, for how long."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rainband.protocol.accounting import Staleness, staleness_of
from rainband.protocol.messages import Missed, Report, StalenessLimit
from rainband.protocol.worker_stats import Stats
from rainband.strategies.bounded_delay import BoundedDelay
from rainband.strategies.downpour import Downpour
from rainband.strategies.stale_sync import StaleSync
from rainband.tasks.linear import Linear
from tests.test_simulation import INSTANT, cluster_of

# Worker 1 takes 4 s for a step, worker 0 takes 1 s; nothing else takes time.
ONE_IS_SLOW = replace(INSTANT, compute=replace(INSTANT.compute, slow_workers=(1,), slow_factor=4.0))
TASK = Linear(dimension=48, samples=60, batch_size=1, epochs=1)


@pytest.mark.parametrize("bound, steps_of_the_fast_one", [(0, 5), (1, 6), (2, 7), (7, 12), (100, 17)])
def test_the_fast_one_runs_ahead_as_far_as_the_bound_goes(bound: int, steps_of_the_fast_one: int) -> None:
    """After 17.5 s the slow one has done 4 steps; the fast one may do the one after 4 + bound, if it has the time."""
    cluster = cluster_of(StaleSync(bound=bound, lr=0.25, optimizer="sgd"), 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run(until_s=17.5)

    assert cluster.workers[1].stats.steps == 4
    assert cluster.workers[0].stats.steps == steps_of_the_fast_one


def test_it_is_reported_for_whom_and_how_long_everyone_waited() -> None:
    cluster = cluster_of(StaleSync(bound=0, lr=0.25, optimizer="sgd"), 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run(until_s=16.5)

    assert dict(cluster.workers[0].stats.waited_for) == {1: pytest.approx(12.0)}  # 3 s of every 4
    assert dict(cluster.workers[1].stats.waited_for) == {}


@pytest.mark.parametrize("tau, steps_of_the_fast_one", [(0, 5), (1, 6), (3, 8)])
def test_with_bounded_delay_the_fast_one_is_ahead_by_tau_tasks(tau: int, steps_of_the_fast_one: int) -> None:
    cluster = cluster_of(BoundedDelay(tau=tau, lr=0.25), 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run(until_s=17.5)

    assert (cluster.workers[1].stats.steps, cluster.workers[0].stats.steps) == (4, steps_of_the_fast_one)


@pytest.mark.parametrize("tau, seconds", [(0, 3.0), (1, 2.0)])
def test_with_a_delay_of_1_reading_takes_no_time_beside_computing(tau: int, seconds: float) -> None:
    """One worker, steps of 2 s, and half a second there and back for a read: 3 s each, or 2 s if they overlap."""
    model = replace(
        INSTANT,
        network=replace(INSTANT.network, latency_s=0.5),
        compute=replace(INSTANT.compute, step_s=2.0),
    )
    task = Linear(dimension=48, samples=64, batch_size=1, epochs=1)
    cluster = cluster_of(BoundedDelay(tau=tau, lr=0.25), 1, model, num_servers=1, task=task)
    cluster.start()
    cluster.run()

    assert cluster.spans is not None
    computing = [span for span in cluster.spans if span.what == "compute"]
    apart = [later.from_s - earlier.from_s for earlier, later in pairwise(computing)]
    assert apart[1:8] == [pytest.approx(seconds)] * 7


def test_downpour_waits_for_nobody_and_promises_nothing() -> None:
    cluster = cluster_of(Downpour(lr=0.25, optimizer="sgd"), 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run()

    assert not cluster.workers[0].stats.waited_for
    assert cluster.coordinator.reporting.staleness().bound is None


def test_the_run_says_who_waited_for_whom_at_its_end() -> None:
    cluster = cluster_of(StaleSync(bound=1, lr=0.25, optimizer="sgd"), 2, ONE_IS_SLOW, task=TASK)
    cluster.start()
    cluster.run()
    staleness = cluster.coordinator.reporting.staleness()

    assert cluster.coordinator.state.outcome == "finished"
    assert (staleness.bound, staleness.unit, staleness.largest, staleness.exceeded) == (1, "clocks", 1, 0)
    assert set(staleness.waited_for[0]) == {1}


# ---- the pieces ----


def test_a_wait_is_put_down_to_whom_the_server_named() -> None:
    stats = Stats()
    stats.waited(1.0)  # for a lease, say
    stats.held_by = 3
    stats.waited(2.0)
    stats.waited(4.0)  # for something else again

    assert stats.heartbeat().waited_s == 7.0 and stats.heartbeat().waited_for == {3: 2.0}


def test_the_most_broken_bound_of_all_servers_is_reported() -> None:
    reports = [
        Report(0, (), 0, 0, limit=StalenessLimit(2, "clocks", 2, 0), missed=(Missed(1, 4, 6, 3),)),
        Report(0, (), 0, 0, limit=StalenessLimit(2, "clocks", 5, 7), missed=(Missed(0, 2, 1, 1),)),
        Report(0, (), 0, 0),
    ]
    staleness = staleness_of(reports)

    assert (staleness.bound, staleness.largest, staleness.exceeded) == (2, 5, 7)
    assert "may miss 2 clocks, and 7 gradients came from readers that missed up to 5" in staleness.broken
    assert {block: (s.mean, s.max) for block, s in staleness.per_block.items()} == {0: (0.5, 1), 1: (1.5, 3)}


def test_a_bound_that_was_kept_is_not_broken() -> None:
    assert not Staleness(0.0, 0, {}, {}).broken
    assert not staleness_of([Report(0, (), 0, 0, limit=StalenessLimit(2, "clocks", 2, 0))]).broken
