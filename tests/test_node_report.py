"""Events with what each worker and server has done: exact columns, totals, and bounds on their size and frequency."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.coordinator.node_report import MAX_BYTES_PER_S, MAX_SHOWN, WorkerStaleness
from rainband.protocol.events import STALENESS_BINS, NodesMeasured, PlanMade, Progress
from rainband.protocol.messages import Missed
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.strategies.downpour import Downpour
from rainband.strategies.sync import Sync
from rainband.tasks.linear import Linear
from tests.test_coordinator import Run, running
from tests.test_simulation import INSTANT, cluster_of


def last_of(run: Run) -> NodesMeasured:
    event: NodesMeasured = run.events(NodesMeasured)[-1]
    return event


def test_the_columns_are_what_workers_and_servers_have_reported() -> None:
    run = running(num_workers=2, num_servers=2)
    run.heartbeats(
        0, samples=6, waited_s=0.5, cpu_s=2.0, pushed_bytes=40, waited_for={1: 0.25}, waiting=True, memory_bytes=9
    )
    run.heartbeats(1, samples=2, pulled_bytes=80)
    run.report(0, 4, staleness={0: {0: 1, 3: 2}, 1: {4: 1}}, missed=(Missed(0, 4, 10, 4),))
    run.report(1, 3, staleness={0: {200: 1}})
    run.ticks()
    event = last_of(run)
    assert (event.workers, event.num_workers, event.samples) == ((0, 1), 2, (6, 2))
    assert (event.waited_s, event.cpu_s) == ((0.5, 0.0), (2.0, 0.0))
    assert (event.pushed_bytes, event.pulled_bytes) == ((40, 0), (0, 80))
    assert event.staleness == ((1, 0, 0, 2, 0, 0, 0, 0, 0, 1), (0, 0, 0, 1))
    assert (event.missed, event.max_missed) == ((206, 4), (200, 4))
    assert event.all_staleness == (1, 0, 0, 3, 0, 0, 0, 0, 0, 1)
    assert (event.waiting, event.waited_for) == ((0,), ((0, 1, 0.25),))
    assert (event.updates, event.blocks) == ((4, 3), ((2.5, 4),))
    assert event.accounting["applied"] == 3
    assert (event.memory_bytes, event.server_memory_bytes) == ((9, 0), (0, 0))
    assert run.coordinator.reporting.cpu_s() == 2.0


def test_a_lost_worker_stays_in_the_columns() -> None:
    run = running(num_workers=2)
    run.heartbeats(1, samples=4, pushed_bytes=7)
    run.lost("worker", 1)
    run.ticks()
    assert (last_of(run).workers, last_of(run).pushed_bytes) == ((0, 1), (0, 7))


def test_a_plan_names_the_workers_of_a_replica() -> None:
    assert running().events(PlanMade)[0].workers_per_replica == 1


@given(st.lists(st.dictionaries(st.integers(0, 500), st.integers(1, 50), max_size=20), max_size=4))
def test_bins_have_every_gradient_once(histograms: list[dict[int, int]]) -> None:
    counted = WorkerStaleness()
    for histogram in histograms:
        counted.add(histogram)
    every = [(missed, number) for histogram in histograms for missed, number in histogram.items()]
    assert sum(counted.binned()) == sum(number for _, number in every)
    assert counted.missed == sum(missed * number for missed, number in every)
    assert counted.most == max((missed for missed, _ in every), default=0)
    for k, low in enumerate(STALENESS_BINS):
        high = STALENESS_BINS[k + 1] if k + 1 < len(STALENESS_BINS) else 1 << 60
        assert counted.bins[k] == sum(number for missed, number in every if low <= missed < high)


@pytest.mark.parametrize("num_workers", [4, 256, 257, 2000])
def test_regular_events_are_bounded_for_any_number_of_workers(num_workers: int) -> None:
    run = running(num_workers=num_workers, num_samples=4 * num_workers)
    run.coordinator.state.events.clear()
    staleness = {worker: dict.fromkeys(range(40), 10**9) for worker in range(num_workers)}
    run.reports(5, staleness=staleness)
    seconds = 40
    for second in range(seconds):
        for worker in range(0, num_workers, max(1, num_workers // 16)):
            waited_for = dict.fromkeys(range(min(num_workers, 32)), 1 / 3)
            run.heartbeats(worker, samples=10**9 + second, waited_s=1 / 3, waited_for=waited_for, steps=second)
        run.ticks(1.0)
    events = [*run.events(Progress), *run.events(NodesMeasured)]
    assert sum(len(msgspec.json.encode(event)) + 1 for event in events) <= seconds * MAX_BYTES_PER_S
    assert len(run.events(Progress)) == seconds
    assert 1 <= len(run.events(NodesMeasured)) <= seconds
    for event in run.events(NodesMeasured):
        assert len(event.workers) <= MAX_SHOWN
        assert event.num_workers == num_workers
        assert len(event.all_staleness) == 8  # 0 to 39 missed: the bins up to 33-64


def test_of_many_workers_those_that_stand_out_are_shown() -> None:
    run = running(num_workers=1000, num_samples=4000)
    for worker in range(1000):
        run.heartbeats(worker, samples=100, waited_s=1.0)
    run.heartbeats(501, samples=3, waited_s=1.0)
    run.heartbeats(777, samples=100, waited_s=9.0)
    run.lost("worker", 333)
    shown = run.coordinator.reporting.nodes.shown()
    assert {501, 777, 333} <= set(shown)
    assert list(shown) == sorted(shown)
    assert len(shown) <= MAX_SHOWN


def test_the_last_event_has_the_final_columns_although_it_is_not_due() -> None:
    run = running(num_workers=2)
    run.ticks()
    run.coordinator.reporting.nodes.due_at = 1e9
    run.heartbeats(0, samples=8)
    run.ticks()
    assert last_of(run).samples == (0, 0)
    run.coordinator.reporting.report_progress(run.now, last=True)
    assert last_of(run).samples == (8, 0)


SLOW = ClusterModel(INSTANT.network, ComputeModel("constant", 1.0, slow_workers=(1,), slow_factor=3.0), INSTANT.nodes)


def test_with_sync_the_fast_worker_has_waited_for_the_slow_one() -> None:
    task = Linear(dimension=48, samples=32, batch_size=8, epochs=2)  # two samples for each worker
    cluster = cluster_of(Sync(), 4, SLOW, num_servers=0, task=task)
    cluster.scenario.equal_parts = True
    cluster.start()
    cluster.run()
    waits = {rank: node.stats.waited_for for rank, node in cluster.workers.items()}
    assert set(waits[0]) == set(waits[2]) == set(waits[3]) == {1}
    assert waits[0][1] == pytest.approx(cluster.workers[0].stats.waited_s)
    assert sum(waits[1].values()) < 0.1 * waits[0][1]


def test_with_downpour_nobody_waits_for_anybody() -> None:
    cluster = cluster_of(Downpour(), 3, SLOW)
    cluster.start()
    cluster.run()
    assert not any(node.stats.waited_for for node in cluster.workers.values())
