"""Evaluations of full-batch strategies: the sum of gradients at parameters that only commands change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


class SumGradients(Rule):
    """Adds every work item to the block's gradient once, from the worker that delivers it first."""

    reads: Literal["admitted"] = "admitted"

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            block.accumulate(gradient, push)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version
