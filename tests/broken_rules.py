"""Strategies whose update rules do not apply each gradient once: every runtime must notice it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rainband.protocol.data_plan import num_batches
from rainband.protocol.messages import Push
from rainband.rules.rule import Rule, RuleBlock
from rainband.strategies.downpour import Downpour
from rainband.strategy import ServerPart


class FifthIsOther(Rule):
    """Apply gradients on arrival, but treat every fifth gradient of a block in another way."""

    def __init__(self) -> None:
        self.arrived = 0

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        self.arrived += 1
        if gradient is not None and self.arrived % 5:
            block.apply(gradient, [push], push.absent)
        elif gradient is not None:
            self.fifth(block, push, gradient)

    def fifth(self, block: RuleBlock, push: Push, gradient: Tensor) -> None:
        """Lose it."""


class FifthTwice(FifthIsOther):
    """Apply every fifth gradient twice."""

    def fifth(self, block: RuleBlock, push: Push, gradient: Tensor) -> None:
        block.apply(gradient, [push], push.absent)
        block.apply(gradient, [push], push.absent)


class FifthKept(FifthIsOther):
    """Buffer every fifth gradient, and never apply it."""

    kept = 0

    @property
    def buffered(self) -> int:
        return self.kept

    def fifth(self, block: RuleBlock, push: Push, gradient: Tensor) -> None:
        self.kept += num_batches(push.push_id)


@dataclass(frozen=True, kw_only=True)
class Loses(Downpour):
    """Downpour that loses every fifth gradient."""

    guard: bool = False
    rule: ClassVar[type[Rule]] = FifthIsOther

    def server(self, num_replicas: int) -> ServerPart:
        return replace(super().server(num_replicas), rule=self.rule)


class Repeats(Loses):
    """Downpour that applies every fifth gradient twice."""

    rule = FifthTwice


class Hoards(Loses):
    """Downpour that buffers every fifth gradient for ever."""

    rule = FifthKept
