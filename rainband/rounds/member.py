"""One member of the rounds of split batches, as a state machine over a `Board`.

Methods that may wait are generators. They yield a condition to wait for, or None where other members may run: no word
is read and another one written without such a place in between, so a test can step members in every order.
`docs/internals/rounds.md` explains the protocol.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from rainband.errors import StateLost
from rainband.rounds.average import Average, Floats, Row, average, given_by, mask_of
from rainband.rounds.board import Asking, Board, Condition, RoundEntry
from rainband.rounds.cut import MIN_SAMPLES, by_member, cut_each, each_twice, part_sizes
from rainband.rounds.exchange import Outcome, Part, RoundId, StateHolder
from rainband.rounds.view import (
    DRIFT_ROUNDS,
    Header,
    Kind,
    Member,
    RoundDecision,
    RoundView,
    accounted,
    leader_of,
    means,
    next_view,
    position,
    up_to_date,
)

Waiting = Generator[Condition | None, None, Any]
Headers = dict[int, Header]

LAST_EPOCH = (1 << 19) - 2  # after all epochs of any loop
SPEEDS = 15  # rounds of which the median speed counts


# size: exchanges, decisions and joining share the state of the open round and of this life
class RoundMember:
    """A member: begins rounds, publishes its contributions, and reads those of the others."""

    def __init__(
        self,
        board: Board,
        holder: StateHolder,
        clock: Callable[[], float],
        equal_parts: bool = False,
        whole_batches: bool = False,
        trial_rounds: int = 0,
    ) -> None:
        """With `whole_batches`, others compute the part of a lost member in the same round: see `missing`."""
        self.board = board
        self.rank = board.rank
        self.holder = holder
        self.clock = clock
        self.equal_parts = equal_parts
        self.whole_batches = whole_batches
        self.trial_rounds = trial_rounds  # of a run that this member begins
        self.average: Average = average
        self.life = 0
        self.is_in = False
        self.count = -1  # no state yet
        self.view = RoundView(0, 0, ())
        self.view_key = 0
        self.blocked_by: int | None = None  # the member for which this one has waited last
        self.all_skipped = False  # nobody contributed tensors to the last round
        self.slot = 0  # of the next contribution
        self.left_out = 0  # samples of earlier rounds that are to count as skipped
        self.sources = -1  # see `Header`
        self._new_round()
        self.speeds: deque[float] = deque(maxlen=SPEEDS)

    def _new_round(self) -> None:
        self.k = 0  # exchanges of this round
        self.is_cut = False
        self.samples: Sequence[int] = ()  # of the round, over all members
        self.part = Part(())
        self.parts: dict[int, Sequence[int]] = {}  # by rank, with whole batches: positions of samples in the round
        self.missing: tuple[int, ...] = ()  # positions that the last exchange lacks, and the next one averages
        self.first: Headers = {}  # of the round's first exchange
        self.averaged: Headers = {}  # of the first one with tensors
        self.closed: Headers = {}  # of the last one, in a round without tensors
        self.has_published = self.has_averaged = False  # tensors
        self.last: Headers = {}  # of the last exchange
        self.kind: Kind = "skip"  # of a round without an exchange
        self.reason = ""
        self.began_at = 0.0

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Waiting:
        """End the round before, and return the next one, of this epoch or a later one."""
        while True:
            if not self.is_in:
                yield from self._join()
            elif self.is_cut:
                yield from self._end_round()
            elif self.view.epoch < epoch:
                self.kind = "end"
                yield from self._end_round()
            else:
                return self.view.where

    def cut(self, batch: Sequence[int] | None, lengths: Sequence[int] = ()) -> Part:
        """Return this member's part of the round's samples."""
        carried = () if self.whole_batches else self.view.carried
        if batch is None and not carried:
            return Part((), is_over=True)
        self.samples = [*carried, *(batch or ())] if carried else batch or ()
        self.is_cut, self.all_skipped = True, False
        ranks = [member.rank for member in self.view.members]
        sizes = self.view.sizes(len(self.samples))
        mine = ranks.index(self.rank)
        rows = cut_each([lengths[0] + len(carried), *lengths[1:]], sizes) if lengths else []
        self.samples = by_member(self.samples, rows) if rows else self.samples
        first, size, total = sum(sizes[:mine]), sizes[mine], len(self.samples)
        part = self.samples[first : first + size] if size else self.samples[:MIN_SAMPLES]
        self.part = self._on_trial(Part(part, first, size, total, pieces=tuple(row[mine] for row in rows)), lengths)
        self.began_at = self.clock()
        self._cut_whole()
        return self.part

    def _cut_whole(self) -> None:
        """Note whose part each sample of the round is, if none may be left out."""
        if self.whole_batches:
            self.parts, first = {}, 0
            for member, size in zip(self.view.members, self.view.sizes(len(self.samples)), strict=True):
                self.parts[member.rank] = range(first, first + size)
                first += size
        self.missing = ()

    def _cut_missing(self, headers: Headers) -> None:
        """Divide what an exchange lacks among the members that took part in it, for the next one.

        Without whole batches, or if nobody contributed, nothing is missing.
        """
        if not self.whole_batches:
            return
        good = up_to_date(headers)
        given = {rank for rank in good if headers[rank].kind == "mean"}
        lacking = [at for rank, part in self.parts.items() if rank not in given for at in part] if given else []
        self.missing = tuple(sorted(lacking))
        self.parts, first = {}, 0
        ranks = sorted(given)
        for rank, size in zip(ranks, part_sizes(len(lacking), (1.0,) * len(ranks)), strict=True):
            self.parts[rank] = self.missing[first : first + size]
            first += size

    def own_missing(self) -> Sequence[int]:
        """Return the positions, among the missing ones, that this member is to compute."""
        return self.parts.get(self.rank, ())

    def _follow(self, headers: Headers) -> Waiting:
        """Take part, without tensors, in the exchanges that others need for what is missing."""
        self._cut_missing(headers)
        while self.missing:
            published: Headers | None = yield from self._exchange("skip", weight=0.0)
            if published is None:
                return
            self._cut_missing(published)

    def _on_trial(self, part: Part, lengths: Sequence[int]) -> Part:
        """Return the part of one of the first rounds, which tell how one process would train."""
        view = self.view
        if view.serial == view.trial > 0:
            return part._replace(trial="verdict")
        if view.serial >= view.trial or len(view.members) == 1:
            return part
        if self.rank == view.longest_serving:
            return part._replace(trial="whole")
        second = next(m.rank for m in view.members if m.rank != view.longest_serving)
        if view.serial == 0 and self.rank == second:
            twice = each_twice(self.samples, lengths)
            return part._replace(samples=twice, trial="doubled", pieces=tuple(2 * n for n in lengths))
        return part._replace(trial="idle")

    def _end_round(self) -> Waiting:
        """Decide what follows from the round, and give or receive the state."""
        if not self.has_published:
            headers: Headers | None = yield from self._exchange(self.kind)
            if headers is not None:
                self.closed = headers
                yield from self._follow(headers)
        if not self.is_in:
            return
        self.all_skipped = not self.averaged
        decision = self.decide()
        at = position(decision.view.where, 0)
        if decision.joined:
            self.board.admit(RoundEntry(at, decision.leader, decision.view.members))
            yield None
        lives = {member.rank: member.life for member in self.view.members}
        if decision.leader == self.rank and decision.receivers:
            yield from self._give(at, decision.view)
        self._take(decision.view)
        self._new_round()
        self.board.set_position(at)  # after giving: readers infer that the state is complete
        yield None
        if self.rank in decision.receivers and decision.leader != self.rank:
            yield from self._receive(decision, lives[decision.leader], at)

    def decide(self) -> RoundDecision:
        samples: Sequence[int] = () if self.whole_batches else self.samples  # the loop counts whole batches itself
        counted = accounted(self.first, self.averaged, self.closed, self.has_averaged)
        return next_view(self.view, self.first, counted, samples, self.equal_parts)

    def _take(self, view: RoundView) -> None:
        self.view = view
        self.view_key = view.key()

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def mean(
        self, tensors: list[Tensor | None], weight: float | None, numbers: Floats, scalars: Floats, row: Row = None
    ) -> Waiting:
        """Average tensors over the members, in place; `row` returns other weights for the ranks that contribute."""
        if not self.is_in:
            return Outcome(False)
        if not self.missing:
            self._cut_whole()
        if not self.k and self.part.weight:
            self.speeds.append(len(self.part.samples) / max(1e-9, self.clock() - self.began_at))
        self.sources = -1 if row is None else sum(w > 0 for w in row([m.rank for m in self.view.members])) - 1
        headers: Headers | None = yield from self._exchange("mean", tensors, weight, numbers, scalars)
        if headers is None:
            return Outcome(False)
        self.has_published = True
        good = up_to_date(headers)
        if self.rank not in good:
            yield from self._follow(headers)
            return Outcome(False)  # it has missed a step, and would mix its old parameters with new gradients
        given = [q for q in sorted(good) if headers[q].kind == "mean"]
        target = position(self.view.where, self.k)
        weights = [headers[q].weight for q in given] if row is None else row(given)
        areas = [self.board.tensors(q, self._slot_of(q, target)) for q in given]
        contributions = given_by(given, weights, [headers[q].present for q in given], areas)
        yield None
        total = self.average(tensors, self.rank, contributions)
        yield None
        if self._is_excluded():  # nobody waited for this member, so areas may have changed while it read them
            self._go_out()
            return Outcome(False)
        self.count += 1
        self.has_averaged |= headers is self.averaged
        self._cut_missing(headers)
        return Outcome(True, total, headers[leader_of(headers)].numbers, means(headers, given))

    def mean_scalars(self, scalars: Sequence[float], weight: float | None) -> Waiting:
        """Average numbers over the members."""
        if not self.is_in:
            return Outcome(False)
        headers: Headers | None = yield from self._exchange("scalars", weight=weight, scalars=scalars)
        if headers is None:
            return Outcome(False)
        given = [q for q in sorted(up_to_date(headers)) if headers[q].kind == "scalars"]
        total = sum(headers[q].weight for q in given)
        return Outcome(True, total, headers[leader_of(headers)].numbers, means(headers, given))

    def stepped(self) -> None:
        """Note a step of the user's optimizer."""
        if self.is_in:
            self.count += 1

    def _exchange(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None] = (),
        weight: float | None = None,
        numbers: Sequence[float] = (),
        scalars: Sequence[float] = (),
    ) -> Waiting:
        """Publish a contribution, wait for those of all members, and return their headers; None if excluded."""
        if self._is_excluded():
            self._go_out()
            return None
        yield None
        if tensors:
            yield from self._write(self.board.tensors(self.rank, self.slot), tensors)
        target = position(self.view.where, self.k + 1)
        header = self._header(kind, tensors, self.part.weight if weight is None else weight, numbers, scalars)
        self.board.publish(self.slot, target, header)
        self.slot = 1 - self.slot
        self.k += 1
        yield self._when_all_reached(target)
        headers = self.last = self._headers(target)
        yield None
        if self._is_excluded():
            self._go_out()
            return None
        if self.k == 1:
            self.first = headers
        if not self.averaged and any(header.kind == "mean" for header in headers.values()):
            self.averaged = headers
        return headers

    def _write(self, area: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Waiting:
        """Copy this member's tensors into its area."""
        pairs = [(into, tensor) for into, tensor in zip(area, tensors, strict=True) if tensor is not None]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([into for into, _ in pairs], [tensor for _, tensor in pairs])
        yield None

    def _header(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None],
        weight: float,
        numbers: Sequence[float],
        scalars: Sequence[float],
    ) -> Header:
        left_out = 0
        if not self.k:
            left_out, self.left_out = self.left_out, 0
        return Header(
            kind=kind,
            count=self.count,
            view=self.view_key,
            since=self._own(self.view.members).since,
            weight=float(weight),
            excluded=self._excluded_members() if not self.k else (),
            joins=self._asking() if not self.k else (),
            reason=self.reason,
            left_out=left_out,
            speed=statistics.median(self.speeds) if self.speeds and not self.k else 0.0,
            fingerprint=self.holder.fingerprint() if not self.k and self._compares(kind) else 0,
            present=mask_of(tensors).to_bytes(-(-len(tensors) // 8), "little"),
            numbers=tuple(numbers),
            scalars=tuple(scalars),
            sources=self.sources,
        )

    def _compares(self, kind: Kind) -> bool:
        """Return whether the parameters are compared in this round."""
        changed = self.holder.has_changed()
        regularly = self.view.serial % DRIFT_ROUNDS == DRIFT_ROUNDS - 1
        return changed or regularly or self.view.compares or kind == "end"

    def _own(self, members: Iterable[Member]) -> Member:
        return next(member for member in members if member.rank == self.rank)

    def _excluded_members(self) -> tuple[int, ...]:
        return tuple(m.rank for m in self.view.members if self.board.excluded(m.rank) >= m.life)

    def _asking(self) -> tuple[tuple[int, int], ...]:
        """Return the workers that ask to join."""
        lives = {member.rank: member.life for member in self.view.members}
        found = []
        for rank in range(self.board.num_ranks):
            asking = self.board.asking(rank)
            if asking is not None and self.board.excluded(rank) < asking.life and asking.life > lives.get(rank, 0):
                found.append((rank, asking.life))
        return tuple(found)

    # ---- what other members have done ------------------------------------------------------------------------------

    def _reached(self, rank: int, life: int, target: int) -> bool | None:
        """Return True if a life has reached a position, False if it never will, None if it may.

        The position is read first: when it is of a later life, this life is seen to be excluded.
        """
        reached = self.board.position(rank) >= target
        if self.board.excluded(rank) >= life:
            return self.board.final(rank, life) >= target
        return True if reached else None

    def _when_all_reached(self, target: int) -> Condition:
        """Return the condition that each member has reached a position or never will, or this one was excluded."""
        position_of, excluded = self.board.position, self.board.excluded
        mine, life = self.rank, self.life
        others = [(m.rank, m.life) for m in self.view.members if m.rank != mine]

        def until() -> bool:  # in a loop that spins
            for rank, its_life in others:
                if position_of(rank) < target and excluded(rank) < its_life:
                    self.blocked_by = rank
                    return excluded(mine) >= life
            return True

        return until

    def lagging(self) -> int | None:
        """Return a member that has not come as far as this one's last contribution; None: none is known."""
        mine = self.board.position(self.rank)
        for member in self.view.members if self.is_in else ():
            if self._reached(member.rank, member.life, mine) is None:
                return member.rank
        return None

    def _headers(self, target: int) -> Headers:
        """Return the headers of the members that have contributed to an exchange; others are lost, or passed it."""
        headers = {}
        for member in self.view.members:
            if member.rank == self.rank or self._reached(member.rank, member.life, target):
                slot = self._slot_of(member.rank, target)
                if slot >= 0:
                    headers[member.rank] = self.board.header(member.rank, slot)
        return headers

    def _slot_of(self, rank: int, target: int) -> int:
        """Return the slot of a member's contribution to an exchange; -1: it made none."""
        if self.board.published(rank, 0) == target:
            return 0
        return 1 if self.board.published(rank, 1) == target else -1

    def _is_excluded(self) -> bool:
        return self.board.excluded(self.rank) >= self.life

    # ---- the state -------------------------------------------------------------------------------------------------

    def _give(self, at: int, view: RoundView) -> Waiting:
        """Leave the state for those that begin the round at this position."""
        yield None
        state = {"view": msgspec.json.encode(view).decode(), "count": self.count, "training": self.holder.collect()}
        self.board.put_state(at, state)
        yield None

    def _receive(self, decision: RoundDecision, life: int, at: int) -> Waiting:
        """Take the state of the round's leader, if it lives to give it; else go on, and miss this step for longer."""
        leader = decision.leader
        yield lambda: self._reached(leader, life, at) is not None or self._is_excluded()
        if self._reached(leader, life, at):
            yield from self._apply(leader, at)

    def _apply(self, giver: int, at: int) -> Waiting:
        """Take a state that was given; return False if there is none, or this member was excluded meanwhile."""
        state = self.board.state(giver, at)
        yield None
        if self._is_excluded():
            self._go_out()
            return False
        if state is None:
            return False
        self.holder.apply(state["training"])
        self.count = state["count"]
        self._take(msgspec.json.decode(state["view"], type=RoundView))
        return True

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def _go_out(self) -> None:
        """Note the exclusion; what this member did in the open round is repeated by others."""
        self.is_in = False

    def pause(self) -> Waiting:
        """End the round, and let nobody wait for this member."""
        if self.is_in and self.is_cut:
            yield from self._end_round()
        if self.is_in:
            self.board.exclude()
            self._go_out()
        yield None

    def leave(self) -> Waiting:
        """End the round, and leave for good; a worker that returns after all others have left finds the final state."""
        if self.is_in and self.is_cut:
            yield from self._end_round()
        if self.is_in:
            if len(self.view.members) < self.board.num_ranks:
                after_all = RoundId(LAST_EPOCH, 0)
                view = msgspec.structs.replace(self.view, epoch=after_all.epoch, batch=after_all.batch)
                yield from self._give(position(after_all, 0), view)
                self.board.set_position(position(after_all, 0))
            self.board.exclude()
            self._go_out()
        yield None

    def _join(self) -> Waiting:
        """Ask to join, and take part when a member admits this worker; go on alone if there is no member."""
        board = self.board
        self.life = max(self.life, board.excluded(self.rank)) + 1
        last = board.final(self.rank, self.life - 1)
        known = [p if p <= last else 0 for p in (board.published(self.rank, 0), board.published(self.rank, 1))]
        self.slot = 1 if known[0] > known[1] else 0  # the other one may still be read
        board.set_position(0)  # so that nothing is inferred of this life from the position of an earlier one
        board.set_life(self.life)
        yield None
        since = next((m.since for m in self.view.members if m.rank == self.rank), 0)
        asking = Asking(self.life, self.count, since)
        board.ask(asking)
        yield None
        while True:
            yield lambda: self._admitted() is not None or self._is_best() or self._is_excluded()
            if self._is_excluded():
                return
            admission = self._admitted()
            if admission is not None:
                yield from self._enter(admission)
                return
            board.ask(asking._replace(electing=True))
            yield None
            if self._admitted() is None and self._is_best():
                yield from self._go_on_alone()
                return
            board.ask(asking)
            yield None

    def _admitted(self) -> RoundEntry | None:
        return self._admission(self.rank, self.life)

    def _admission(self, rank: int, life: int) -> RoundEntry | None:
        """Return what members have written about a worker's joining."""
        for writer in range(self.board.num_ranks):
            found = self.board.admission(writer)
            if found is not None and any(m.rank == rank and m.life == life for m in found.members):
                return found
        return None

    def _enter(self, admission: RoundEntry) -> Waiting:
        giver = next(m for m in admission.members if m.rank == admission.giver)
        yield lambda: self._reached(giver.rank, giver.life, admission.position) is not None or self._is_excluded()
        applied = False
        if self._reached(giver.rank, giver.life, admission.position):
            applied = yield from self._apply(giver.rank, admission.position)
        if not applied:  # the giver was lost: let nobody wait for this life, and ask again
            self.board.exclude()
            return
        self._enter_at(admission.position)

    def _enter_at(self, at: int) -> None:
        """Begin a round as a new member. Nobody counts what an earlier life has published in it."""
        self._new_round()
        self.is_in = True
        for slot in range(2):
            if self.board.published(self.rank, slot) > at:
                self.board.withdraw(slot)
        self.board.set_position(at)
        self.board.ask(None)

    def _is_best(self) -> bool:
        """Return True if all workers ask or are excluded, and this one has the newest state."""
        board = self.board
        mine = (-self.count, self._since_asked(), self.rank)
        for rank in range(board.num_ranks):
            if rank == self.rank or board.excluded(rank) >= max(1, board.life(rank)):
                continue
            asking = board.asking(rank)
            if asking is None or asking.life != board.life(rank) or asking.electing:
                return False
            if (-asking.steps, asking.since, rank) < mine or self._admission(rank, asking.life) is not None:
                return False
        return True

    def _since_asked(self) -> int:
        asking = self.board.asking(self.rank)
        return 0 if asking is None else asking.since

    def take_final(self) -> Waiting:
        """Take the state of a member that has left at its end, if there is one: then nothing is left to train."""
        at = position(RoundId(LAST_EPOCH, 0), 0)
        for rank in range(self.board.num_ranks):
            life = self.board.excluded(rank)
            if life and self.board.final(rank, life) == at and (yield from self._apply(rank, at)):
                self._new_round()
                return

    def _go_on_alone(self) -> Waiting:
        """Make a view of all workers that ask, and give them the state."""
        yield from self.take_final()
        board, view = self.board, self.view
        if self.count < 0:
            if any(board.published(rank, slot) for rank in range(board.num_ranks) for slot in range(2)):
                raise StateLost("all workers that had the trained parameters were lost: start the run again.")
            self.count = 0
            view = msgspec.structs.replace(view, trial=self.trial_rounds)
        lives = {self.rank: self.life}
        for rank in range(board.num_ranks):
            asking = board.asking(rank)
            if asking is not None and asking.life == board.life(rank) and board.excluded(rank) < asking.life:
                lives[rank] = asking.life
        if self.first:  # the open round has come as far as this member knows
            view = self.decide().view
        elif self.k or self.is_cut:  # its positions are used up
            again = () if self.whole_batches else (*(self.samples or view.carried),)
            view = msgspec.structs.replace(view, batch=view.batch + 1, carried=again)
        deferred = [sample for _, samples in view.deferred for sample in samples]
        view = msgspec.structs.replace(
            view,
            members=tuple(Member(rank, lives[rank], view.serial) for rank in sorted(lives)),
            shares=(),
            carried=(*view.carried, *deferred),
            deferred=(),
            carried_over=view.carried_over + len(deferred),
            transfers=view.transfers + len(lives) - 1,
        )
        at = position(view.where, 0)
        if len(lives) > 1:
            board.admit(RoundEntry(at, self.rank, view.members))
            yield from self._give(at, view)
        self._take(view)
        self._enter_at(at)
