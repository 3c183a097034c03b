"""Reports on a run: batch accounting, staleness, progress."""

from __future__ import annotations

import msgspec

from rainband.coordinator.node_report import NodeReport
from rainband.coordinator.state import RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.accounting import (
    NOT_FINITE,
    BatchAccounting,
    Staleness,
    balance,
    balance_led,
    balance_shared,
    staleness_of,
    staleness_so_far,
)
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Heartbeat, SampleAccount

# A rate is computed over at least this many seconds, or this fraction of the run so far.
RATE_FROM_S, RATE_FROM = 0.25, 0.01
STEADY = 3  # heartbeats: shorter waits are usual with a staleness bound


class Reporting:
    """Counts what the nodes have reported; changes nothing but the events."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.loss: float | None = None  # since the last Progress event; none: no sample was processed
        self.reported: list[Heartbeat] = []  # by that event
        self.nodes = NodeReport(state)
        self.lost_residuals: list[float] = []  # norms of what codecs of workers had not sent when these ended

    def accounting(self) -> BatchAccounting | None:
        state = self.state
        if state.plan is None:
            return None
        accounting = (
            balance_shared(self.sample_account())
            if state.shares_batches()
            else balance(self._plan_so_far(state.plan), state.reports(), state.reassigned)
        )
        accounting = msgspec.structs.replace(accounting, lost_residuals=tuple(self.lost_residuals))
        if state.shares_batches():
            return accounting
        if state.full_batch is not None:
            return balance_led(accounting, state.reports(), state.full_batch.requested.batches)
        return accounting if state.has_data() else msgspec.structs.replace(accounting, batches=0, not_processed=0)

    def sample_account(self) -> SampleAccount:
        """Return the newest account of the workers that share each batch."""
        known = [w.heartbeat.account for w in self.state.workers.values() if w.heartbeat.account is not None]
        if (restore := self.state.settings.restore) is not None:  # workers continue to count from it
            known.append(SampleAccount(rounds=restore.step, applied=restore.samples))
        newest = max(known, key=lambda account: account.rounds, default=SampleAccount())
        plan = self.state.plan
        total = plan.samples_per_epoch * plan.epochs if plan is not None and self.state.knows_its_end() else 0
        return msgspec.structs.replace(newest, total=total)

    def _plan_so_far(self, plan: DataPlan) -> DataPlan:
        """Return the data plan; for loops without a number of epochs, with the epochs that have begun."""
        if self.state.knows_its_end() or not self.state.has_data():
            return plan
        begun = -(-self.state.batches_done() // plan.batches_per_epoch)
        return msgspec.structs.replace(plan, epochs=max(1, begun))

    def not_finite(self) -> int:
        """Count the batches that were skipped because their gradient was not finite."""
        accounting = self.accounting()
        return 0 if accounting is None else accounting.skipped.get(NOT_FINITE, 0)

    def staleness(self) -> Staleness:
        """Return the staleness of gradients, the bound on it, and how long workers waited for others because of it."""
        workers = sorted(self.state.workers.items())
        waited_for = {index: worker.heartbeat.waited_for for index, worker in workers if worker.heartbeat.waited_for}
        return msgspec.structs.replace(staleness_of(self.state.reports()), waited_for=waited_for)

    def samples_done(self) -> int:
        plan = self.state.plan
        if self.state.shares_batches():
            return self.sample_account().applied
        if not plan or not self.state.has_data():
            return 0
        if self.state.full_batch is not None:
            return self.state.full_batch.samples
        return plan.samples_of(self.state.batches_done())

    def _batches_or_steps(self, plan: DataPlan) -> int:
        if self.state.full_batch is not None:
            return self.state.full_batch.requested.batches
        if self.state.shares_batches():
            return self.sample_account().rounds
        if self.state.has_data():
            return self.state.batches_done()
        return balance(plan, self.state.reports(), 0).untracked_pushes

    def _new_loss(self) -> float | None:
        """Return the mean loss of the heartbeats since the last Progress event, weighted by samples."""
        reported = set(map(id, self.reported))
        latest = [w.heartbeat for w in self.state.workers.values()]
        heartbeats = [h for h in latest if h.loss_samples and id(h) not in reported]
        self.reported = latest
        weight = sum(heartbeat.loss_samples for heartbeat in heartbeats)
        return sum(heartbeat.loss * heartbeat.loss_samples for heartbeat in heartbeats) / weight if weight else None

    def report_progress(self, now: float, last: bool = False) -> None:
        """Add a Progress event: at every tick, and once more when all workers have ended (`last`)."""
        plan = self.state.plan
        assert plan
        self.loss = self._new_loss()
        staleness = staleness_so_far(self.state.reports())
        known = self.state.knows_its_end()  # otherwise the totals are reported as 0
        shown = self.nodes.shown()
        connected = {i: w for i, w in shown.items() if w.connected}
        # In a replica of several workers, the first stage counts the samples.
        counting = {i: w for i, w in connected.items() if not self.state.rank_in_replica(i) or w.heartbeat.samples}
        staged = connected if self.state.settings.workers_per_replica > 1 else {}
        self.state.events.append(
            events.Progress(
                at_s=now,
                batches_done=self._batches_or_steps(plan),
                batches=plan.num_batches if known else 0,
                samples_done=self.samples_done(),
                samples=plan.samples_per_epoch * plan.epochs if known else 0,
                loss=self.loss,
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
                saved_bytes=sum(w.heartbeat.saved_bytes for w in self.state.workers.values()),
                computed_s={i: w.heartbeat.computed_s for i, w in staged.items()},
                sent_bytes={
                    i: w.heartbeat.sent_bytes for i, w in connected.items() if staged or w.heartbeat.sent_bytes
                },
                disagreement=next((w.heartbeat.disagreement for w in connected.values()), None),
                waiting_for={i: holder for i, w in connected.items() if (holder := _held_by(w, now)) is not None},
            )
        )
        if last or self.nodes.is_due(now):
            self.state.events.append(self.nodes.measured(now, shown, self.accounting()))

    def cpu_s(self) -> float:
        """Return the seconds of the processor that all nodes have used, as far as they have reported it."""
        workers = sum(w.heartbeat.cpu_s for w in self.state.workers.values())
        return workers + sum(server.cpu_s for server in self.state.servers.values())


def _held_by(worker: WorkerState, now: float) -> int | None:
    """Return the worker that this one has been waiting for, without a step, since three heartbeats or longer."""
    times = [at_s for at_s, _ in worker.heartbeats[-STEADY:]]
    last = {(heartbeat.held_by, heartbeat.steps) for _, heartbeat in worker.heartbeats[-STEADY:]}
    if len(last) != 1 or len(times) < STEADY or times[-1] - times[0] < _shortest(now):
        return None
    return last.pop()[0]


def _shortest(now: float) -> float:
    """Return the seconds that heartbeats must span to say anything: at the start, they come at short intervals."""
    return min(RATE_FROM_S, RATE_FROM * now)


def _rate(counted: list[tuple[float, int]], now: float) -> float:
    """Return counts per second; 0 while the heartbeats are too close together for a rate."""
    if len(counted) < 2:
        return 0.0
    (t0, n0), (t1, n1) = counted[0], counted[-1]
    return (n1 - n0) / (t1 - t0) if t1 - t0 >= _shortest(now) and t1 > t0 else 0.0
