"""Fully asynchronous updates: no worker waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


class ApplyOnArrival(Rule):
    """Apply every gradient when it arrives; reads never wait."""

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            block.apply(gradient, [push], push.absent)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return True  # its own pushes arrived before, on the same connection
