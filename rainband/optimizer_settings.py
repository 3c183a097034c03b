"""Settings that several strategies share: of an optimizer, and of asynchronous updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import OptimizerSpec, element_wise
from rainband.rules import compensated
from rainband.rules.rule import Rule
from rainband.strategy import ServerPart


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer and its learning-rate schedule. A strategy declares a field again to change its default."""

    lr: float = 0.1  # learning rate
    optimizer: str = "sgd"  # sgd, adagrad, adam, adamw, rmsprop, ... or module:Class
    momentum: float = 0.0  # for sgd and rmsprop
    weight_decay: float = 0.0  # L2 penalty, or decoupled weight decay with adamw
    lr_schedule: Shape = "constant"  # factor on the learning rate from the start of the run to its end
    warmup_fraction: float = 0.0  # learning-rate warm-up, as a fraction of the run

    def __post_init__(self) -> None:
        """Raise ValueError if a setting does not fit the optimizer, or the schedule."""
        self.spec()
        self.schedule()

    def spec(self, lr: float | None = None) -> OptimizerSpec:
        """Return the optimizer, with another learning rate if given; raise ValueError if a setting does not fit it."""
        return element_wise(self.optimizer, self.lr if lr is None else lr, self.momentum, self.weight_decay)

    def schedule(self) -> Schedule:
        return Schedule(self.lr_schedule, self.warmup_fraction)


@dataclass(frozen=True, kw_only=True)
class AsyncSettings(OptimizerSettings):
    """The settings of strategies in which servers apply gradients that may be stale."""

    compensation: float = 0.0  # strength of delay compensation (DC-ASGD), usually 0.04 to 2; 0 turns it off
    # decay of the running mean of squared gradients that scales the compensation (DC-ASGD-a), e.g. 0.95; 0: constant
    compensation_decay: float = 0.0
    guard: bool = True  # divergence guard: lower the learning rate or tighten the bound when the loss diverges

    @property
    def not_replayable(self) -> str:
        """Return why a recorded run cannot be replayed; empty: it can."""
        if not self.compensation:
            return ""
        return f"with compensation={self.compensation:g} depends on copies of parameters that are not recorded"

    def compensated_part(self, rule: Callable[[], Rule], lr: float | None = None) -> ServerPart:
        """Return the server part with this update rule and delay compensation."""
        rule = compensated(rule, self.compensation, self.compensation_decay)
        return ServerPart(rule, self.spec(lr), self.schedule())
