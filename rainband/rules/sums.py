"""Means of gradients that may arrive as sums, because inner servers of a tree have added them on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


# size: it inherits every hook of a rule
class MeanOfSums(Rule):
    """One update with the mean over all samples, when enough gradients have arrived, each by itself or in a sum."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.total: Tensor | None = None  # of each gradient times its samples, in the order of arrival
        self.pushes: list[Push] = []
        self.absent: set[int] = set()  # parameters that have no gradient in any of them

    def waiting_pushes(self) -> list[Push]:
        return self.pushes

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        self.absorb_sum(block, [push], None if gradient is None else gradient * push.samples, push.absent)

    def absorb_sum(
        self, block: RuleBlock, pushes: Sequence[Push], total: Tensor | None, absent: Sequence[int] = ()
    ) -> None:
        self._take(pushes)
        if total is not None and self.total is None:
            self.total, self.absent = total, set(absent)
        elif total is not None and self.total is not None:
            self.total.add_(total)
            self.absent &= set(absent)
        if self.is_due(block):
            self._update(block)

    def _take(self, pushes: Sequence[Push]) -> None:
        self.pushes += pushes

    def is_due(self, block: RuleBlock) -> bool:
        """Return True if an update is to be made of what has arrived."""
        raise NotImplementedError

    def _update(self, block: RuleBlock) -> None:
        total, pushes, absent = self.total, self.pushes, self.absent
        self._begin()
        if total is None:
            block.advance(pushes)
            return
        pushes.sort(key=_by_batch)  # the first one's settings are used: those of the same worker in every run
        block.apply(total.div_(sum(push.samples for push in pushes)), pushes, absent)


def _by_batch(push: Push) -> tuple[int, int]:
    return (push.push_id[0].portion, push.push_id[0].first) if push.push_id else (-1, push.worker)


# size: it inherits every hook of a rule
class MeanOfRoundSums(MeanOfSums):
    """One update per round, of all its work items."""

    reads: Literal["round"] = "round"

    def is_due(self, block: RuleBlock) -> bool:
        return len(self.pushes) == block.plan.items_in_round(block.version)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version


# size: it inherits every hook of a rule
class MeanOfArrivals(MeanOfSums):
    """One update for every c gradients or a few more, from any workers; c follows the number of active workers."""

    reads: Literal["any", "admitted"] = "any"

    def __init__(self, num_workers: int, count_for: Callable[[int], int], asked: bool = False) -> None:
        """`asked`: readers ask, because what they can read is that of an inner server."""
        super().__init__()
        if asked:
            self.reads = "admitted"
        self.members = set(range(num_workers))
        self.count_for = count_for

    def _take(self, pushes: Sequence[Push]) -> None:
        self.members.update(push.worker for push in pushes)
        self.pushes += [push for push in pushes if not push.skip]

    def is_due(self, block: RuleBlock) -> bool:
        return len(self.pushes) >= self.count_for(max(1, len(self.members)))

    def forget(self, block: RuleBlock, worker: int) -> None:
        """Expect fewer gradients per update; what the worker pushed stays."""
        self.members.discard(worker)
        if self.pushes and self.is_due(block):
            self._update(block)

    def flush(self, block: RuleBlock) -> None:
        if self.pushes:
            self._update(block)
