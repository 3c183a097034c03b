"""The outcome of a run: a run that ended normally may still have failed or diverged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rainband.protocol.accounting import BatchAccounting
from rainband.runtimes.config import RunConfig

NOT_FINITE = "not finite"  # the reason for skipping a gradient with infinities or NaN
MANY = 0.05  # of all batches; a few at the start are usual with mixed precision


class DivergenceCheck(NamedTuple):
    skipped: int
    batches: int


def diverged(accounting: Mapping[str, Any]) -> DivergenceCheck | None:
    """Return the counts of skipped batches if many gradients were not finite, otherwise None."""
    skipped = accounting.get("skipped", {}).get(NOT_FINITE, 0)
    batches = accounting.get("batches", 0) - accounting.get("not_processed", 0)
    return DivergenceCheck(skipped, batches) if batches and skipped / batches >= MANY else None


class RunVerdict(NamedTuple):
    outcome: str  # finished, stopped, failed
    reason: str


def judged(outcome: str, reason: str, accounting: BatchAccounting | None, config: RunConfig) -> RunVerdict:
    """A run in which nothing was applied, or whose strategy returned before the data was done, has failed."""
    if outcome != "finished" or accounting is None:
        return RunVerdict(outcome, reason)
    skipped = sum(accounting.skipped.values())
    if skipped and not accounting.applied and not accounting.untracked_pushes:
        reasons = ", ".join(f"{number:,} {why}" for why, number in accounting.skipped.items())
        return RunVerdict("failed", f"nothing was learnt: every batch was skipped ({reasons}).{_hint(accounting)}")
    if accounting.not_processed and not config.script:  # a custom training loop may end early
        done = accounting.batches - accounting.not_processed
        return RunVerdict(
            "failed",
            f"the strategy {config.strategy} returned with {done:,} of {accounting.batches:,} batches done: "
            "its `run` must continue until worker.work_items() ends.",
        )
    return RunVerdict(outcome, reason)


def _hint(accounting: BatchAccounting) -> str:
    return " Try a smaller learning rate, and look for NaN in the data." if NOT_FINITE in accounting.skipped else ""
