"""Fully asynchronous: nobody waits, nothing is kept back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


class ApplyOnArrival(Rule):
    """Fully asynchronous: every gradient is applied when it comes, everyone reads what there is."""

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            block.apply(gradient, [push], push.absent)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return True  # its own pushes came before on the same connection; one that was refused ticks no clock
