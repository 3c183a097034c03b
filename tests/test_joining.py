"""Workers and servers that join from other machines, as the coordinator sees it: who begins, who is waited for."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rainband.coordinator.admission import TASK_OF_RUN
from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.coordinator.liveness import LEFT, NO_WORKER_LEFT
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.protocol.messages import Conclude, Ended, Failed, Halt, LeaseEnd, Peer, Ready, Revoke, Shutdown, Welcome
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.entries import modules_of_workers
from rainband.runtimes.processes.launcher import Launcher
from tests.test_coordinator import TIMEOUT_S, Run


def open_run(num_workers: int = 2, num_local: int = 1, min_workers: int = 0, **join: Any) -> Run:
    """A run with one server, which has joined, and to which other machines may bring workers."""
    run = Run(num_workers, 1, **{"num_samples": 64, **join})
    settings = RunSettings(
        num_workers=num_workers,
        num_servers=1,
        failure_timeout_s=TIMEOUT_S,
        model_path="model",
        num_local=num_local,
        joinable=True,
        min_workers=min_workers,
    )
    run.coordinator = Coordinator(settings)
    run.server_joins(0)
    return run


def begun(num_local: int = 1, joined: int = 1) -> Run:
    run = open_run(num_local=num_local)
    for worker in range(num_local + joined):
        run.joins(worker)
    run.from_server(0, Ready())
    assert run.phase == "running"
    run.said.clear()
    return run


def welcomed(run: Run) -> list[str]:
    return [to for to, message in run.said if isinstance(message, Welcome)]


def test_ranks_of_joining_workers_follow_the_local_ones_and_are_never_given_twice() -> None:
    admission = open_run(num_workers=4, num_local=2).coordinator.admission
    assert [list(admission.new_ranks(2)), list(admission.new_ranks(1))] == [[2, 3], [4]]
    assert list(open_run(num_local=0).coordinator.admission.new_ranks(1)) == [0]


def test_the_task_of_the_runs_own_machine_is_that_of_the_run_also_if_another_joins_first() -> None:
    run = open_run()
    assert run.joins(1, batch_size=2) == []  # it waits: worker 0 will say what the run is about
    run.joins(0, batch_size=1)

    assert set(welcomed(run)) == {"worker 0"} and run.phase == "loading"
    why = f"worker 1 does not fit this run: the batch size is 2, not 1. {TASK_OF_RUN}"
    assert run.told("worker 1") == [Shutdown(why)]
    assert run.coordinator.state.refused == []  # the run has lost nothing


def test_a_local_worker_that_will_never_join_is_not_waited_for() -> None:
    run = open_run()
    run.joins(1)
    run.take(run.coordinator.never_joins(Peer("worker", 0), 0.0, "killed"))
    assert welcomed(run) == ["worker 1"]


def test_without_local_workers_the_first_that_joins_describes_the_run() -> None:
    run = open_run(num_local=0)
    run.joins(0)
    assert welcomed(run) == ["worker 0"]


def test_the_run_begins_when_enough_workers_have_joined() -> None:
    run = open_run(num_local=1, min_workers=3)
    assert run.joins(0) == [] and run.joins(1) == []
    run.joins(2)
    assert sorted(welcomed(run)) == ["worker 0", "worker 1", "worker 2"]


def test_a_worker_may_join_custom_loops_that_have_begun() -> None:
    run = open_run(num_workers=1, custom_loop=True)
    run.joins(0)
    run.from_server(0, Ready())
    run.joins(1)
    assert welcomed(run) == ["worker 0", "worker 1"]


def test_servers_may_join_before_the_start() -> None:
    run = open_run()
    assert list(run.coordinator.admission.expect_servers(2)) == [1, 2]
    assert run.joins(0) == [] and run.server_joins(1) == []
    run.server_joins(2)
    assert welcomed(run) == ["worker 0"]


def test_a_worker_that_leaves_finishes_its_item_and_the_others_get_the_rest() -> None:
    run = begun()
    (lease,) = run.wants(1)
    run.take(run.coordinator.dismiss([1], run.now))
    assert run.told("worker 1") == [lease, Halt(LEFT, leave=True)]

    assert Revoke(lease.portion, 2) in run.returns(1, lease, LeaseEnd.STOPPED)
    run.said.clear()
    run.from_worker(1, Ended(8))

    assert run.told("worker 1") == [Shutdown(LEFT)] and run.phase == "running"
    assert not run.coordinator.state.workers[1].connected
    assert [(event.node, event.why) for event in run.events(events.Lost)] == [("worker 1", LEFT)]


def test_a_worker_leaves_at_once_before_it_has_work() -> None:
    run = open_run(min_workers=2)
    run.joins(1)
    assert run.take(run.coordinator.dismiss([1], run.now))[0] == Shutdown(LEFT)
    assert run.phase == "forming"


def test_a_run_that_others_may_join_waits_without_workers() -> None:
    run = begun(num_local=1, joined=0)
    run.lost("worker", 0)
    assert run.phase == "running"
    assert [event.text for event in run.events(events.Warned)] == [NO_WORKER_LEFT]

    run.joins(1)
    assert welcomed(run) == ["worker 1"] and run.wants(1)


@pytest.mark.parametrize("num_local", [1, 0])
def test_a_run_that_waits_for_workers_can_be_stopped(num_local: int) -> None:
    run = begun(num_local, joined=1 - num_local)
    run.report(0, 0)
    run.lost("worker", 0)
    run.take(run.coordinator.shutdown.stop("stopped", "interrupted"))
    assert run.phase != "running"


@pytest.mark.parametrize("step", [0, 1])
def test_an_error_of_a_machine_that_has_not_trained_ends_its_worker_and_not_the_run(step: int) -> None:
    run = begun()
    (lease,) = run.wants(1)
    run.said.clear()
    run.from_worker(1, Failed(step, "FileNotFoundError: data.pt", "Traceback ..."))
    when = "at its first step" if step else "before it could start"
    why = f"its code failed {when}: FileNotFoundError: data.pt"
    assert run.told("worker 1") == [Shutdown(f"{why}. The run goes on without it.")]
    assert run.phase == "running" and run.events(events.UserError) == []
    assert [(event.node, event.why) for event in run.events(events.Lost)] == [("worker 1", why)]
    assert Revoke(lease.portion, 2) in run.told("server 0")


@pytest.mark.parametrize("step", [0, 42])
def test_an_error_of_a_machine_whose_worker_never_joined_does_not_end_the_run(step: int) -> None:
    run = begun(joined=0)
    run.from_worker(1, Failed(step, "FileNotFoundError: data.pt", "Traceback ..."))
    assert run.phase == "running"
    assert [event.node for event in run.events(events.Lost)] == ["worker 1"]


@pytest.mark.parametrize(("worker", "step"), [(0, 0), (0, 1), (1, 2)])
def test_an_error_of_the_runs_own_machine_or_in_the_middle_of_training_ends_the_run(worker: int, step: int) -> None:
    run = begun()
    run.from_worker(worker, Failed(step, "ZeroDivisionError: x", "Traceback ..."))
    assert run.phase != "running" and [event.worker for event in run.events(events.UserError)] == [worker]


@pytest.mark.parametrize(("incarnation", "excluded"), [(0, []), (1, [1])])
def test_a_connection_that_closes_late_does_not_exclude_the_next_incarnation(
    incarnation: int, excluded: list[int]
) -> None:
    run = begun()
    run.joins(1, incarnation=1)
    found: list[int] = []
    launcher = SimpleNamespace(
        machines=SimpleNamespace(exclude=found.append),
        processes={},
        causes={},
        coordinator=run.coordinator,
        zygote=SimpleNamespace(fileno=lambda: -1),
        host=SimpleNamespace(lost=lambda *args, **options: None),
        _is_lost_for_good=lambda peer: False,
    )
    Launcher.lost(launcher, Peer("worker", 1, incarnation))  # type: ignore[arg-type]
    assert found == excluded


def test_a_worker_of_the_runs_own_machine_saves_the_model() -> None:
    run = begun(num_local=2, joined=1)
    run.lost("worker", 0)
    run.take(run.coordinator.shutdown.stop("stopped", "interrupted"))
    for worker in (2, 1):
        run.from_worker(worker, Ended(8))
    run.report(0, 8, flushed=True)
    assert [to for to, message in run.said if isinstance(message, Conclude)] == ["worker 1"]


def test_the_command_leaves_torch_to_the_fork_server() -> None:
    """Importing it takes longer than all else before the first work, and the training of others may use all cores."""
    program = "import sys, rainband.runtimes.machines.joiner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("strategy", "script", "needed"),
    [("downpour", "", False), ("sync", "", True), ("elastic", "", True), ("downpour", "train.py", True)],
)
def test_the_compiler_of_torch_is_imported_for_workers_with_an_optimizer(
    strategy: str, script: str, needed: bool
) -> None:
    config = RunConfig(task="digits", strategy=strategy, num_workers=1, num_servers=1, script=script)
    modules = modules_of_workers(config, load_strategy(strategy, {}).requires)
    assert ("torch._dynamo" in modules) == needed
