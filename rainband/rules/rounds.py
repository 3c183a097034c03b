"""Rounds: one update from all work items of a round, or from the first ones that arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.protocol.data_plan import BatchRange
from rainband.protocol.messages import RoundChosen
from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.data_plan import DataPlan, PushId
    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock

TOO_LATE = "too late for its round"


# size: it inherits every hook of a rule, and adds gradients in order
class MeanOfRound(Rule):
    """One update per round, with the mean over all samples of its K work items.

    Gradients are summed in the order of the work items, so that the result does not depend on the workers' speeds. A
    gradient that arrives before its turn is stored; the others are added at once. Up to K - 1 gradients are stored, if
    work item 0 is last: a sum of those at hand would have other bits than the sum in order.
    """

    reads: Literal["round"] = "round"

    def __init__(self) -> None:
        self.early: dict[int, tuple[Push, Tensor | None]] = {}
        self._begin()

    def _begin(self) -> None:
        self.total: Tensor | None = None
        self.pushes: list[Push] = []
        self.samples = 0
        self.absent: set[int] | None = None  # parameters that have no gradient in any work item so far
        self.turn = 0  # position of the work item that is added next

    def waiting_pushes(self) -> list[Push]:
        return [*self.pushes, *(push for push, _ in self.early.values())]

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


# size: it inherits every hook of a rule
class FirstArrivalsOfRound(Rule):
    """Rounds with backup workers: one update with the mean of the first `needed` work items; the others are dropped.

    Block 0 chooses the first that arrive, and its server announces them; all other blocks use the same ones.
    """

    reads: Literal["round"] = "round"
    chooses = True

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.arrived: dict[int, tuple[Push, Tensor | None]] = {}  # position in the current round -> its push
        self.this_round: RoundChosen | None = None  # the chosen work items of this round
        self.chosen: list[RoundChosen] = []  # by block 0, not announced to the others yet

    def waiting_pushes(self) -> list[Push]:
        return [push for push, _ in self.arrived.values()]

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        position = block.plan.position_of(push.push_id[0].portion)
        self.arrived[position] = push, None if gradient is None else gradient.clone()
        if block.index == 0 and len(self.arrived) == min(self.needed, block.plan.items_in_round(block.version)):
            self.this_round = RoundChosen(block.version, tuple(sorted(self.arrived)))
            self.chosen.append(self.this_round)
        self._finish_if_complete(block)

    def take_chosen(self) -> list[RoundChosen]:
        chosen, self.chosen = self.chosen, []
        return chosen

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        """Use the work items that block 0 has chosen."""
        if block.index and named.round == block.version:
            self.this_round = named
            self._finish_if_complete(block)

    def _finish_if_complete(self, block: RuleBlock) -> None:
        if self.this_round is None or any(position not in self.arrived for position in self.this_round.positions):
            return
        named, mean = self.this_round, MeanOfRound()
        for position in named.positions:
            mean._add(*self.arrived.pop(position))
        late = range(block.plan.items_in_round(named.round))
        block.drop([_work_item(block.plan, named.round, j) for j in late if j not in named.positions], TOO_LATE)
        self.arrived, self.this_round = {}, None
        mean._finish(block)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version


def _work_item(plan: DataPlan, round_: int, position: int) -> PushId:
    """Return the push ID of one work item of a round."""
    epoch, inside = divmod(round_, plan.rounds_per_epoch)
    group, k = divmod(inside, plan.portion_batches)
    portion = epoch * plan.portions_per_epoch + group * plan.items_per_round + position
    return (BatchRange(portion, k, k + 1, 0),)
