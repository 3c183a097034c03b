"""Leases portions of the data to workers, and reassigns them.

A portion is done when the servers' accepted sets say so, never because a worker says so. To revoke a lease, the
coordinator fences the portion at every server. Each answers with its accepted sets, and only the batches that some
block lacks are reassigned, grouped by which blocks have them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, Phase, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.accepted_set import groups, partly
from rainband.protocol.messages import AcceptedBatches, Forget, Lease, LeaseEnd, NoWork, Peer, Return, Revoke
from rainband.protocol.saved_state import Restore


class PositionCounts:
    """A count of the positions that each worker has leased in each group of rounds, updated with each lease."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.known = False  # otherwise count again
        self.of: dict[int, dict[int, int]] = {}  # group -> worker -> positions
        self.workers_with: dict[int, dict[int, set[int]]] = {}  # group -> positions -> workers; none of them empty

    def forget(self) -> None:
        """Count again at the next question: leases have ended together."""
        self.known = False

    def changed(self, worker: WorkerState, portion: int, more: int) -> None:
        """Note that a worker has received a lease, or lost one."""
        if self.known:
            self._add(portion, worker.peer.index, more)

    def has(self, worker: WorkerState, group: int) -> int:
        """Count a worker's positions in a group of rounds."""
        self._recount()
        return self.of.get(group, {}).get(worker.peer.index, 0)

    def most(self, group: int) -> int:
        """Return the largest number of positions of a group that one worker has."""
        self._recount()
        return max(self.workers_with.get(group, (0,)))

    def groups(self) -> list[int]:
        """Return the groups of rounds with leased positions, in order."""
        self._recount()
        return sorted(self.of)

    def _recount(self) -> None:
        if self.known:
            return
        self.known, self.of, self.workers_with = True, {}, {}
        for index, worker in self.state.workers.items():
            for portion in worker.leases:
                self._add(portion, index, 1)

    def _add(self, portion: int, worker: int, more: int) -> None:
        assert self.state.plan
        if not self.state.plan.items_per_round:
            return
        group = portion // self.state.plan.items_per_round
        of, workers_with = self.of.setdefault(group, {}), self.workers_with.setdefault(group, {})
        before = of.pop(worker, 0)
        if before:
            workers_with[before].discard(worker)
            if not workers_with[before]:
                del workers_with[before]
        if before + more:
            of[worker] = before + more
            workers_with.setdefault(before + more, set()).add(worker)
        if not of:
            del self.of[group], self.workers_with[group]


class Leases:
    """Leases each portion to one worker at a time."""

    def __init__(self, state: RunState, shutdown: RunEnd) -> None:
        self.state = state
        self.shutdown = shutdown
        self.begin_again(None)

    def begin_again(self, restore: Restore | None) -> None:
        """Forget all leases; lease what a checkpoint lacks, or everything."""
        self.pool: list[int] = []  # portions never leased that may be leased now, in order
        self.next_fresh = 0
        self.numbers: dict[int, int] = {}  # portion -> its last lease number
        self.again: dict[int, tuple[tuple[int, ...], ...]] = {}  # portion -> groups of batches to reassign
        self.partly: dict[int, tuple[int, ...]] = {}  # portion -> batches to reassign that some block has
        self.gathering: dict[int, dict[int, tuple[int, ...]]] = {}  # portion -> server -> its accepted sets
        self.last_worker: dict[int, int] = {}  # portion -> the worker that had it last
        self.rebalanced: set[int] = set()  # portions revoked only because the worker has more than others
        self.unconfirmed: dict[int, float] = {}  # returned as done, not yet in the accepted sets -> since when
        self.counts = PositionCounts(self.state)
        self.wanting: dict[int, None] = {}  # workers that asked for a lease, longest first
        if restore is None:
            return
        plan = self.state.plan
        assert plan is not None
        accepted = [saved.accepted_set(plan) for saved in restore.blocks]
        first = min((each.first_open for each in accepted), default=0)
        last = max((max((*each.open, each.first_open - 1)) for each in accepted), default=-1)
        for portion in range(first, last + 1):
            masks = [each.of(portion) for each in accepted]
            missing = groups(plan.full(portion), masks)
            if missing:
                self.again[portion], self.partly[portion] = missing, partly(missing, masks)
                self.numbers[portion] = 1
        self.next_fresh = max(first, last + 1)

    def requested(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        self.wanting.setdefault(worker.peer.index)
        return self.give(now, worker.peer.index) or self._no_work(worker) or self._rebalance(worker)

    def _no_work(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """Tell a custom loop that no batch is free: it may hold the last ones itself, and must not wait for more."""
        return (
            [CoordinatorOutput(worker.peer, NoWork())] if self.state.is_custom_loop() and not self._has_more() else []
        )

    def give(self, now: float, only: int | None = None) -> list[CoordinatorOutput]:
        """Lease portions to waiting workers; or to one only, if nothing has changed for the others."""
        if only is not None and only not in self.wanting:
            return []
        if self.state.phase is not Phase.RUNNING or not self._has_more():
            return []
        outs = []
        for index in list(self.wanting) if only is None else (only,):
            worker = self.state.workers[index]
            if not worker.connected or worker.ended:
                del self.wanting[index]
                continue
            portion = self._choose(worker)
            if portion is None:
                continue
            del self.wanting[index]
            outs.append(self._give(worker, portion, now))
        return outs

    def _has_more(self) -> bool:
        if not self.state.has_data():
            return False
        if not self.again and not self.pool:
            self._refill()
        return bool(self.again or self.pool)

    def _choose(self, worker: WorkerState) -> int | None:
        state = self.state
        assert state.plan
        if not self._may_work(worker):
            return None
        if state.plan.items_per_round:
            return self._choose_position(worker)
        if self.again:
            return min(self.again)
        if not self.pool:
            self._refill()
        if not self.pool:
            return None
        left = state.plan.num_portions - self.next_fresh + len(self.pool)
        scarce = left <= len(state.workers) and left <= state.num_live() > 1  # a single worker leaves none to others
        if worker.leases and scarce and not state.is_custom_loop():
            return None  # the last portions go to idle workers; but a loop may hold batches until it has more
        return self.pool[0]

    def _choose_position(self, worker: WorkerState) -> int | None:
        """Share the positions of a group of rounds evenly; the groups after the next one stay free."""
        assert self.state.plan
        items_per_round = self.state.plan.items_per_round
        for portion in sorted(self.again):
            if self._has_fewest(worker, portion // items_per_round):
                return portion
        self._refill()
        share = -(-items_per_round // max(1, self.state.num_live()))
        last = self._last_group()
        for portion in self.pool:
            if portion // items_per_round <= last and self.counts.has(worker, portion // items_per_round) < share:
                return portion
        return None

    def _last_group(self) -> int:
        """Return the last group of rounds that may be leased: the one after the current group."""
        assert self.state.plan
        return (
            min((r.first_open for r in self.state.reports() if r.blocks), default=0) // self.state.plan.items_per_round
            + 1
        )

    def _has_fewest(self, worker: WorkerState, group: int) -> bool:
        """Return whether no waiting worker has fewer positions in a group of rounds."""
        has = self.counts.has(worker, group)
        waiting = (self.state.workers[index] for index in self.wanting)
        return not any(self.counts.has(other, group) < has and self._may_work(other) for other in waiting)

    def _rebalance(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """For each group of rounds, revoke one lease of the worker with most, if it has two more than this one.

        Workers that join early lease the positions of those that have not joined yet.
        """
        state = self.state
        if (
            state.phase is not Phase.RUNNING
            or not state.plan
            or not state.plan.items_per_round
            or not self._may_work(worker)
        ):
            return []
        items_per_round = state.plan.items_per_round
        if len(worker.leases) * state.num_live() >= 2 * items_per_round:  # it has its share of both groups
            return []
        outs: list[CoordinatorOutput] = []
        for group in self.counts.groups():
            most = self.counts.most(group)
            if most < self.counts.has(worker, group) + 2:
                continue
            largest = next(other for other in state.workers.values() if self.counts.has(other, group) == most)
            portion = max(portion for portion in largest.leases if portion // items_per_round == group)
            revokes = self.revoke(portion, largest.peer.index)
            if revokes:
                self.rebalanced.add(portion)
                del largest.leases[portion]
                self.counts.changed(largest, portion, -1)
                outs += [*revokes, CoordinatorOutput(largest.peer, Revoke(portion, self.numbers[portion]))]
        return outs

    def _refill(self) -> None:
        plan = self.state.plan
        assert plan
        window = max(1, 2 * plan.items_per_round)
        while len(self.pool) < window and self.next_fresh < plan.num_portions:
            if plan.batches_in(self.next_fresh):
                self.pool.append(self.next_fresh)
            self.next_fresh += 1

    def _may_work(self, worker: WorkerState) -> bool:
        if not worker.connected or worker.ended or not worker.active or not self._may_start(worker):
            return False
        return self.state.settings.workers_per_replica == 1 or all(
            other.active for other in self.state.replica_peers(worker.peer.index)
        )

    def _may_start(self, worker: WorkerState) -> bool:
        """Warm start: let one worker train alone until `warm_start_batches` are accepted."""
        state = self.state
        assert state.join
        if not state.join.warm_start_batches or state.batches_done() >= state.join.warm_start_batches:
            return True
        first = min(i for i, w in state.workers.items() if w.active and not w.ended and not state.rank_in_replica(i))
        return worker.peer.index == first and (not worker.leases or state.is_custom_loop())

    def _give(self, worker: WorkerState, portion: int, now: float) -> CoordinatorOutput:
        assert self.state.plan
        if portion in self.again:
            groups_ = self.again.pop(portion)
        else:
            self.pool.remove(portion)
            groups_ = (tuple(range(self.state.plan.batches_in(portion))),)
            self.numbers[portion] = 1
        if not worker.leases:
            worker.worked_at = now
        worker.leases[portion] = self.numbers[portion]
        self.counts.changed(worker, portion, 1)
        lease = Lease(portion, self.numbers[portion], groups_, self.partly.pop(portion, ()))
        return CoordinatorOutput(worker.peer, lease)

    def returned(self, worker: WorkerState, message: Return, now: float) -> list[CoordinatorOutput]:
        """Take a returned lease: its batches are done, or must be reassigned."""
        if worker.leases.get(message.portion) != message.lease:
            return []  # it was revoked before
        del worker.leases[message.portion]
        self.counts.changed(worker, message.portion, -1)
        if message.reason == LeaseEnd.DONE:
            if not self.state.is_done(message.portion):
                self.unconfirmed[message.portion] = now
            # The last portions go to idle workers, and this worker may be idle now.
            return self.give(now, worker.peer.index)
        if self.state.phase is not Phase.RUNNING:
            return []
        if message.reason in (LeaseEnd.STOPPED, LeaseEnd.UNUSED):
            self.wanting.pop(worker.peer.index, None)  # it leaves, and would take a lease that is lost with it
        if message.reason == LeaseEnd.UNUSED and message.lease == 1:
            assert self.state.plan
            self.numbers[message.portion] += 1
            self.again[message.portion] = (tuple(range(self.state.plan.batches_in(message.portion))),)
            return self.give(now)
        return self.revoke(message.portion, worker.peer.index)

    def revoke(self, portion: int, from_worker: int = -1) -> list[CoordinatorOutput]:
        """Fence a portion at every server, and request its accepted sets."""
        self.unconfirmed.pop(portion, None)
        self.last_worker[portion] = from_worker
        if self.state.is_done(portion) or not self.state.settings.num_servers:
            return []  # without servers, the worker goes on when it is active again: it has the only parameters
        self.numbers[portion] = self.numbers.get(portion, 0) + 1
        self.gathering[portion] = {}
        return [CoordinatorOutput(s.peer, Revoke(portion, self.numbers[portion])) for s in self.state.servers.values()]

    def fenced(self, sender: Peer, sets: AcceptedBatches, now: float) -> list[CoordinatorOutput]:
        """Take a server's accepted sets of a portion; when all have answered, reassign the missing batches."""
        answers = self.gathering.get(sets.portion)
        if answers is None or sets.lease != self.numbers[sets.portion] or sender.role != "server":
            return []
        answers[sender.index] = sets.masks
        if len(answers) < len(self.state.servers):
            return []
        assert self.state.plan
        del self.gathering[sets.portion]
        masks = [mask for index in sorted(answers) for mask in answers[index]]
        missing = groups(self.state.plan.full(sets.portion), masks)
        if missing:
            self.again[sets.portion], self.partly[sets.portion] = missing, partly(missing, masks)
        if missing and sets.portion not in self.rebalanced:
            self.state.reassigned += 1
            self.state.events.append(
                events.BatchesReassigned(
                    at_s=now,
                    portion=sets.portion,
                    batches=sum(map(len, missing)),
                    from_worker=self.last_worker[sets.portion],
                )
            )
        self.rebalanced.discard(sets.portion)
        return self.give(now) + self.shutdown.when_done()

    def confirm(self, now: float) -> list[CoordinatorOutput]:
        """Revoke leases returned as done, if the accepted sets lack batches of them after the failure timeout."""
        outs: list[CoordinatorOutput] = []
        for portion, since in list(self.unconfirmed.items()):
            if self.state.is_done(portion):
                del self.unconfirmed[portion]
            elif now - since > self.state.settings.failure_timeout_s:
                outs += self.revoke(portion)
        return outs

    def repeat_requests(self) -> list[CoordinatorOutput]:
        """Repeat unanswered requests, and let the servers forget idle workers, because messages may be lost."""
        servers = self.state.servers
        outs = self._forget_idle_workers()
        for portion, answers in self.gathering.items():
            revoke = Revoke(portion, self.numbers[portion])
            outs += [CoordinatorOutput(s.peer, revoke) for i, s in servers.items() if i not in answers]
        return outs

    def _forget_idle_workers(self) -> list[CoordinatorOutput]:
        """Idle workers tell the servers themselves; that message may be lost."""
        state = self.state
        return self._forget([index for index in self.wanting if not state.workers[index].leases])

    def forget_ended_workers(self) -> list[CoordinatorOutput]:
        """Release readers that servers hold back for a worker that has ended: it will push nothing more."""
        return self._forget([index for index, worker in self.state.workers.items() if worker.ended])

    def _forget(self, workers: Sequence[int]) -> list[CoordinatorOutput]:
        bounded = [s.peer for s in self.state.servers.values() if s.report is not None and s.report.limit is not None]
        return [CoordinatorOutput(server, Forget(index)) for index in workers for server in bounded]

    def forget_done(self) -> None:
        """Forget the lease numbers of portions that are done: these are not leased or revoked again."""
        below = min((r.first_open for r in self.state.reports() if r.blocks), default=0)
        for portion in [p for p in self.numbers if p < below and p not in self.gathering and p not in self.again]:
            del self.numbers[portion]
            self.last_worker.pop(portion, None)
            self.rebalanced.discard(portion)

    def describe(self) -> str:
        """Return who has which lease, for reports of deadlocks."""
        leased = [f"{p} ({w.peer})" for w in self.state.workers.values() for p in sorted(w.leases)]
        gathering = [str(p) for p in sorted(self.gathering)]
        return (
            f"leased: {', '.join(leased) or 'nothing'}; "
            f"to reassign: {', '.join(map(str, self.again)) or 'nothing'}"
            + (f"; waiting for accepted sets of portions {', '.join(gathering)}" if gathering else "")
        )
