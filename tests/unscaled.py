"""Any strategy with servers, made exact for the ledger: its rule chooses the pushes of an update, not their weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rainband.protocol.data_plan import PushId
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import Push, RoundChosen
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.rules.compensated import Around
from rainband.rules.rule import Rule, RuleBlock
from rainband.strategy import Requirements, ServerPart, Strategy, Worker
from tests.ledger import LR, Wrong


@dataclass(frozen=True)
class AtFullWeight(Strategy):
    """A strategy whose servers apply plain SGD to the sum of the gradients in an update (in rounds, to their mean)."""

    strategy: Strategy

    @property
    def requires(self) -> Requirements:
        return self.strategy.requires

    async def run(self, worker: Worker) -> None:
        await self.strategy.run(worker)

    def server(self, num_replicas: int) -> ServerPart:
        part = self.strategy.server(num_replicas)
        assert part is not None
        sgd = OptimizerSpec("sgd", {"lr": LR})
        return replace(part, rule=lambda: FullWeightRule(part.rule()), optimizer=sgd, schedule=Schedule())


class FullWeightRule(Around):
    """A rule whose updates are replaced by the pushed gradients themselves.

    The rule itself gets ones instead of the ledger's gradients, of which no two have an element in common: their
    median is zero. So whatever a rule takes of several gradients, only a rule that applies nothing applies zeros.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.pushed: dict[PushId, Tensor] = {}  # not applied yet

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.pushed[push.push_id] = gradient.clone()
        ones = None if gradient is None else torch.ones_like(gradient)
        super().absorb(self.watched(block), push, ones)
        if ones is not None:
            ones.fill_(torch.nan)  # it was only lent

    def flush(self, block: RuleBlock) -> None:
        super().flush(self.watched(block))

    def forget(self, block: RuleBlock, worker: int) -> None:
        super().forget(self.watched(block), worker)

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        super().choose(self.watched(block), named)

    def watched(self, block: RuleBlock) -> Any:
        return FullWeightBlock(block, self)


class FullWeightBlock:
    """A block, as the rule sees it."""

    def __init__(self, block: RuleBlock, rule: FullWeightRule) -> None:
        self.block = block
        self.rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        total, samples = torch.zeros_like(gradient), 0
        for push in pushes:
            if push.push_id in self.rule.pushed:
                in_rounds = self.rule.reads == "round"
                total.add_(self.rule.pushed.pop(push.push_id), alpha=push.samples if in_rounds else 1)
                samples += push.samples if in_rounds else 0
            elif not push.skip:
                raise Wrong(f"the rule applies {push.push_id} twice, or before it has arrived")
        if gradient.isnan().any():
            raise Wrong("the rule keeps a gradient that was lent to it: use gradient.clone()")
        if total.any() and not gradient.any():
            raise Wrong(f"the rule applies zeros for {[push.push_id for push in pushes]}: use block.drop")
        self.block.apply(total / samples if samples else total, pushes, absent)
