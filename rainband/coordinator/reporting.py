"""What is told of a run: its books, how stale its gradients were, how far it is."""

from __future__ import annotations

import msgspec

from rainband.coordinator.state import Facts
from rainband.protocol import events
from rainband.protocol.accounting import Books, Staleness, balance, balance_led, staleness_of, staleness_so_far
from rainband.protocol.data_plan import Plan

RATE_FROM_S, RATE_FROM = 0.25, 0.01  # a rate needs so long a time, or so much of the whole time, to be one


class Accounts:
    """Counts, and changes nothing."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def books(self) -> Books | None:
        facts = self.facts
        if facts.plan is None:
            return None
        books = balance(self._plan_so_far(facts.plan), facts.reports(), facts.leased_again)
        if facts.leader is not None:
            return balance_led(books, facts.reports(), facts.leader.batches)
        return books if facts.has_data() else msgspec.structs.replace(books, batches=0, not_done=0)

    def _plan_so_far(self, plan: Plan) -> Plan:
        """The plan; of loops that have not said how many passes they make, the passes they have begun."""
        if self.facts.knows_its_end() or not self.facts.has_data():
            return plan
        begun = -(-self.facts.batches_done() // plan.batches_per_epoch)
        return msgspec.structs.replace(plan, epochs=max(1, begun))

    def not_finite(self) -> int:
        """Batches that were skipped because their gradient was not finite."""
        books = self.books()
        return 0 if books is None else books.skipped.get("not finite", 0)

    def staleness(self) -> Staleness:
        """What gradients missed, what readers may miss, and who waited for whom so that they do not miss more."""
        workers = sorted(self.facts.workers.items())
        waited_for = {index: worker.beat.waited_for for index, worker in workers if worker.beat.waited_for}
        return msgspec.structs.replace(staleness_of(self.facts.reports()), waited_for=waited_for)

    def samples_done(self) -> int:
        plan = self.facts.plan
        if not plan or not self.facts.has_data():
            return 0
        if self.facts.leader is not None:
            return self.facts.leader.samples
        return min(self.facts.batches_done() * plan.batch_size, plan.num_samples * plan.epochs)

    def _batches_or_steps(self, plan: Plan) -> int:
        if self.facts.leader is not None:
            return self.facts.leader.batches
        if self.facts.has_data():
            return self.facts.batches_done()
        return balance(plan, self.facts.reports(), 0).extras

    def loss(self) -> float | None:
        """What the workers see, weighted by the samples they have seen it on."""
        beats = [w.beat for w in self.facts.workers.values() if w.beat.loss_samples]
        weight = sum(beat.loss_samples for beat in beats)
        return sum(beat.loss * beat.loss_samples for beat in beats) / weight if weight else None

    def note_progress(self, now: float) -> None:
        """Add what is known to the events; called at every tick, and once more when the data is done."""
        plan = self.facts.plan
        assert plan
        staleness = staleness_so_far(self.facts.reports())
        known = self.facts.knows_its_end()  # otherwise how much there is to do is told as 0
        connected = {i: w for i, w in sorted(self.facts.workers.items()) if w.connected}
        # Of a team that computes one model together, those count samples who see them first.
        counting = {i: w for i, w in connected.items() if not self.facts.place(i) or w.beat.samples}
        in_teams = connected if self.facts.settings.team_size > 1 else {}
        self.facts.events.append(
            events.Progress(
                at_s=now,
                batches_done=self._batches_or_steps(plan),
                batches=plan.num_batches if known else 0,
                samples_done=self.samples_done(),
                samples=plan.num_samples * plan.epochs if known else 0,
                loss=self.loss(),
                samples_per_s={i: _rate([(t, b.samples) for t, b in w.beats], now) for i, w in counting.items()},
                steps_per_s={i: _rate([(t, b.steps) for t, b in w.beats], now) for i, w in counting.items()},
                staleness_mean=staleness.mean,
                staleness_max=staleness.max,
                staleness_bound=staleness.bound,
                staleness_unit=staleness.unit,
                waited_s={i: w.beat.waited_s for i, w in connected.items()},
                metrics=next((w.beat.metrics for w in connected.values() if w.beat.metrics), {}),
                pushed_bytes=sum(w.beat.pushed_bytes for w in self.facts.workers.values()),
                pulled_bytes=sum(w.beat.pulled_bytes for w in self.facts.workers.values()),
                computed_s={i: w.beat.computed_s for i, w in in_teams.items()},
                sent_bytes={i: w.beat.sent_bytes for i, w in in_teams.items()},
            )
        )


def _rate(counted: list[tuple[float, int]], now: float) -> float:
    """So many a second; 0 where two beats that came at once would make any number of it."""
    if len(counted) < 2:
        return 0.0
    (t0, n0), (t1, n1) = counted[0], counted[-1]
    return (n1 - n0) / (t1 - t0) if t1 - t0 >= min(RATE_FROM_S, RATE_FROM * now) and t1 > t0 else 0.0
