"""Lets the guard look at the loss while it trains, and tells the servers what it decides."""

from __future__ import annotations

from rainband.coordinator.divergence_guard import Decision, DivergenceGuard, GuardReading
from rainband.coordinator.reporting import Reporting
from rainband.coordinator.state import CoordinatorOutput, RunState
from rainband.protocol import events
from rainband.protocol.accounting import staleness_so_far
from rainband.protocol.messages import AdjustRule
from rainband.strategy import Requirements


class GuardActions:
    """Against divergence: smaller steps, a tighter bound."""

    def __init__(self, state: RunState, accounts: Reporting, requires: Requirements) -> None:
        self.state = state
        self.requires = requires
        self.accounts = accounts
        self.guard = DivergenceGuard()
        self.decisions = 0
        self.lr_factor = 1.0
        self.seen = (0, 0)  # batches done, and of these not finite, at the guard's last look

    def look(self, now: float) -> list[CoordinatorOutput]:
        """At what has come since the last look."""
        state, reports = self.state, self.state.reports()
        custom_optimizer = state.join is not None and state.join.optimizer is not None
        if state.phase != "running" or not reports or not self.requires.guard or custom_optimizer:
            return []
        done, not_finite = state.batches_done(), self.accounts.not_finite()
        look = GuardReading(
            loss=self.accounts.loss(),
            batches=done - self.seen[0],
            not_finite=not_finite - self.seen[1],
            staleness_mean=staleness_so_far(reports).mean,
            num_workers=state.num_live(),
        )
        self.seen = done, not_finite
        bounds = [report.bound for report in reports if report.bound is not None]
        decision = self.guard.look(look, min(bounds, default=None), self.requires.bound_range)
        return [] if decision is None else self._tune(decision, min(bounds, default=None), now)

    def _tune(self, decision: Decision, bound: int | None, now: float) -> list[CoordinatorOutput]:
        self.decisions += 1
        self.lr_factor *= decision.lr_factor
        bound = bound if decision.bound is None else decision.bound
        self.state.events.append(events.GuardActed(at_s=now, why=decision.why, lr_factor=self.lr_factor, bound=bound))
        tune = AdjustRule(self.decisions, decision.lr_factor, decision.bound)
        return [CoordinatorOutput(s.peer, tune) for s in self.state.servers.values()]
