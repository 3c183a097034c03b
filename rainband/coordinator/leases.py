"""Which portion is leased to whom, and which must be leased again.

Done is what the current owners' marks say, never what a worker says. To take a lease back the portion is fenced at
every owner; each answers with its sets, and only what some block lacks is leased again, grouped by which blocks have
it.
"""

from __future__ import annotations

from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.data_plan import groups
from rainband.protocol.messages import AcceptedBatches, Forget, Lease, LeaseEnd, NoWork, Peer, Return, Revoke


class Leases:
    """Gives portions to workers that ask, each to one at a time."""

    def __init__(self, state: RunState, ending: RunEnd) -> None:
        self.state = state
        self.ending = ending
        self.pool: list[int] = []  # fresh portions that may be leased now, in order
        self.next_fresh = 0
        self.numbers: dict[int, int] = {}  # portion -> its last lease number
        self.again: dict[int, tuple[tuple[int, ...], ...]] = {}  # portion -> groups to do again
        self.gathering: dict[int, dict[int, tuple[int, ...]]] = {}  # portion -> server -> its sets
        self.taken_from: dict[int, int] = {}  # portion -> the worker it was taken from last
        self.evened_out: set[int] = set()  # portions that are taken from a worker only because it has more than others
        self.unconfirmed: dict[int, float] = {}  # returned as done, the marks do not say so yet
        self.wanting: dict[int, None] = {}  # workers that asked for a lease, longest first

    # ---- giving ----------------------------------------------------------------------------------------------------

    def wants(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        self.wanting.setdefault(worker.peer.index)
        return self.give(now, worker.peer.index) or self._no_work(worker) or self._even_out(worker)

    def _no_work(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """A loop that has batches it has not stepped on must not wait for more: its own may be the last."""
        return (
            [CoordinatorOutput(worker.peer, NoWork())] if self.state.is_custom_loop() and not self._has_more() else []
        )

    def give(self, now: float, only: int | None = None) -> list[CoordinatorOutput]:
        """Give waiting workers what may be leased now; or only one, where nothing has changed for the others."""
        if self.state.phase != "running" or not self._has_more():
            return []
        outs = []
        for index in list(self.wanting) if only is None else [only] if only in self.wanting else []:
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
        self._refill()
        return bool(self.again or self.pool)

    def _choose(self, worker: WorkerState) -> int | None:
        state = self.state
        assert state.plan
        if not self._may_work(worker):
            return None
        if state.plan.items_per_round:
            return self._choose_column(worker)
        if self.again:
            return min(self.again)
        self._refill()
        if not self.pool:
            return None
        left = state.plan.num_portions - self.next_fresh + len(self.pool)
        scarce = left <= len(state.workers) and left <= state.num_live() > 1  # alone, there is nobody to leave it to
        if worker.leases and scarce and not state.is_custom_loop():  # whose last batches may wait to be accumulated
            return None  # the last portions go to those who have nothing to do
        return self.pool[0]

    def _choose_column(self, worker: WorkerState) -> int | None:
        """Columns of a group of rounds are shared evenly; a group that nobody has asked for yet comes later."""
        assert self.state.plan
        items_per_round = self.state.plan.items_per_round
        for portion in sorted(self.again):
            if self._is_poorest(worker, portion // items_per_round):
                return portion
        self._refill()
        share = -(-items_per_round // max(1, self.state.num_live()))
        last = self._last_group()
        for portion in self.pool:
            if portion // items_per_round <= last and self._has(worker, portion // items_per_round) < share:
                return portion
        return None

    def _last_group(self) -> int:
        """One group of rounds ahead, no more: the rounds after it belong to whoever is here then."""
        assert self.state.plan
        return (
            min((r.first_open for r in self.state.reports() if r.blocks), default=0) // self.state.plan.items_per_round
            + 1
        )

    def _has(self, worker: WorkerState, group: int) -> int:
        """So many columns of a group of rounds."""
        assert self.state.plan
        return sum(portion // self.state.plan.items_per_round == group for portion in worker.leases)

    def _is_poorest(self, worker: WorkerState, group: int) -> bool:
        """Of those who wait for more."""
        has = self._has(worker, group)
        waiting = (self.state.workers[index] for index in self.wanting)
        return not any(self._has(other, group) < has and self._may_work(other) for other in waiting)

    def _even_out(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """Who came first has taken the columns of those who come later: of every group one of these is taken back."""
        state = self.state
        if state.phase != "running" or not state.plan or not state.plan.items_per_round or not self._may_work(worker):
            return []
        items_per_round = state.plan.items_per_round
        if len(worker.leases) * state.num_live() >= 2 * items_per_round:  # its share of both groups
            return []
        outs: list[CoordinatorOutput] = []
        for group in sorted(
            {portion // items_per_round for other in state.workers.values() for portion in other.leases}
        ):
            richest = max(state.workers.values(), key=lambda other: self._has(other, group))
            if self._has(richest, group) < self._has(worker, group) + 2:
                continue
            portion = max(portion for portion in richest.leases if portion // items_per_round == group)
            revokes = self.gather(portion, richest.peer.index)
            if revokes:
                self.evened_out.add(portion)
                del richest.leases[portion]
                outs += [*revokes, CoordinatorOutput(richest.peer, Revoke(portion, self.numbers[portion]))]
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
        if not worker.connected or worker.ended or not worker.here or not self._may_start(worker):
            return False
        return self.state.settings.workers_per_replica == 1 or all(
            peer_state.here for peer_state in self.state.replica_peers(worker.peer.index)
        )

    def _may_start(self, worker: WorkerState) -> bool:
        """Warm start: one worker alone until so many batches are in."""
        state = self.state
        assert state.join
        if not state.join.warm_start_batches or state.batches_done() >= state.join.warm_start_batches:
            return True
        first = min(i for i, w in state.workers.items() if w.here and not w.ended and not state.rank_in_replica(i))
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
        return CoordinatorOutput(worker.peer, Lease(portion, self.numbers[portion], groups_))

    # ---- taking back -----------------------------------------------------------------------------------------------

    def returned(self, worker: WorkerState, message: Return, now: float) -> list[CoordinatorOutput]:
        """A worker gives a lease back: it is done, or cannot be."""
        if worker.leases.get(message.portion) != message.lease:
            return []  # it was taken back before
        del worker.leases[message.portion]
        if message.reason == LeaseEnd.DONE:
            if not self.state.is_done(message.portion):
                self.unconfirmed[message.portion] = now
            # The last portions go to those who have nothing to do: it may be one now.
            return self.give(now, worker.peer.index)
        if self.state.phase != "running":
            return []
        if message.reason == LeaseEnd.UNUSED and message.lease == 1:
            assert self.state.plan
            self.numbers[message.portion] += 1
            self.again[message.portion] = (tuple(range(self.state.plan.batches_in(message.portion))),)
            return self.give(now)
        return self.gather(message.portion, worker.peer.index)

    def gather(self, portion: int, from_worker: int = -1) -> list[CoordinatorOutput]:
        """Fence a portion at every owner and ask for its sets."""
        self.unconfirmed.pop(portion, None)
        self.taken_from[portion] = from_worker
        if self.state.is_done(portion):
            return []
        self.numbers[portion] = self.numbers.get(portion, 0) + 1
        self.gathering[portion] = {}
        return [CoordinatorOutput(s.peer, Revoke(portion, self.numbers[portion])) for s in self.state.servers.values()]

    def sets(self, sender: Peer, sets: AcceptedBatches, now: float) -> list[CoordinatorOutput]:
        """A server answers with what its blocks have had of a portion."""
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
            self.again[sets.portion] = missing
        if missing and sets.portion not in self.evened_out:
            self.state.reassigned += 1
            self.state.events.append(
                events.BatchesReassigned(
                    at_s=now,
                    portion=sets.portion,
                    batches=sum(map(len, missing)),
                    from_worker=self.taken_from[sets.portion],
                )
            )
        self.evened_out.discard(sets.portion)
        return self.give(now) + self.ending.when_done()

    # ---- what was lost on its way ----------------------------------------------------------------------------------

    def confirm(self, now: float) -> list[CoordinatorOutput]:
        """What was returned as done must be in the marks before long."""
        outs: list[CoordinatorOutput] = []
        for portion, since in list(self.unconfirmed.items()):
            if self.state.is_done(portion):
                del self.unconfirmed[portion]
            elif now - since > self.state.settings.failure_timeout_s:
                outs += self.gather(portion)
        return outs

    def ask_again(self) -> list[CoordinatorOutput]:
        """An answer may have been lost; and who has nothing to do must hold up nobody who has."""
        servers = self.state.servers
        outs = self.forget_the_idle()
        for portion, answers in self.gathering.items():
            revoke = Revoke(portion, self.numbers[portion])
            outs += [CoordinatorOutput(s.peer, revoke) for i, s in servers.items() if i not in answers]
        return outs

    def forget_the_idle(self) -> list[CoordinatorOutput]:
        """They tell the servers themselves; that may have been lost."""
        state = self.state
        idle = [index for index in self.wanting if not state.workers[index].leases]
        held_up = [s.peer for s in state.servers.values() if s.report is not None and s.report.limit is not None]
        return [CoordinatorOutput(server, Forget(index)) for index in idle for server in held_up]

    def who_has_what(self) -> str:
        """In words."""
        leased = [f"{p} ({w.peer})" for w in self.state.workers.values() for p in sorted(w.leases)]
        gathering = [str(p) for p in sorted(self.gathering)]
        return (
            f"leased: {', '.join(leased) or 'nothing'}; "
            f"to be leased again: {', '.join(map(str, self.again)) or 'nothing'}"
            + (f"; asked for their sets: portions {', '.join(gathering)}" if gathering else "")
        )
