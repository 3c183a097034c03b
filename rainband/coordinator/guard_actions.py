"""Lets the guard look at the loss while it trains, and tells the servers what it decides."""

from __future__ import annotations

from rainband.coordinator.divergence_guard import Decision, Guard, Look
from rainband.coordinator.reporting import Accounts
from rainband.coordinator.state import Facts, Out
from rainband.protocol import events
from rainband.protocol.accounting import staleness_so_far
from rainband.protocol.messages import Tune


class Guarding:
    """Against divergence: smaller steps, a tighter bound."""

    def __init__(self, facts: Facts, accounts: Accounts) -> None:
        self.facts = facts
        self.accounts = accounts
        self.guard = Guard()
        self.decisions = 0
        self.lr_factor = 1.0
        self.seen = (0, 0)  # batches done, and of these not finite, at the guard's last look

    def look(self, now: float) -> list[Out]:
        """At what has come since the last look."""
        facts, reports = self.facts, self.facts.reports()
        if facts.phase != "running" or not any(report.guard for report in reports):
            return []
        done, not_finite = facts.batches_done(), self.accounts.not_finite()
        look = Look(
            loss=self.accounts.loss(),
            batches=done - self.seen[0],
            not_finite=not_finite - self.seen[1],
            staleness_mean=staleness_so_far(reports).mean,
            num_workers=facts.num_live(),
        )
        self.seen = done, not_finite
        bounds = [report.bound for report in reports if report.bound is not None]
        decision = self.guard.look(look, min(bounds, default=None), reports[0].adapt)
        return [] if decision is None else self._tune(decision, min(bounds, default=None), now)

    def _tune(self, decision: Decision, bound: int | None, now: float) -> list[Out]:
        self.decisions += 1
        self.lr_factor *= decision.lr_factor
        bound = bound if decision.bound is None else decision.bound
        self.facts.events.append(events.Guarded(at_s=now, why=decision.why, lr_factor=self.lr_factor, bound=bound))
        tune = Tune(self.decisions, decision.lr_factor, decision.bound)
        return [Out(s.peer, tune) for s in self.facts.servers.values()]
