"""A run that went to its end has not always come to anything: what is said of it, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rainband.protocol.accounting import BatchAccounting
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.result import judged
from rainband.strategies.downpour import Downpour
from rainband.strategy import Worker

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
