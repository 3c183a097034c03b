"""Delay compensation: a rule around any other that corrects gradients for the updates they have missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Push
    from rainband.rules.rule import RuleBlock


TINY = 1e-7  # added to the mean of squares before the square root


class Around(Rule):
    """A rule around another, `rule`: whatever a subclass does not override is that of the inner rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule


def _of_inner_rule(name: str) -> property:
    return property(lambda self: getattr(self.rule, name))


for _name in [name for name in vars(Rule) if not name.startswith("_")]:
    setattr(Around, _name, _of_inner_rule(_name))


# size: it inherits every hook of a rule
class Compensated(Around):
    """DC-ASGD (Zheng et al. 2017): instead of a gradient g that worker m computed at w_m, the inner rule gets

        g + strength * g * g * (w - w_m)              element by element

    the first-order estimate of the gradient at w, with g * g as the diagonal of the Hessian. The block stores a
    copy of the parameters that each worker was given: memory of one block per worker, two while a worker pulls ahead.

    The ratio of g * g to the Hessian changes during training. With a memory m > 0 (DC-ASGD-a) the strength adapts per
    element, and is small where gradients have been large:

        s <- m * s + (1 - m) * g * g                  from 0, with every gradient
        strength / sqrt(s + 1e-7)                     instead of strength
    """

    reads: Literal["admitted"] = "admitted"  # readers ask, so that what they read is known

    keeps_reads = True

    def __init__(self, rule: Rule, strength: float, memory: float = 0.0) -> None:
        super().__init__(rule)
        self.strength = strength
        self.memory = memory
        self.mean_square: Tensor | None = None  # running mean of squared gradients
        self.given: dict[int, dict[int, Tensor]] = {}  # worker -> version -> parameters it was given

    def state(self, given: Mapping[str, Tensor | float] | None = None) -> dict[str, Tensor | float]:
        mean_square = None if given is None else given.get("mean_square")
        if mean_square is not None:
            assert not isinstance(mean_square, float)
            self.mean_square = mean_square.clone()
        inner = self.rule.state(given)
        return inner if self.mean_square is None else {**inner, "mean_square": self.mean_square}

    def give(self, block: RuleBlock, reader: int) -> None:
        """Store a copy of the parameters that this reader is given."""
        copies = self.given.setdefault(reader, {})
        if block.version not in copies:
            copies[block.version] = block.buffer.at(block.version).clone()

    def copy_of(self, reader: int, version: int) -> Tensor | None:
        return self.given.get(reader, {}).get(version)

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        copies = self.given.get(push.worker, {})
        read = copies.get(push.version)
        for version in [version for version in copies if version < push.version]:
            del copies[version]  # it computes with a later one now
        if gradient is not None and self.memory:
            self._remember(gradient)
        if gradient is not None and read is not None and block.version != push.version:
            change = block.values - read  # in the precision of `values`: `read` may have a lower one
            gradient = self._scaled(change.mul_(gradient).mul_(gradient)).add_(gradient)
        self.rule.absorb(block, push, gradient)

    def _remember(self, gradient: Tensor) -> None:
        if self.mean_square is None:
            self.mean_square = gradient.new_zeros(gradient.shape)
        self.mean_square.mul_(self.memory).addcmul_(gradient, gradient, value=1 - self.memory)

    def _scaled(self, correction: Tensor) -> Tensor:
        """Scale the correction by the strength, or for each element by the adaptive strength."""
        if self.mean_square is None:
            return correction.mul_(self.strength)
        return correction.mul_(self.strength).div_((self.mean_square + TINY).sqrt_())

    def forget(self, block: RuleBlock, worker: int) -> None:
        self.given.pop(worker, None)
        self.rule.forget(block, worker)


def compensated(rule: Callable[[], Rule], strength: float, memory: float = 0.0) -> Callable[[], Rule]:
    """Return the rule with delay compensation; with strength 0 the rule itself."""
    if strength < 0:
        raise ValueError(f"compensation={strength}: choose 0 (none) or more, such as 0.04.")
    if not 0 <= memory < 1:
        raise ValueError(f"compensation_decay={memory}: choose 0 (always as strong) or more, below 1, such as 0.95.")
    if memory and not strength:
        raise ValueError(
            f"compensation_decay={memory} requires compensation: add compensation=2, for example, or omit it."
        )
    return rule if not strength else lambda: Compensated(rule(), strength, memory)
