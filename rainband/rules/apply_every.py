"""One update for every `count` gradients, from any workers: between asynchronous and synchronous training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Push
    from rainband.rules.rule import RuleBlock


# size: it inherits every hook of a rule
class ApplyEvery(Rule):
    """Average every `count` gradients into one update; stale gradients may count less.

    The weight of a gradient is 1 / count, or 1 / (count * missed) if `by_staleness` and it missed any updates. The
    rest at the end of the run is applied with the same weights, so that every gradient counts alike.

    With `count_for`, the count is a function of the number of active workers: when one is lost, joins or returns, it
    changes from the next update on.
    """

    gradients_per_update: int = 1

    def __init__(
        self,
        count: int,
        by_staleness: bool = False,
        num_workers: int = 0,
        count_for: Callable[[int], int] | None = None,
    ) -> None:
        self.gradients_per_update = count
        self.by_staleness = by_staleness
        self.members = set(range(num_workers))
        self.count_for = count_for
        self._begin()

    def _begin(self) -> None:
        if self.count_for is not None and self.members:
            self.gradients_per_update = self.count_for(len(self.members))
        self.total: Tensor | None = None
        self.pushes: list[Push] = []
        self.absent: set[int] | None = None  # parameters that have no gradient in any of them

    def waiting_pushes(self) -> list[Push]:
        return self.pushes

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        self._add_member(push.worker)
        if gradient is None:
            return
        missed = block.version - push.version
        weight = (
            1 / (self.gradients_per_update * max(1, missed)) if self.by_staleness else 1 / self.gradients_per_update
        )
        if self.gradients_per_update == 1:
            block.apply(gradient if weight == 1 else gradient * weight, [push], push.absent)
            return
        self.pushes.append(push)
        self.absent = set(push.absent) if self.absent is None else self.absent & set(push.absent)
        self.total = gradient * weight if self.total is None else self.total.add_(gradient, alpha=weight)
        if len(self.pushes) == self.gradients_per_update:
            self.flush(block)

    def forget(self, block: RuleBlock, worker: int) -> None:
        """Expect fewer gradients per update; what the worker pushed stays."""
        self.members.discard(worker)
        if not self.pushes:
            self._begin()

    def _add_member(self, worker: int) -> None:
        if worker not in self.members:
            self.members.add(worker)
            if not self.pushes:
                self._begin()

    def flush(self, block: RuleBlock) -> None:
        if self.total is not None:
            block.apply(self.total, self.pushes, self.absent or ())
            self._begin()
