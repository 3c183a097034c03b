"""Every way a run can end: it says what happened, gives the right exit code, and leaves nothing behind.

That no process, socket, piece of shared memory or half file is left is checked after every run: see `RunLauncher.run`.
"""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.run_directory import read_config
from tests.processes import LR, Run, RunLauncher

pytestmark = pytest.mark.processes


def model_has_what_the_accounting_says(run: Run) -> bool:
    """The gradient of the bias is 1, so it counts the batches that were applied."""
    return bool(run.parameters()["bias"].item() == -LR * run.result().accounting["applied"])


def ended_as(run: Run) -> tuple[str, int | None]:
    code = run.ended()
    (end,) = run.all(events.RunEnded)
    return end.outcome, code


# ---- by a signal to the launcher -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_ctrl_c_once_finishes_the_batches_at_hand_saves_the_model_and_balances_the_accounting(
    launcher: RunLauncher, tmp_path: Path, transport: str
) -> None:
    with launcher.run(tmp_path, transport=transport) as run:
        run.under_way()
        run.gate.let(50)
        run.done(10)
        run.signal(signal.SIGINT)
        run.first(events.PhaseChanged, phase="finishing", reason="interrupted")
        run.gate.open()
        assert run.ended() == 130
        accounting = run.result().accounting
        assert (accounting["lost"], accounting["applied_twice"]) == (0, 0)
        assert 10 <= accounting["applied"] <= 60  # the two at hand, and hardly more
        assert accounting["applied"] + accounting["not_processed"] == accounting["batches"] == 256
        assert model_has_what_the_accounting_says(run)
        assert ended_as(run) == ("stopped", 130)


def test_ctrl_c_is_heard_by_one_process_that_never_waits(launcher: RunLauncher, tmp_path: Path) -> None:
    """It holds two leases of 32 batches, and looks for messages before it has computed all of them."""
    with launcher.run(tmp_path, "single", workers=1, servers=0) as run:
        run.under_way()
        run.gate.let(2)
        run.signal(signal.SIGINT)
        run.first(events.PhaseChanged, phase="finishing", reason="interrupted")
        run.drip()
        assert run.ended() == 130
        accounting = run.result().accounting
        assert accounting["applied"] + accounting["not_processed"] == accounting["batches"]
        assert accounting["applied"] < 32
        assert model_has_what_the_accounting_says(run)


def test_ctrl_c_twice_ends_at_once(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path) as run:
        run.under_way()  # at the gate, which stays shut
        run.signal(signal.SIGINT)
        run.first(events.PhaseChanged, phase="finishing")
        run.signal(signal.SIGINT)
        assert run.ended() == 130
        assert run.result().reason == "interrupted twice"
        assert not (run.directory / "model.safetensors").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_polite_kill_is_obeyed_and_the_exit_code_says_try_again(
    launcher: RunLauncher, tmp_path: Path, signum: int
) -> None:
    with launcher.run(tmp_path, options={"checkpoint_every_s": 300.0}) as run:
        run.under_way()
        run.signal(signum)
        run.gate.open()
        assert run.ended() == 75
        assert run.result().outcome == "stopped"
        assert model_has_what_the_accounting_says(run)
        assert (run.directory / "checkpoints" / run.result().checkpoint / "manifest.json").is_file()


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
def test_a_run_that_was_stopped_continues_with_other_numbers_of_workers_and_servers(
    launcher: RunLauncher, tmp_path: Path, strategy: str
) -> None:
    with launcher.run(tmp_path, strategy, options={"checkpoint_every_s": 300.0}) as run:
        run.under_way()
        run.gate.let(20)
        run.done(10)
        run.signal(signal.SIGTERM)
        run.gate.open()
        assert run.ended() == 75
        done = run.result().accounting["applied"]
        checkpoint = run.directory / "checkpoints" / run.result().checkpoint
    again = tmp_path / "again"
    again.mkdir()
    options = {"resume_from": str(checkpoint)}
    with launcher.run(again, strategy, workers=3, servers=1, gated=False, options=options) as run:
        assert ended_as(run) == ("finished", 0)
        [restored] = run.all(events.Restored)
        assert 0 < restored.step <= done < 256
        assert run.result().accounting["applied"] == 256
        updates = 256 if strategy == "downpour" else 128  # of rounds of two, also with three workers
        assert run.parameters()["bias"].item() == -LR * updates


def test_ctrl_c_before_anyone_has_joined_ends_at_once(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        run.first(events.Joined, node="server 0")
        run.signal(signal.SIGINT)
        assert ended_as(run) == ("stopped", 130)
        assert run.result().accounting == {}


def test_a_launcher_killed_takes_everyone_along_and_leaves_a_directory_that_can_be_read(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    with launcher.run(tmp_path) as run:
        run.under_way()
        run.gate.let(100)
        run.done(10)
        run.signal(signal.SIGKILL)
        assert run.ended() is None
    assert read_config(run.directory) == run.config
    assert (run.directory / "events.jsonl").read_bytes().endswith(b"\n")
    assert run.all(events.Progress)[-1].batches_done >= 10
    with sqlite3.connect(run.directory / "metrics.sqlite") as metrics:
        assert metrics.execute("pragma integrity_check").fetchone() == ("ok",)


# ---- by the loss of a process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, transport",
    [
        ("downpour", "shm"),
        ("sync", "tcp"),
        pytest.param("downpour", "tcp", marks=pytest.mark.slow),
        pytest.param("sync", "shm", marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_ends_the_run_which_says_what_was_lost(
    launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str
) -> None:
    with launcher.run(tmp_path, strategy, transport=transport, timeout_s=1.0) as run:
        run.under_way()
        run.gate.let(100)
        run.done(1)  # then the coordinator knows what it holds
        run.server(1).kill()
        assert ended_as(run) == ("failed", 1)
        reason = run.result().reason
        assert "server 1 was lost (killed by signal 9" in reason
        assert "the only copy of 1 blocks" in reason
        assert "no model was saved" in reason
        assert not run.all(events.UserError)
        assert run.printed() == ""


def test_a_server_killed_before_it_has_joined_ends_the_run(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        run.server(0).kill()
        assert ended_as(run) == ("failed", 1)
        assert "server 0" in run.result().reason
        assert "killed by signal 9" in run.result().reason


def test_a_server_killed_before_it_has_its_first_values_ends_the_run(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        run.first(events.Joined, node="server 0")
        run.first(events.Joined, node="server 1")
        server = run.server(1)
        server.suspend()  # so that it cannot take them
        run.gate.let_build(2)
        run.first(events.PhaseChanged, phase="loading")
        server.kill()
        assert ended_as(run) == ("failed", 1)
        assert "server 1 was lost (killed by signal 9" in run.result().reason


def test_without_any_worker_the_run_ends_and_says_so(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path) as run:
        run.under_way()
        run.worker(0).kill()
        run.worker(1).kill()
        assert ended_as(run) == ("failed", 1)
        assert run.result().reason.startswith("no worker is left: worker ")


def test_a_worker_killed_before_it_has_joined_is_reported_and_not_waited_for(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    with launcher.run(tmp_path, slow_build=True) as run:
        run.gate.let_build(1)
        run.first(events.PhaseChanged, phase="running")
        (joined,) = [e for e in run.all(events.Joined) if "worker" in e.node]
        here = int(joined.node.removeprefix("worker "))
        run.worker(1 - here).kill()
        run.first(events.Lost, node=f"worker {1 - here}")
        run.worker(here).kill()
        assert ended_as(run) == ("failed", 1)
        assert run.result().reason.startswith("no worker is left: worker ")


def test_a_batch_that_ends_every_worker_that_computes_it_ends_the_run_after_three(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    with launcher.run(tmp_path, workers=4, samples=256, die_at=100) as run:
        run.drip()
        assert ended_as(run) == ("failed", 1)
        assert "3 workers died" in run.result().reason
        assert len([e for e in run.all(events.Lost) if "signal 9" in e.why]) >= 3


def test_a_zygote_killed_ends_the_run_which_says_so(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path) as run:
        run.under_way()
        run.process("rainband zygote").kill()
        assert ended_as(run) == ("failed", 1)
        assert "the fork server (zygote" in run.result().reason


def test_a_directory_that_holds_a_run_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("precious")
    config = RunConfig(task="linear", strategy="downpour", num_workers=1, num_servers=1, directory=str(tmp_path))
    with pytest.raises(ValueError, match="already holds a run"):
        local.run(config, lambda event: None)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
    assert (tmp_path / "events.jsonl").read_text() == "precious"


# ---- by the user's own code -----------------------------------------------------------------------------------------


def test_a_crash_in_the_loss_is_shown_once_with_rank_and_step_and_ends_the_others(
    launcher: RunLauncher, tmp_path: Path
) -> None:
    with launcher.run(tmp_path, workers=3, crash_at=7) as run:
        run.under_way()
        run.gate.let(256)  # not enough to do again what the others had at hand: they stay at the gate
        assert ended_as(run) == ("failed", 1)
        (error,) = run.all(events.UserError)
        assert error.error == "ArithmeticError: sample 7 is one too many"
        assert error.step >= 1
        assert error.traceback.splitlines()[1].endswith("in loss")
        assert run.result().reason == f"worker {error.worker} failed at step {error.step}: {error.error}"
        assert run.printed() == ""


def test_a_crash_at_the_very_first_step_is_step_1(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, gated=False, samples=4, crash_at=0) as run:
        assert ended_as(run) == ("failed", 1)
        (error,) = run.all(events.UserError)
        assert error.step == 1
        assert "failed at step 1: ArithmeticError" in run.result().reason


@pytest.mark.parametrize(
    "task, settings, complaint",
    [
        ("tests.gated:Gated", {"broken": True}, "ArithmeticError: this model cannot be built"),
        ("tests.gated:Gate_", {}, "did you mean Gate"),
        ("no_such_task", {}, "no task named 'no_such_task'"),
    ],
)
def test_a_task_that_cannot_be_had_is_reported_once(
    launcher: RunLauncher, tmp_path: Path, task: str, settings: dict[str, Any], complaint: str
) -> None:
    with launcher.run(tmp_path, task=task, gated=False, **settings) as run:
        assert ended_as(run) == ("failed", 1)
        (error,) = run.all(events.UserError)
        assert complaint in error.error
        assert f"worker {error.worker} could not start: " in run.result().reason
        assert run.printed() == ""


def test_an_error_while_the_model_is_measured_does_not_cost_the_model(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, gated=False, unmeasurable=True) as run:
        assert ended_as(run) == ("failed", 1)
        (error,) = run.all(events.UserError)
        assert error.error == "ArithmeticError: this model cannot be measured"
        assert model_has_what_the_accounting_says(run)


def test_the_terminal_shows_a_crash_once_from_the_users_own_line_on(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.command(tmp_path, "tests.gated:Gated", "downpour", "task.crash_at=0", "--workers", "2") as run:
        assert run.ended() == 1
        shown = run.printed()
        assert shown.count("Traceback") == shown.count("one too many\n") == 1
        assert "tests/gated.py" in shown
        assert "work.py" not in shown


def test_a_terminal_that_was_closed_does_not_end_the_training(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.command(tmp_path, "tests.gated:Gated", "downpour", "--workers", "2", deaf=True) as run:
        assert run.ended() == 0
        assert len(list(run.directory.glob("*/model.safetensors"))) == 1
        assert run.printed() == ""


def test_what_the_users_code_prints_is_not_lost(launcher: RunLauncher, tmp_path: Path) -> None:
    with launcher.run(tmp_path, gated=False, samples=256, says="here") as run:
        assert ended_as(run) == ("finished", 0)
        assert run.printed().count("here") == 64
