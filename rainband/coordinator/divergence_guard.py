"""The divergence guard: watches the loss and skipped gradients, and lowers the learning rate or adapts the bound.

Stale gradients can make asynchronous training diverge without any error. The guard acts at every tick of the
coordinator, and each action is an event that gives the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rainband.coordinator.reporting import Reporting
from rainband.coordinator.state import CoordinatorOutput, Phase, RunState
from rainband.protocol import events
from rainband.protocol.messages import AdjustRule
from rainband.strategy import Requirements

# Diverged: the smoothed loss is above its best by more than this many times max(|first|, first - best).
DIVERGED = 2.0
SMOOTHING = 0.3  # the weight of a new loss
NOT_FINITE_FRACTION = 0.1  # of the gradients since the last check
NOT_FINITE_LEAST = 3
CHECKS_TO_SETTLE = 5  # after a decision, before the next
CHECKS_TO_LOOSEN = 3  # consecutive healthy ones
LOWERED = 0.5  # factor on the learning rate


@dataclass(frozen=True)
class GuardReading:
    """The measurements since the last check."""

    loss: float | None  # mean over the samples; none: no sample was processed
    batches: int  # that were processed
    not_finite: int  # of these, skipped because their gradient was not finite


@dataclass(frozen=True)
class Decision:
    """A change and its reason. The bound is in the unit of the rule."""

    why: str
    lr_factor: float = 1.0  # on the current learning rate
    bound: int | None = None  # none: unchanged


class DivergenceGuard:
    """Decides for one run. Pure: it receives measurements and returns decisions."""

    def __init__(self) -> None:
        self.smoothed: float | None = None
        self.first: float | None = None
        self.best = math.inf
        self.settling = 0  # checks before it may decide again
        self.healthy = 0  # consecutive checks without a problem

    def check(self, reading: GuardReading, bound: int | None, bound_range: tuple[int, int] | None) -> Decision | None:
        """Decide. `bound` is the current one; `bound_range` are its limits, if it may be loosened at all."""
        problem = self._problem(reading)
        self.settling = max(0, self.settling - 1)
        if problem:
            self.healthy = 0
            return None if self.settling else self._tighten(problem, bound, bound_range)
        self.healthy = 0 if reading.loss is None else self.healthy + 1
        if bound_range is None or bound is None or self.healthy < CHECKS_TO_LOOSEN or bound >= bound_range[1]:
            return None
        self.healthy = 0
        return Decision(f"the loss is at {self._now():.3g}, its best is {self.best:.3g}", bound=bound + 1)

    def _problem(self, reading: GuardReading) -> str:
        if reading.not_finite >= max(NOT_FINITE_LEAST, NOT_FINITE_FRACTION * reading.batches):
            return f"{reading.not_finite} of {reading.batches} gradients were not finite"
        if reading.loss is None:
            return ""
        if not math.isfinite(reading.loss):
            return "the loss is not finite"
        self.smoothed = (
            reading.loss if self.smoothed is None else self._now() + SMOOTHING * (reading.loss - self._now())
        )
        self.first = self.smoothed if self.first is None else self.first
        self.best = min(self.best, self.smoothed)
        # Not a multiple of the best: near 0 every batch would exceed it, and a loss may be negative.
        if self.smoothed > self.best + DIVERGED * max(abs(self.first), self.first - self.best):
            return f"the loss is at {self.smoothed:.3g}, its best was {self.best:.3g}"
        return ""

    def _now(self) -> float:
        return math.nan if self.smoothed is None else self.smoothed

    def _tighten(self, why: str, bound: int | None, bound_range: tuple[int, int] | None) -> Decision:
        """Decide for a smaller bound if there is one, otherwise for a smaller learning rate."""
        self.settling = CHECKS_TO_SETTLE
        self.smoothed = None  # the new settings start with a fresh average
        least = 0 if bound_range is None else bound_range[0]
        if bound is not None and bound > least:
            return Decision(why, bound=max(least, bound // 2))
        return Decision(why, lr_factor=LOWERED)


class GuardActions:
    """Applies the guard's decisions to a run."""

    def __init__(self, state: RunState, reporting: Reporting, requires: Requirements) -> None:
        self.state = state
        self.requires = requires
        self.reporting = reporting
        self.guard = DivergenceGuard()
        self.decisions = 0
        self.lr_factor = 1.0
        self.last = (0, 0)  # batches processed, and of these not finite, at the last check

    def check(self, now: float) -> list[CoordinatorOutput]:
        """Check what happened since the last call, and adjust the servers' rules if needed."""
        state, reports = self.state, self.state.reports()
        custom_optimizer = state.join is not None and state.join.optimizer is not None
        if state.phase is not Phase.RUNNING or not reports or not self.requires.guard or custom_optimizer:
            return []
        done, not_finite = state.batches_done(), self.reporting.not_finite()
        reading = GuardReading(
            loss=self.reporting.loss,
            batches=done - self.last[0],
            not_finite=not_finite - self.last[1],
        )
        self.last = done, not_finite
        bounds = [report.bound for report in reports if report.bound is not None]
        decision = self.guard.check(reading, min(bounds, default=None), self.requires.bound_range)
        return [] if decision is None else self._adjust(decision, min(bounds, default=None), now)

    def _adjust(self, decision: Decision, bound: int | None, now: float) -> list[CoordinatorOutput]:
        self.decisions += 1
        self.lr_factor *= decision.lr_factor
        bound = bound if decision.bound is None else decision.bound
        self.state.events.append(events.GuardActed(at_s=now, why=decision.why, lr_factor=self.lr_factor, bound=bound))
        adjust = AdjustRule(self.decisions, decision.lr_factor, decision.bound)
        return [CoordinatorOutput(s.peer, adjust) for s in self.state.servers.values()]
