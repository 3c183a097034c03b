"""A stuck worker is not waited for without limit: a stage of a replica, and a worker that does not end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.protocol import events
from rainband.protocol.messages import Address, Conclude, Concluded, Ended, Go, Ready
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.sync import Sync
from rainband.strategy import Strategy
from tests.test_coordinator import TIMEOUT_S, Run, finished

LIMIT_S = 2 * TIMEOUT_S + 10 * 1.0  # twice the timeout, and ten times the usual second for a push


def replicas() -> Run:
    """Two replicas of two stages: workers 0 and 1, and workers 2 and 3. A push takes a second."""
    run = Run(num_workers=4, num_samples=64)
    run.coordinator = Coordinator(
        RunSettings(
            num_workers=4, num_servers=2, failure_timeout_s=TIMEOUT_S, model_path="model", workers_per_replica=2
        )
    )
    for server in range(2):
        run.server_joins(server)
    for worker in range(4):
        run.joins(worker, address=Address("here", worker))
    for server in range(2):
        run.from_server(server, Ready())
    assert run.phase == "running" and Go() in run.told("worker 3")
    run.wants(0)
    run.wants(2)
    for acked in (1, 2):
        run.now += 1.0
        for worker in range(4):
            run.heartbeats(worker, acked=acked, steps=acked)
    run.said.clear()
    return run


def beat(run: Run, **hanging: int) -> None:
    """Let a second pass in which the first replica works, and the others wait for the worker that hangs."""
    acked = run.coordinator.state.workers[0].heartbeat.acked + 1
    run.now += 1.0
    for worker in range(4):
        if worker < 2:
            run.heartbeats(worker, acked=acked, steps=acked)
        else:
            run.heartbeats(worker, acked=2, steps=2, waiting=worker != hanging["worker"])
    run.ticks(0.0)


def active(run: Run) -> list[int]:
    return [index for index, worker in run.coordinator.state.workers.items() if worker.active]


@pytest.mark.parametrize("hanging", [2, 3])
def test_a_stage_that_hangs_makes_its_replica_inactive_and_others_get_its_batches(hanging: int) -> None:
    run = replicas()
    leased = set(run.coordinator.state.workers[2].leases)
    for _ in range(int(LIMIT_S)):
        beat(run, worker=hanging)
    assert active(run) == [0, 1, 2, 3] and leased
    beat(run, worker=hanging)

    assert active(run) == [0, 1]
    lost = {event.node: event.why for event in run.events(events.Lost)}
    assert [event.state for event in run.events(events.Lost) if event.node.startswith("worker")] == ["inactive"] * 2
    other = 5 - hanging
    assert lost[f"worker {hanging}"] == f"inactive: heartbeats, but no push for {LIMIT_S + 1:.1f} s"
    assert lost[f"worker {other}"] == f"inactive: worker {hanging} of the same replica is inactive"
    assert not run.coordinator.state.workers[2].leases
    assert run.coordinator.state.num_live() == 1


def test_a_replica_does_not_return_while_a_stage_hangs_and_returns_as_a_whole() -> None:
    run = replicas()
    for _ in range(int(LIMIT_S) + 5):
        beat(run, worker=3)  # worker 2 goes on to say that it waits
    assert active(run) == [0, 1] and not run.events(events.Returned)

    run.heartbeats(3, acked=3, steps=3)

    assert active(run) == [0, 1, 2, 3]
    assert [event.node for event in run.events(events.Returned)] == ["worker 2", "worker 3"]


def test_a_replica_whose_stage_is_silent_does_not_return_either() -> None:
    run = replicas()
    for _ in range(int(TIMEOUT_S) + 3):
        run.now += 1.0
        for worker in range(3):
            run.heartbeats(worker, acked=2, steps=2, waiting=True)
        run.ticks(0.0)
    assert active(run) == [0, 1]
    assert run.coordinator.state.num_live() == 1
    run.heartbeats(3, waiting=True, acked=2, steps=2)
    assert active(run) == [0, 1, 2, 3]


def test_a_stage_without_parameters_pushes_nothing_and_is_not_late() -> None:
    run = replicas()
    for steps in range(3, 3 + 2 * int(LIMIT_S)):
        run.now += 1.0
        for worker in range(4):
            run.heartbeats(worker, acked=2 if worker == 3 else steps, steps=steps)
        run.ticks(0.0)
    assert active(run) == [0, 1, 2, 3]


def test_a_replica_whose_stage_falls_silent_while_it_saves_is_replaced() -> None:
    """The leader would wait for the silent worker's part of the model, and goes on to send heartbeats."""
    run = replicas()
    run.reports(64, first_open=64)
    run.reports(64, first_open=64, flushed=True)
    for worker in range(4):
        run.from_worker(worker, Ended(1))
    assert run.phase == "concluding" and run.coordinator.shutdown.concluder == 0
    run.said.clear()
    run.now += TIMEOUT_S + 1
    for worker in (0, 2, 3):
        run.heartbeats(worker, acked=2, steps=2)
    run.ticks(0.0)

    assert run.coordinator.shutdown.concluder == 2
    assert [to for to, message in run.said if isinstance(message, Conclude)] == ["worker 2", "worker 3"]
    run.from_worker(2, Concluded({}))
    run.reports(64, first_open=64)
    assert run.phase == "over" and run.coordinator.state.outcome == "finished"


# ---- rounds without servers ----


@pytest.mark.parametrize("strategy", [Sync(), Averaging()])
def test_a_worker_for_which_the_others_wait_in_a_round_is_inactive_after_the_limit(strategy: Strategy) -> None:
    run = Run(num_workers=3, num_servers=0, shares_batches=strategy.requires.split_batches)
    settings = RunSettings(
        num_workers=3, num_servers=0, failure_timeout_s=TIMEOUT_S, model_path="model", stuck_timeout_s=60.0
    )
    run.coordinator = Coordinator(settings, strategy)
    for worker in range(3):
        run.joins(worker)
    assert run.phase == "running"
    for _ in range(61):
        run.now += 1.0
        run.heartbeats(0, acked=1, steps=1, waiting=True, held_by=2)
        run.heartbeats(1, acked=1, steps=1, waiting=True, held_by=2)
        run.heartbeats(2, acked=1, steps=1)
        run.ticks(0.0)
    assert active(run) == [0, 1, 2] and not run.events(events.Lost)
    run.now += 1.0
    for worker in range(3):
        run.heartbeats(worker, acked=1, steps=1, waiting=worker < 2, held_by=2 if worker < 2 else None)
    run.ticks(0.0)
    assert active(run) == [0, 1]
    [lost] = run.events(events.Lost)
    assert (lost.node, lost.why) == ("worker 2", "inactive: heartbeats, but the others have waited 61 s for it")


# ---- the end ----


@pytest.mark.parametrize("custom_loop", [False, True])
def test_a_worker_that_does_not_end_is_not_waited_for_unless_its_loop_may_do_other_things(custom_loop: bool) -> None:
    run = finished()
    state = run.coordinator.state
    for worker in (0, 1):
        state.workers[worker].first_s = 1.0
    run.reports(8, first_open=8, flushed=True)
    if custom_loop:
        assert state.join is not None
        state.join = msgspec.structs.replace(state.join, custom_loop=True)
    run.from_worker(0, Ended(8))
    assert run.phase == "finishing"
    run.said.clear()
    for _ in range(int(LIMIT_S) + 1):
        run.now += 1.0
        run.heartbeats(0)
        run.heartbeats(1)
        run.ticks(0.0)

    assert (run.phase == "concluding") is not custom_loop
    lost = [event.node for event in run.events(events.Lost) if event.node.startswith("worker")]
    assert lost == ([] if custom_loop else ["worker 1"])


def test_the_usual_time_of_full_batch_workers_is_measured_while_they_have_items() -> None:
    """Without it, nothing would be late: they have no leases."""

    class Items:
        def has_items(self, worker: Any) -> bool:
            return True

    run = finished()
    liveness = run.coordinator.liveness
    liveness.full_batch = Items()  # type: ignore[assignment]
    run.now += 2.0
    run.heartbeats(0, acked=1)
    assert run.coordinator.state.workers[0].first_s == 2.0
