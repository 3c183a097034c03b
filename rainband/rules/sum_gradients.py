"""Full-batch gradients: work items are summed, at parameters that only commands of the coordinator change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


class SumGradients(Rule):
    """Add each work item to the sum once: its first delivery counts."""

    reads: Literal["admitted"] = "admitted"

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            block.accumulate(gradient, push)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return block.version >= pull.at_version
