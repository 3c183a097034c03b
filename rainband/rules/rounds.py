"""Rounds: one update for all work items of a round, or for the first arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.protocol.data_plan import BatchRange, num_batches
from rainband.protocol.messages import RoundChosen
from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.data_plan import DataPlan, PushId
    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock

TOO_LATE = "too late for its round"


class MeanOfRound(Rule):
    """One update with the mean over all samples of the K work items of a round.

    The sum runs in the order of work items, so that the result does not depend on arrival times. A work item that
    arrives before its turn is buffered; the others are added at once.
    """

    reads: Literal["round"] = "round"

    def __init__(self) -> None:
        self.early: dict[int, tuple[Push, Tensor | None]] = {}
        self._begin()

    def _begin(self) -> None:
        self.total: Tensor | None = None
        self.pushes: list[Push] = []
        self.samples = 0
        self.absent: set[int] | None = None  # parameters without a gradient in every work item so far
        self.turn = 0  # position of the work item that is added next

    @property
    def buffered(self) -> int:
        waiting = [*self.pushes, *(push for push, _ in self.early.values())]
        return sum(num_batches(push.push_id) for push in waiting if not push.skip)

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        position = block.plan.position_of(push.push_id[0].portion)
        if position != self.turn:
            self.early[position] = push, None if gradient is None else gradient.clone()
            return
        self._add(push, gradient)
        while self.turn in self.early:
            self._add(*self.early.pop(self.turn))
        if self.turn == block.plan.items_in_round(block.version):
            self._finish(block)

    def _add(self, push: Push, gradient: Tensor | None) -> None:
        self.turn += 1
        self.pushes.append(push)
        if gradient is None:
            return
        self.samples += push.samples
        self.absent = set(push.absent) if self.absent is None else self.absent & set(push.absent)
        if self.total is None:
            self.total = gradient * push.samples
        else:
            self.total.add_(gradient, alpha=push.samples)

    def _finish(self, block: RuleBlock) -> None:
        if self.total is None:
            block.advance(self.pushes)
        else:
            block.apply(self.total.div_(self.samples), self.pushes, self.absent or ())
        self._begin()

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version


class FirstArrivalsOfRound(Rule):
    """Rounds with backup workers: one update with the mean of the first `needed` work items; the others are dropped.

    Block 0 chooses the first arrivals; all other blocks then use the same ones.
    """

    reads: Literal["round"] = "round"
    chooses = True

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.come: dict[int, tuple[Push, Tensor | None]] = {}  # column -> of the round at hand
        self.named: RoundChosen | None = None  # the work items of this round
        self.chosen: list[RoundChosen] = []  # by this block, if it is block 0, and not told to the others yet

    @property
    def buffered(self) -> int:
        return sum(num_batches(push.push_id) for push, _ in self.come.values() if not push.skip)

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        position = block.plan.position_of(push.push_id[0].portion)
        self.come[position] = push, None if gradient is None else gradient.clone()
        if block.index == 0 and len(self.come) == min(self.needed, block.plan.items_in_round(block.version)):
            self.named = RoundChosen(block.version, tuple(sorted(self.come)))
            self.chosen.append(self.named)
        self._finish_if_all_are_here(block)

    def take_chosen(self) -> list[RoundChosen]:
        chosen, self.chosen = self.chosen, []
        return chosen

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        """Use the work items that block 0 has chosen for a round."""
        if block.index and named.round == block.version:
            self.named = named
            self._finish_if_all_are_here(block)

    def _finish_if_all_are_here(self, block: RuleBlock) -> None:
        if self.named is None or any(position not in self.come for position in self.named.positions):
            return
        named, mean = self.named, MeanOfRound()
        for position in named.positions:
            mean._add(*self.come.pop(position))
        late = range(block.plan.items_in_round(named.round))
        block.drop([_work_item(block.plan, named.round, j) for j in late if j not in named.positions], TOO_LATE)
        self.come, self.named = {}, None
        mean._finish(block)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version


def _work_item(plan: DataPlan, round_: int, position: int) -> PushId:
    """Return the push ID of one work item of a round."""
    epoch, inside = divmod(round_, plan.rounds_per_epoch)
    group, k = divmod(inside, plan.portion_batches)
    portion = epoch * plan.portions_per_epoch + group * plan.items_per_round + position
    return (BatchRange(portion, k, k + 1, 0),)
