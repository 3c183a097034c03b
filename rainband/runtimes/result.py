"""What a run came to: one that went to its end has not always come to anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rainband.protocol.accounting import Books
from rainband.runtimes.config import RunConfig

NOT_FINITE = "not finite"  # the books' word for a gradient with infinities or NaN
MANY = 0.05  # of all batches; a few at the start are usual with mixed precision


class Diverged(NamedTuple):
    skipped: int
    batches: int


def diverged(books: Mapping[str, Any]) -> Diverged | None:
    """How many batches were skipped because their gradients were not finite; none where these were few."""
    skipped = books.get("skipped", {}).get(NOT_FINITE, 0)
    batches = books.get("batches", 0) - books.get("not_done", 0)
    return Diverged(skipped, batches) if batches and skipped / batches >= MANY else None


class Verdict(NamedTuple):
    outcome: str  # finished, stopped, failed
    reason: str


def judged(outcome: str, reason: str, books: Books | None, config: RunConfig) -> Verdict:
    """A run in which nothing was applied, or whose strategy returned before the data was done, has failed."""
    if outcome != "finished" or books is None:
        return Verdict(outcome, reason)
    skipped = sum(books.skipped.values())
    if skipped and not books.applied and not books.extras:
        reasons = ", ".join(f"{number:,} {why}" for why, number in books.skipped.items())
        return Verdict("failed", f"nothing was learnt: every batch was skipped ({reasons}).{_hint(books)}")
    if books.not_done and not config.script:  # a loop of the user's own may end when it likes
        done = books.batches - books.not_done
        return Verdict(
            "failed",
            f"the strategy {config.strategy} returned with {done:,} of {books.batches:,} batches done: "
            "its `run` must go on until worker.cells() ends.",
        )
    return Verdict(outcome, reason)


def _hint(books: Books) -> str:
    return " Try a smaller learning rate, and look for NaN in the data." if NOT_FINITE in books.skipped else ""
