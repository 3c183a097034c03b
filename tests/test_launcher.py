"""Real runs on this machine: workers that are killed, paused or hang cost nothing but time."""

from __future__ import annotations

import math
import random
import signal
import time
from pathlib import Path

import pytest

from rainband.protocol import events
from rainband.runtimes.processes.launcher import RunResult
from tests.processes import Run, RunLauncher, exact, wait_for

pytestmark = pytest.mark.processes

BOTH_WAYS = pytest.mark.parametrize("strategy, transport", [("downpour", "shm"), ("sync", "tcp")])
EVERY_WAY = pytest.mark.parametrize(
    "strategy, transport",
    [
        ("downpour", "shm"),
        ("sync", "tcp"),
        pytest.param("downpour", "tcp", marks=pytest.mark.slow),
        pytest.param("sync", "shm", marks=pytest.mark.slow),
    ],
)


def balanced(result: RunResult) -> bool:
    """Return True if every batch of the plan is accounted for, none lost, none applied twice."""
    accounting = result.accounting
    done = accounting["applied"] + sum(accounting["skipped"].values()) + accounting["not_processed"]
    return (accounting["lost"], accounting["applied_twice"], done) == (0, 0, accounting["batches"])


def finished_exactly(run: Run) -> bool:
    result = run.result()
    assert (result.outcome, result.exit_code) == ("finished", 0), result.reason
    assert balanced(result) and result.accounting["not_processed"] == 0, result.accounting
    return exact(run)


@EVERY_WAY
def test_two_workers_killed_at_random_instants_cost_nothing(
    launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str
) -> None:
    two_are_killed(launcher, tmp_path, strategy, transport, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@EVERY_WAY
def test_at_many_more_instants(launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str, seed: int) -> None:
    two_are_killed(launcher, tmp_path, strategy, transport, seed)


def two_are_killed(launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str, seed: int) -> None:
    chance = random.Random(f"{strategy} {transport} {seed}")
    samples = {"downpour": 2048, "sync": 4096}[strategy]
    with launcher.run(tmp_path, strategy, workers=4, transport=transport, samples=samples) as run:
        run.under_way()
        run.gate.let(300)  # not all: it must not be over before they are dead
        for index in chance.sample(range(4), 2):
            time.sleep(chance.uniform(0.0, 0.03))  # not for anything: any instant is as good as another
            run.worker(index).kill()
            lost = run.first(events.Lost, node=f"worker {index}")
            assert lost.why == "killed by signal 9, often because memory ran out"
        run.gate.open()
        assert finished_exactly(run)
        assert run.result().accounting["reassigned"] == len(run.all(events.BatchesReassigned)) >= 2


@BOTH_WAYS
def test_a_worker_that_is_paused_is_not_waited_for_and_works_again_when_woken(
    launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str
) -> None:
    with launcher.run(tmp_path, strategy, workers=4, transport=transport, timeout_s=1.0, samples=4096) as run:
        run.under_way()
        sleeper = run.worker(1)
        sleeper.suspend()
        run.gate.let(200)
        assert "no heartbeat" in run.first(events.Lost, node="worker 1").why
        done_before = run.all(events.Progress)[-1].batches_done
        run.gate.let(100)
        run.done(done_before + 50)  # the others go on
        begun = run.gate.begun()[sleeper.pid]
        sleeper.resume()
        run.gate.open()
        run.first(events.Returned, node="worker 1")
        assert finished_exactly(run)
        assert run.gate.begun()[sleeper.pid] > begun + 2  # more than what it had at hand


def test_a_worker_that_hangs_is_away_although_its_heart_beats(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, workers=3, timeout_s=0.5, samples=2048, hang_at=0) as run:
        run.under_way()
        run.gate.let(512)  # all of them, and the one that hangs has taken one for itself
        wait_for(
            lambda: any("but no push for" in lost.why for lost in run.all(events.Lost)),
            "it to be away",
        )
        run.gate.end_hanging()
        run.gate.open()
        run.first(events.Returned)
        assert finished_exactly(run)
        assert run.result().accounting["reassigned"] >= 1


def test_a_worker_killed_before_it_joined_costs_nothing(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        run.first(events.Joined, node="server 0")
        run.first(events.Joined, node="server 1")
        run.process("rainband worker 1").kill()
        assert run.first(events.Lost, node="worker 1").why.startswith("before it joined: killed by signal 9")
        run.gate.let_build(1)
        run.gate.open()
        assert finished_exactly(run)


def test_a_worker_killed_while_it_gives_the_first_values_is_replaced_by_another(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        server = run.server(1)
        run.first(events.Joined, node="server 0")
        run.first(events.Joined, node="server 1")
        server.suspend()  # so that it cannot take them
        run.gate.let_build(1)
        run.first(events.PhaseChanged, phase="loading")
        (founder,) = [e.node for e in run.all(events.Joined) if "worker" in e.node]
        run.process(f"rainband {founder}").kill()
        run.first(events.Lost, node=founder)
        run.gate.let_build(1)
        server.resume()
        run.gate.open()
        assert finished_exactly(run)


@pytest.mark.slow
def test_a_pause_of_the_launcher_itself_costs_no_worker(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, timeout_s=1.0) as run:
        run.under_way()
        run.gate.let(50)
        run.signal(signal.SIGSTOP)
        time.sleep(1.5)  # longer than a silent worker is waited for
        run.signal(signal.SIGCONT)
        run.gate.open()
        assert finished_exactly(run)
        assert not run.all(events.Lost)


def test_a_server_that_is_paused_is_waited_for(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, timeout_s=0.5, samples=2048) as run:
        run.under_way()
        run.gate.let(100)
        server = run.server(1)
        server.suspend()
        run.gate.open()
        time.sleep(1.5)  # three times as long as others are waited for
        server.resume()
        assert finished_exactly(run)


@EVERY_WAY
def test_a_gradient_that_is_not_finite_is_skipped_everywhere_and_spoils_no_other(
    launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str
) -> None:
    with launcher.run(tmp_path, strategy, transport=transport, curved=True, nan_at=5, epochs=2) as run:
        run.gate.open()
        result = run.result()
        assert result.outcome == "finished"
        assert balanced(result)
        assert result.accounting["skipped"] == {"not finite": 2}  # once in each epoch
        assert result.accounting["applied"] == 510
        values = [value for tensor in run.parameters().values() for value in tensor.flatten().tolist()]
        assert all(map(math.isfinite, values))


def test_ps_and_top_show_each_process_by_its_role(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, workers=3, servers=2) as run:
        run.under_way()
        shown = {process.cmdline()[0]: process.name() for process in launcher.processes()}
        assert {
            "rainband worker 0": "rb worker 0",
            "rainband worker 2": "rb worker 2",
            "rainband server 1": "rb server 1",
            "rainband zygote": "rb zygote",
        }.items() <= shown.items()
        run.gate.open()
        assert finished_exactly(run)
