"""Rounds: one update for all cells of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.portions import num_batches

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.messages import Pull, Push
    from rainband.types import Block


class MeanOfRound:
    """Rounds: one update with the mean over all samples of the K cells of a round, whoever computed them.

    The sum runs in cell order, so that the bits do not depend on who was faster. A cell that comes before its turn
    is kept aside; the others go straight into the sum.
    """

    reads: Literal["round"] = "round"

    def __init__(self) -> None:
        self.early: dict[int, tuple[Push, Tensor | None]] = {}
        self._begin()

    def _begin(self) -> None:
        self.total: Tensor | None = None
        self.pushes: list[Push] = []
        self.samples = 0
        self.absent: set[int] | None = None  # parameters without a gradient in every cell so far
        self.turn = 0  # the cell that is added next

    @property
    def buffered(self) -> int:
        waiting = [*self.pushes, *(push for push, _ in self.early.values())]
        return sum(num_batches(push.name) for push in waiting if not push.skip)

    def absorb(self, block: Block, push: Push, gradient: Tensor | None) -> None:
        column = block.plan.column_of(push.name[0].portion)
        if column != self.turn:
            self.early[column] = push, None if gradient is None else gradient.clone()
            return
        self._add(push, gradient)
        while self.turn in self.early:
            self._add(*self.early.pop(self.turn))
        if self.turn == block.plan.cells_in_round(block.version):
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

    def _finish(self, block: Block) -> None:
        if self.total is None:
            block.advance(self.pushes)
        else:
            block.apply(self.total.div_(self.samples), self.pushes, self.absent or ())
        self._begin()

    def admits(self, block: Block, pull: Pull, reader: int) -> bool:
        return block.version >= pull.point

    def forget(self, block: Block, worker: int) -> None:
        """A round is made of cells, not of workers: whoever is free computes what is missing."""

    def flush(self, block: Block) -> None:
        """A round is applied whole or not at all."""
