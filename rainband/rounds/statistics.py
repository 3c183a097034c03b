"""Statistics of a batch that its workers exchange while they compute it, such as those of SyncBatchNorm.

They are numbers, exchanged in the round of the batch before its gradients. A member that is lost meanwhile is left out
of the exchanges that follow: then the statistics of this batch are those of the others' parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rainband.rounds.exchange import Outcome
from rainband.rounds.member import RoundMember
from rainband.rounds.membership import Waiting

MOST_NUMBERS = 1024  # of one exchange: they are in its header
TOGETHER = (None, "verdict")  # rounds that members share; in those of a trial, one computes the whole batch


class RoundStatistics:
    """One member's exchanges of statistics."""

    def __init__(
        self, member: RoundMember, run: Callable[[Waiting], Any], weight: Callable[[], float] | None = None
    ) -> None:
        """`run` goes through a part of the protocol, and waits. `weight` returns that of this member's gradients."""
        self.member = member
        self.run = run
        self.weight_of = weight
        self.own_weight = 0.0
        self.has_no_samples = False  # of the open part: it only exchanges

    @property
    def shares(self) -> bool:
        member = self.member
        return member.is_in and len(member.view.members) > 1 and member.round.part.trial in TOGETHER

    @property
    def counts(self) -> bool:
        if self.weight_of is None:
            return not self.has_no_samples
        return not self.member.round.is_cut or self.member.round.part.weight > 0  # otherwise it has another one's part

    @property
    def weight(self) -> float:
        return self.own_weight if self.weight_of is None else self.weight_of()

    def mean(self, numbers: Sequence[float], weight: float) -> tuple[Sequence[float], float] | None:
        began, found, total = self.member.clock(), list[float](), 0.0
        for first in range(0, len(numbers), MOST_NUMBERS):
            outcome: Outcome = self.run(self.member.mean_scalars(numbers[first : first + MOST_NUMBERS], weight))
            if not outcome.took_part:
                return None
            found += outcome.scalars
            total = outcome.weight
        self.member.round.waited_for_statistics(self.member.clock() - began)
        return found, total
