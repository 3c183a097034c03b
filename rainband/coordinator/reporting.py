"""What is told of a run: its books, how stale its gradients were, how far it is."""

from __future__ import annotations

import msgspec

from rainband.coordinator.state import RunState
from rainband.protocol import events
from rainband.protocol.accounting import (
    BatchAccounting,
    Staleness,
    balance,
    balance_led,
    staleness_of,
    staleness_so_far,
)
from rainband.protocol.data_plan import DataPlan

RATE_FROM_S, RATE_FROM = 0.25, 0.01  # a rate needs so long a time, or so much of the whole time, to be one


class Reporting:
    """Counts, and changes nothing."""

    def __init__(self, state: RunState) -> None:
        self.state = state

    def accounting(self) -> BatchAccounting | None:
        state = self.state
        if state.plan is None:
            return None
        accounting = balance(self._plan_so_far(state.plan), state.reports(), state.reassigned)
        if state.full_batch is not None:
            return balance_led(accounting, state.reports(), state.full_batch.batches)
        return accounting if state.has_data() else msgspec.structs.replace(accounting, batches=0, not_processed=0)

    def _plan_so_far(self, plan: DataPlan) -> DataPlan:
        """The plan; of loops that have not said how many passes they make, the passes they have begun."""
        if self.state.knows_its_end() or not self.state.has_data():
            return plan
        begun = -(-self.state.batches_done() // plan.batches_per_epoch)
        return msgspec.structs.replace(plan, epochs=max(1, begun))

    def not_finite(self) -> int:
        """Batches that were skipped because their gradient was not finite."""
        accounting = self.accounting()
        return 0 if accounting is None else accounting.skipped.get("not finite", 0)

    def staleness(self) -> Staleness:
        """What gradients missed, what readers may miss, and who waited for whom so that they do not miss more."""
        workers = sorted(self.state.workers.items())
        waited_for = {index: worker.heartbeat.waited_for for index, worker in workers if worker.heartbeat.waited_for}
        return msgspec.structs.replace(staleness_of(self.state.reports()), waited_for=waited_for)

    def samples_done(self) -> int:
        plan = self.state.plan
        if not plan or not self.state.has_data():
            return 0
        if self.state.full_batch is not None:
            return self.state.full_batch.samples
        return min(self.state.batches_done() * plan.batch_size, plan.num_samples * plan.epochs)

    def _batches_or_steps(self, plan: DataPlan) -> int:
        if self.state.full_batch is not None:
            return self.state.full_batch.batches
        if self.state.has_data():
            return self.state.batches_done()
        return balance(plan, self.state.reports(), 0).untracked_pushes

    def loss(self) -> float | None:
        """What the workers see, weighted by the samples they have seen it on."""
        heartbeats = [w.heartbeat for w in self.state.workers.values() if w.heartbeat.loss_samples]
        weight = sum(heartbeat.loss_samples for heartbeat in heartbeats)
        return sum(heartbeat.loss * heartbeat.loss_samples for heartbeat in heartbeats) / weight if weight else None

    def note_progress(self, now: float) -> None:
        """Add what is known to the events; called at every tick, and once more when the data is done."""
        plan = self.state.plan
        assert plan
        staleness = staleness_so_far(self.state.reports())
        known = self.state.knows_its_end()  # otherwise how much there is to do is told as 0
        connected = {i: w for i, w in sorted(self.state.workers.items()) if w.connected}
        # Of a team that computes one model together, those count samples who see them first.
        counting = {i: w for i, w in connected.items() if not self.state.rank_in_replica(i) or w.heartbeat.samples}
        in_teams = connected if self.state.settings.workers_per_replica > 1 else {}
        self.state.events.append(
            events.Progress(
                at_s=now,
                batches_done=self._batches_or_steps(plan),
                batches=plan.num_batches if known else 0,
                samples_done=self.samples_done(),
                samples=plan.num_samples * plan.epochs if known else 0,
                loss=self.loss(),
                samples_per_s={i: _rate([(t, b.samples) for t, b in w.heartbeats], now) for i, w in counting.items()},
                steps_per_s={i: _rate([(t, b.steps) for t, b in w.heartbeats], now) for i, w in counting.items()},
                staleness_mean=staleness.mean,
                staleness_max=staleness.max,
                staleness_bound=staleness.bound,
                staleness_unit=staleness.unit,
                waited_s={i: w.heartbeat.waited_s for i, w in connected.items()},
                metrics=next((w.heartbeat.metrics for w in connected.values() if w.heartbeat.metrics), {}),
                pushed_bytes=sum(w.heartbeat.pushed_bytes for w in self.state.workers.values()),
                pulled_bytes=sum(w.heartbeat.pulled_bytes for w in self.state.workers.values()),
                computed_s={i: w.heartbeat.computed_s for i, w in in_teams.items()},
                sent_bytes={i: w.heartbeat.sent_bytes for i, w in in_teams.items()},
            )
        )


def _rate(counted: list[tuple[float, int]], now: float) -> float:
    """So many a second; 0 where two beats that came at once would make any number of it."""
    if len(counted) < 2:
        return 0.0
    (t0, n0), (t1, n1) = counted[0], counted[-1]
    return (n1 - n0) / (t1 - t0) if t1 - t0 >= min(RATE_FROM_S, RATE_FROM * now) and t1 > t0 else 0.0
