"""A run that went to its end has not always come to anything: what is said of it, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import rainband
from rainband.cli.main import build_app
from rainband.errors import RainbandError
from rainband.protocol.accounting import BatchAccounting
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.result import judged
from rainband.strategies.downpour import Downpour
from rainband.strategy import Worker
from tests.broken_rules import Hoards, Loses, Repeats
from tests.test_run_script import Told

TASK = {"samples": 64, "batch_size": 4}  # 16 batches


@dataclass(frozen=True)
class Hasty(Downpour):
    """Does the first work item it gets, and returns."""

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))
            return


def config(strategy: str = "downpour", script: str = "", **task: object) -> RunConfig:
    servers = 0 if strategy == "single" else 1
    return RunConfig(
        task="tests.gated:Gated",
        task_settings={**TASK, **task},
        strategy=strategy,
        num_workers=2 if servers else 1,
        num_servers=servers,
        script=script,
    )


def accounting(
    applied: int, skipped: int = 0, reason: str = "not finite", untracked_pushes: int = 0
) -> BatchAccounting:
    by_reason = {reason: skipped} if skipped else {}
    return BatchAccounting(16, applied, by_reason, 0, 0, 16 - applied - skipped, 0, {}, applied, untracked_pushes)


def test_a_run_that_applied_something_is_what_the_coordinator_says() -> None:
    assert judged("finished", "", accounting(15, 1), config()) == ("finished", "")
    assert judged("stopped", "interrupted", accounting(3), config()) == ("stopped", "interrupted")
    assert judged("failed", "why", None, config()) == ("failed", "why")


def test_a_run_that_applied_nothing_has_failed_and_says_what_to_try() -> None:
    outcome, reason = judged("finished", "", accounting(0, 16), config())
    assert outcome == "failed"
    assert reason.startswith("the model has not changed: every batch was skipped (16 not finite). Try a smaller")
    assert judged("finished", "", accounting(0, 16, "too hard"), config()).reason.endswith("(16 too hard).")
    assert judged("finished", "", accounting(0, 16, untracked_pushes=1), config()).outcome == "finished"


def test_a_strategy_may_not_return_early_but_a_loop_of_ones_own_may() -> None:
    outcome, reason = judged("finished", "", accounting(3, 1), config("mylab:Mine"))
    assert (outcome, reason.partition(":")[0]) == ("failed", "the strategy mylab")
    assert "mylab:Mine returned after 4 of 16 batches" in reason
    assert judged("finished", "", accounting(3, 1), config(script="train.py")) == ("finished", "")


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_strategy_that_returns_before_the_data_is_done_ends_the_run_with_a_message(tmp_path: Path) -> None:
    hasty = msgspec.structs.replace(config("tests.test_result:Hasty"), directory=str(tmp_path))
    result = local.run(hasty, lambda event: None)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    done = result.accounting["applied"]
    assert f"tests.test_result:Hasty returned after {done} of 16 batches" in result.reason
    assert 0 < done < 16 and (result.accounting["lost"], result.accounting["applied_twice"]) == (0, 0)
    assert 0 < result.training_s < result.seconds
    assert result.samples_per_s == pytest.approx(result.samples / result.training_s)


# ---- a rule that does not apply each gradient once ----

DOES_NOT_BALANCE = "the batch accounting does not balance:"
BROKEN = {
    "Loses": ("64 of 320 batches were accepted, but neither applied nor skipped.", (256, 64, 0)),
    "Repeats": ("64 of 320 batches were applied more than once.", (384, 0, 64)),
    "Hoards": ("64 of 320 batches are still buffered.", (256, 0, 0)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_run_whose_rule_does_not_apply_each_gradient_once_fails_and_saves_its_model(
    kind: str, tmp_path: Path
) -> None:
    reason, (applied, lost, twice) = BROKEN[kind]
    where = ["--runtime", "sim", "--workers", "2", "--servers", "2", "--runs", str(tmp_path)]
    task = ["task.samples=1280", "task.batch_size=4", "task.epochs=1"]
    told = CliRunner().invoke(build_app(), ["train", "linear", f"tests.broken_rules:{kind}", "lr=0.001", *task, *where])
    output = " ".join(told.output.split())
    assert told.exit_code == 1 and f"{DOES_NOT_BALANCE} {reason}" in output
    assert f"{applied} of 320 applied, {lost} lost, {twice} applied twice" in output
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1


@pytest.mark.parametrize("strategy", [Loses, Repeats, Hoards])
def test_fit_raises_that_the_accounting_does_not_balance(strategy: type[Loses], tmp_path: Path) -> None:
    with pytest.raises(RainbandError, match=DOES_NOT_BALANCE):
        rainband.fit("quadratic", strategy(lr=0.01), workers=2, servers=1, epochs=1, runtime="sim", runs=tmp_path)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_processes_whose_rule_loses_batches_end_with_an_error(tmp_path: Path) -> None:
    loses = msgspec.structs.replace(config("tests.broken_rules:Loses"), directory=str(tmp_path))
    result = local.run(loses, lambda event: None)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert result.reason.startswith(f"{DOES_NOT_BALANCE} 3 of 16 batches were accepted, but neither")
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.processes
@pytest.mark.slow
def test_a_custom_loop_whose_rule_repeats_batches_ends_with_an_error(tmp_path: Path) -> None:
    words = ["--workers", "2", "--servers", "1", "--strategy", "tests.broken_rules:Repeats", "train.py"]
    told = Told(tmp_path, words)
    assert told.exit_code == 1 and f"{DOES_NOT_BALANCE} 8 of 40 batches were applied" in " ".join(told.err.split())
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
