"""What a run came to: one that went to its end has not always come to anything."""

from __future__ import annotations

from typing import NamedTuple

from rainband.books import Books
from rainband.worlds.config import RunConfig


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
    return " Try a smaller learning rate, and look for NaN in the data." if "not finite" in books.skipped else ""
