"""The outcome of a run. A run that finished may still have failed, for example if no batch was applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rainband.protocol.accounting import NOT_FINITE, BatchAccounting
from rainband.runtimes.config import RunConfig

MANY = 0.05  # of all batches; mixed precision usually skips a few at the start


class DivergenceCheck(NamedTuple):
    skipped: int
    batches: int


def diverged(accounting: Mapping[str, Any]) -> DivergenceCheck | None:
    """Return how many batches were skipped because their gradients were not finite; None if these were few."""
    skipped = accounting.get("skipped", {}).get(NOT_FINITE, 0)
    batches = accounting.get("batches", 0) - accounting.get("not_processed", 0)
    return DivergenceCheck(skipped, batches) if batches and skipped / batches >= MANY else None


class RunVerdict(NamedTuple):
    outcome: str  # finished, stopped, failed
    reason: str


def judged(outcome: str, reason: str, accounting: BatchAccounting | None, config: RunConfig) -> RunVerdict:
    """Return the outcome; a run that applied no batch, or whose strategy returned too early, has failed."""
    if outcome != "finished" or accounting is None:
        return RunVerdict(outcome, reason)
    if accounting.samples is not None:
        reasons_of, applied = accounting.samples.skipped, accounting.samples.applied
    else:
        reasons_of, applied = accounting.skipped, accounting.applied
    skipped = sum(reasons_of.values())
    if skipped and not applied and not accounting.untracked_pushes:
        reasons = ", ".join(f"{number:,} {why}" for why, number in reasons_of.items())
        return RunVerdict(
            "failed", f"the model has not changed: every batch was skipped ({reasons}).{_hint(accounting)}"
        )
    if accounting.not_processed and not config.script and not reason:  # custom loops, and targets, may end early
        done = accounting.batches - accounting.not_processed
        return RunVerdict(
            "failed",
            f"the strategy {config.strategy} returned after {done:,} of {accounting.batches:,} batches: "
            "its `run` must continue until worker.work_items() ends.",
        )
    return RunVerdict(outcome, reason)


def _hint(accounting: BatchAccounting) -> str:
    return " Try a smaller learning rate, and check the data for NaN." if NOT_FINITE in accounting.skipped else ""
