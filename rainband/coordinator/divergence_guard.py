"""The divergence guard: looks at the loss and at skipped gradients, and says when to tighten, lower or loosen.

Pure: it is told what was seen since the last look and returns a decision; the coordinator sends it to the servers.
Asynchronous training fails silently: stale gradients make the loss run away, and nobody sees why. The guard says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EXPLODED = 2.0  # times the way from the first loss to the best one, or to 0, above the best; all smoothed
SMOOTHING = 0.3  # the weight of a new look
NOT_FINITE_SHARE = 0.1  # of the gradients since the last look
NOT_FINITE_LEAST = 3
LOOKS_TO_SETTLE = 5  # after a decision, before the next
LOOKS_TO_LOOSEN = 3  # healthy ones, one after the other
STALENESS_PER_WORKER = 2.0  # updates missed in the mean: more is no sign of health
LOWERED = 0.5


@dataclass(frozen=True)
class GuardReading:
    """What was seen since the last look."""

    loss: float | None  # mean over the samples; none: no sample
    batches: int  # that were done
    not_finite: int  # of these, skipped because their gradient was not finite
    staleness_mean: float  # updates that gradients missed
    num_workers: int


@dataclass(frozen=True)
class Decision:
    """What to change. The bound is in the rule's own unit."""

    why: str
    lr_factor: float = 1.0  # on the learning rate that holds now
    bound: int | None = None  # none: as it is


class DivergenceGuard:
    """Watches one run."""

    def __init__(self) -> None:
        self.smoothed: float | None = None
        self.first: float | None = None
        self.best = math.inf
        self.settling = 0  # looks before it may decide again
        self.healthy = 0  # looks without a sign of trouble

    def look(self, look: GuardReading, bound: int | None, adapt: tuple[int, int] | None) -> Decision | None:
        """`bound` holds now; `adapt` is from where to where it may be moved, if it may be loosened at all."""
        fault_injector = self._fault_injector(look)
        self.settling = max(0, self.settling - 1)
        if fault_injector:
            self.healthy = 0
            return None if self.settling else self._tighten(fault_injector, bound, adapt)
        calm = look.loss is not None and look.staleness_mean <= STALENESS_PER_WORKER * look.num_workers
        self.healthy = self.healthy + 1 if calm else 0
        if adapt is None or bound is None or self.healthy < LOOKS_TO_LOOSEN or bound >= adapt[1]:
            return None
        self.healthy = 0
        return Decision(f"the loss is at {self._now():.3g}, its best is {self.best:.3g}", bound=bound + 1)

    def _fault_injector(self, look: GuardReading) -> str:
        if look.not_finite >= max(NOT_FINITE_LEAST, NOT_FINITE_SHARE * look.batches):
            return f"{look.not_finite} of {look.batches} gradients were not finite"
        if look.loss is None:
            return ""
        if not math.isfinite(look.loss):
            return "the loss is not finite"
        self.smoothed = look.loss if self.smoothed is None else self._now() + SMOOTHING * (look.loss - self._now())
        self.first = self.smoothed if self.first is None else self.first
        self.best = min(self.best, self.smoothed)
        # Not a multiple of the best: near 0 every batch is that, and a loss may be negative.
        if self.smoothed > self.best + EXPLODED * max(abs(self.first), self.first - self.best):
            return f"the loss is at {self.smoothed:.3g}, its best was {self.best:.3g}"
        return ""

    def _now(self) -> float:
        return math.nan if self.smoothed is None else self.smoothed

    def _tighten(self, why: str, bound: int | None, adapt: tuple[int, int] | None) -> Decision:
        """A smaller bound where there is one, and then a smaller learning rate."""
        self.settling = LOOKS_TO_SETTLE
        self.smoothed = None  # what comes now is judged by itself
        least = 0 if adapt is None else adapt[0]
        if bound is not None and bound > least:
            return Decision(why, bound=max(least, bound // 2))
        return Decision(why, lr_factor=LOWERED)
