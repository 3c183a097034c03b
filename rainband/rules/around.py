"""A rule around another: it delegates everything that a subclass does not override."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push, RoundChosen, StalenessLimit
    from rainband.rules.rule import RuleBlock


class Around(Rule):
    """Delegates every call to `rule`. A test checks that no method of Rule is missing here."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    @property
    def clocked(self) -> bool:
        return self.rule.clocked

    @property
    def chooses(self) -> bool:
        return self.rule.chooses

    @property
    def buffered(self) -> int:
        return self.rule.buffered

    @property
    def gradients_per_update(self) -> int | None:
        return self.rule.gradients_per_update

    @property
    def bound(self) -> int | None:
        return self.rule.bound

    @property
    def keeps_reads(self) -> bool:
        return self.rule.keeps_reads

    @property
    def reads(self) -> Literal["any", "admitted", "round"]:
        return self.rule.reads

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        self.rule.absorb(block, push, gradient)

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        return self.rule.admits(block, pull, reader)

    def forget(self, block: RuleBlock, worker: int) -> None:
        self.rule.forget(block, worker)

    def flush(self, block: RuleBlock) -> None:
        self.rule.flush(block)

    def retune(self, bound: int) -> None:
        self.rule.retune(bound)

    def limit(self) -> StalenessLimit | None:
        return self.rule.limit()

    def enter(self, block: RuleBlock, worker: int, base: int) -> None:
        self.rule.enter(block, worker, base)

    def tick(self, block: RuleBlock, worker: int, clock: int) -> None:
        self.rule.tick(block, worker, clock)

    def clock_of(self, worker: int) -> int:
        return self.rule.clock_of(worker)

    def holder(self, block: RuleBlock, pull: Pull, reader: int) -> int | None:
        return self.rule.holder(block, pull, reader)

    def take_chosen(self) -> list[RoundChosen]:
        return self.rule.take_chosen()

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        self.rule.choose(block, named)

    def give(self, block: RuleBlock, reader: int) -> None:
        self.rule.give(block, reader)

    def copy_of(self, reader: int, version: int) -> Tensor | None:
        return self.rule.copy_of(reader, version)
