"""`rainband run train.py` with its defaults: workers share each batch, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.processes import RunLauncher
from tests.test_run_script import ENDLESS, SCRIPT, Told

SAMPLES = 2 * 160  # of two epochs
STEPS = "import os, signal\nsteps = 0\n" + SCRIPT.replace(
    "            {inside}", "            steps += 1\n            {inside}"
)
AFTER = "print('steps', steps)"


def account(told: Told) -> Any:
    return told.json["accounting"]["samples"]


def model_of(told: Told) -> list[float]:
    saved = safetensors.torch.load_file(Path(told.json["directory"]) / "model.safetensors")
    return sorted(round(tensor.double().sum().item(), 6) for tensor in saved.values())


@pytest.fixture(scope="module")
def alone(launcher: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the sums of the parameters that one plain process trains."""
    return Told(launcher, tmp_path_factory.mktemp("alone"), ["train.py"], STEPS, after=AFTER).sums[0]


@pytest.fixture(scope="module")
def of_three(launcher: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return a run of three workers."""
    words = ["--workers", "3", "--parts", "equal", "train.py"]
    return Told(launcher, tmp_path_factory.mktemp("of_three"), words, STEPS, inside="run.log(loss=2.0)", after=AFTER)


@pytest.mark.processes
def test_three_workers_have_the_result_of_one_process(alone: list[float], of_three: Told) -> None:
    told = of_three
    assert told.exit_code == 0, told.err
    assert told.sums[0] == told.sums[1] == told.sums[2] == pytest.approx(alone, abs=1e-5)
    assert model_of(told) == sorted(told.sums[0])
    assert told.err.count("steps 40") == 3
    samples = account(told)
    assert (samples["applied"], samples["total"], samples["rounds"]) == (SAMPLES, SAMPLES, 40)
    assert (samples["skipped"], samples["carried_over"], samples["not_seen"]) == ({}, 0, 0)
    assert told.json["samples"] == SAMPLES and "staleness" not in told.err


@pytest.mark.processes
@pytest.mark.parametrize("killed", ["run.rank == 1", "run.rank != 1"], ids=["one", "all but one"])
def test_survivors_of_a_kill_make_the_steps_of_one_process(
    launcher: RunLauncher, killed: str, alone: list[float], tmp_path: Path
) -> None:
    inside = f"if {killed} and steps == 7: os.kill(os.getpid(), signal.SIGKILL)"
    told = Told(launcher, tmp_path, ["--workers", "3", "train.py"], STEPS, inside=inside, after=AFTER)
    assert told.exit_code == 0, told.err
    survivors = 2 if killed == "run.rank == 1" else 1
    assert told.err.count("steps 40") == len(told.sums) == survivors
    assert told.sums[0] == pytest.approx(alone, abs=0.02)  # some samples came a batch later
    assert model_of(told) == sorted(told.sums[0])
    samples = account(told)
    assert (samples["applied"], samples["rounds"], samples["skipped"]) == (SAMPLES, 40, {})
    assert samples["carried_over"] > 0
    assert told.err.count("(killed by signal 9") == 3 - survivors


STOPPED = """if run.rank == 1 and steps == 7 and not os.fork():
                worker = os.getppid()
                os.kill(worker, signal.SIGSTOP)
                import time; time.sleep(4)
                os.kill(worker, signal.SIGCONT)
                os._exit(0)
            import time; time.sleep(0.2 * (steps < 40))"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_is_paused_from_outside_is_excluded_and_returns(
    launcher: RunLauncher, alone: list[float], tmp_path: Path
) -> None:
    words = ["--workers", "2", "--failure-timeout", "1", "train.py"]
    told = Told(launcher, tmp_path, words, STEPS, inside=STOPPED, after=AFTER)
    assert told.exit_code == 0, told.err
    assert "lost worker 1 (no heartbeat" in told.err and "worker 1 is active again" in told.err
    assert told.sums[0] == told.sums[1] == pytest.approx(alone, abs=0.02)
    assert account(told)["applied"] == SAMPLES and account(told)["transfers"] == 2


@pytest.mark.processes
def test_an_error_on_one_worker_ends_the_run_and_the_model_is_saved(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(
        launcher, tmp_path, ["--workers", "2", "train.py"], STEPS, inside="run.rank == 1 and steps == 7 and 1 / 0"
    )
    assert told.exit_code == 1
    assert "worker 1 failed at step 8:" in told.err and "ZeroDivisionError" in told.err
    assert len(model_of(told)) == 4


@pytest.mark.processes
def test_models_that_differ_between_workers_are_refused(launcher: RunLauncher, tmp_path: Path) -> None:
    script = STEPS.replace("model = net()", "model = net() if rainband.rank() else torch.nn.Linear(3, 1)")
    told = Told(launcher, tmp_path, ["--workers", "2", "train.py"], script)
    assert told.exit_code == 1
    assert "does not fit this run: the model is" in told.json["reason"]


@pytest.mark.processes
def test_a_loop_that_uses_no_loader_of_the_run_is_reported(launcher: RunLauncher, tmp_path: Path) -> None:
    loader = "torch.utils.data.DataLoader(data, batch_size=options.batch)"
    script = STEPS.replace("run.batches(data, batch_size=options.batch)", loader)
    told = Told(launcher, tmp_path, ["--workers", "2", "train.py"], script)
    assert told.exit_code == 0, told.err
    assert told.err.count("this loop uses its own data loader, so every worker trains on all of the data") == 1
    assert "samples are not counted, because the loop has its own data loader" in told.err
    assert told.sums[0] == told.sums[1]


WAITED_FOR = """if run.rank == 1 and steps == 7:
                import time; time.sleep(8)"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_for_which_the_others_wait_is_named_and_then_left_out(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(launcher, tmp_path, ["--workers", "2", "train.py"], STEPS, inside=WAITED_FOR)
    assert told.exit_code == 0, told.err
    assert "for worker 1. If it evaluates or saves while the others do not, write `with run.paused():`" in told.err
    words = ["--workers", "2", "--failure-timeout", "1", "--stuck-timeout", "2", "train.py"]
    told = Told(launcher, tmp_path, words, STEPS, inside=WAITED_FOR)
    assert told.exit_code == 0, told.err
    assert "worker 1 is inactive: heartbeats, but the others have waited" in told.err
    assert account(told)["applied"] == SAMPLES


@pytest.mark.processes
def test_the_events_of_a_run_tell_its_length(of_three: Told) -> None:
    lines = (Path(of_three.json["directory"]) / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (plan,) = [event for event in events if event["event"] == "PlanMade"]
    assert (plan["num_samples"], plan["batch_size"], plan["epochs"], plan["num_batches"]) == (160, 8, 2, 40)
    progress = [event for event in events if event["event"] == "Progress"]
    assert (progress[-1]["samples_done"], progress[-1]["samples"]) == (SAMPLES, SAMPLES)
    assert {event["loss"] for event in progress} <= {2.0, None}
    assert (events[0]["shares_batches"], events[0]["num_servers"]) == (True, 0)


@pytest.mark.processes
def test_a_loop_that_ends_with_run_stop_leaves_one_model(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(launcher, tmp_path, ["--workers", "3", "train.py"], ENDLESS, inside="run.stop('converged')")
    assert (told.exit_code, told.err.count("stopped: converged")) == (0, 3), told.err
    assert told.sums[0] == told.sums[1] == told.sums[2]
    assert model_of(told) == sorted(told.sums[0])
