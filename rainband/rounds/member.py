"""One member of the rounds of split batches, as a state machine over a `Board`.

Methods that may wait are generators. They yield a condition to wait for, or None where other members may run: no word
is read and another one written without such a place in between, so a test can step members in every order.
`docs/internals/rounds.md` explains the protocol.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from rainband.rounds.average import Average, Contribution, Floats, Row, average, divisor_for, mask_of, write
from rainband.rounds.board import Board, RoundEntry
from rainband.rounds.current_round import CurrentRound
from rainband.rounds.encoded import EncodedExchange
from rainband.rounds.exchange import Outcome, Part, StateHolder
from rainband.rounds.handover import StateHandover
from rainband.rounds.joining import LAST_EPOCH, Joining
from rainband.rounds.membership import Headers, RoundMembership, Waiting
from rainband.rounds.view import (
    DRIFT_ROUNDS,
    Header,
    Kind,
    RoundDecision,
    RoundView,
    has_left,
    leader_of,
    means,
    position,
    up_to_date,
)

SPEEDS = 15  # rounds of which the median speed counts


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
        """With `whole_batches`, others compute the part of a lost member in the same round: see `CurrentRound`."""
        self.board = board
        self.rank = board.rank
        self.holder = holder
        self.clock = clock
        self.equal_parts = equal_parts
        self.whole_batches = whole_batches
        self.average: Average = average
        self.encoded: EncodedExchange | None = None  # None: tensors are exchanged as they are
        self.membership = RoundMembership(board)
        self.handover = StateHandover(self.membership, holder)
        self.joining = Joining(self.membership, self.handover, trial_rounds)
        self.round = self._new_round()
        self.all_skipped = False  # no member contributed tensors to the last round
        self.has_left = False  # a member has ended an epoch while others computed gradients
        self.left_out = 0  # samples of earlier rounds that are to count as skipped
        self.sources = -1  # see `Header`
        self.speeds: deque[float] = deque(maxlen=SPEEDS)

    def _new_round(self) -> CurrentRound:
        return CurrentRound(self.rank, self.whole_batches)

    @property
    def view(self) -> RoundView:
        return self.membership.view

    @property
    def is_in(self) -> bool:
        return self.membership.is_in

    @property
    def count(self) -> int:
        """Return the exchanges and steps that are in this member's parameters; -1: it has no state yet."""
        return self.membership.count

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Waiting:
        """End the round before, and return the next one, of this epoch or a later one."""
        epoch = min(epoch, LAST_EPOCH)  # none is after the state of a member that has left at its end
        while True:
            if not self.is_in:
                yield from self._join()
            elif self.round.is_cut:
                yield from self._end_round()
            elif self.view.epoch < epoch:
                self.round.kind = "end"
                yield from self._end_round()
            else:
                return self.view.where

    def _join(self) -> Waiting:
        yield from self.joining.join(lambda: self.round.view_after(self.view, self.equal_parts))
        if self.is_in:
            self.round = self._new_round()

    def cut(self, batch: Sequence[int] | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        """Return this member's part of the round's samples."""
        part = self.round.cut(self.view, batch, lengths, digest)
        if not part.is_over:
            self.all_skipped = False
            self.round.began_at = self.clock()
        return part

    def decide(self) -> RoundDecision:
        """Return what follows from the exchanges of the open round."""
        return self.round.decide(self.view, self.equal_parts)

    def _end_round(self) -> Waiting:
        """Decide what follows from the round, and give or receive the state."""
        if not self.round.has_published:
            headers: Headers | None = yield from self._exchange(self.round.kind)
            if headers is not None:
                self.round.closed = headers
                yield from self._follow(headers)
        if not self.is_in:
            return
        self.all_skipped = not self.round.averaged
        decision = self.decide()
        at = position(decision.view.where, 0)
        if decision.joined:
            self.board.admit(RoundEntry(at, decision.leader, decision.view.members))
            yield None
        lives = {member.rank: member.life for member in self.view.members}
        if decision.leader == self.rank and decision.receivers:
            yield from self.handover.give(at, decision.view)
        self.membership.take(decision.view)
        self.round = self._new_round()
        self.board.set_position(at)  # after giving: readers infer that the state is complete
        yield None
        for rank in decision.joined:
            self.board.tensors(rank, 0)  # maps them, while the new member reads the state
        if self.rank in decision.receivers and decision.leader != self.rank:
            # If the leader is lost before it has given the state, this member misses steps until another one gives it.
            yield from self.handover.receive(decision.leader, lives[decision.leader], at)

    def _follow(self, headers: Headers) -> Waiting:
        """Take part, without tensors, in the exchanges that others need for what is missing."""
        self.round.divide_missing(headers)
        while self.round.missing:
            published: Headers | None = yield from self._exchange("skip", weight=0.0)
            if published is None:
                return
            self.round.divide_missing(published)

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def mean(
        self, tensors: list[Tensor | None], weight: float | None, numbers: Floats, scalars: Floats, row: Row = None
    ) -> Waiting:
        """Average tensors over the members, in place; `row` returns other weights for the ranks that contribute."""
        if not self.is_in:
            return Outcome(False)
        member, round_ = self.membership, self.round
        if not round_.missing:
            round_.divide(self.view)
        if round_.num_exchanges == round_.num_before and round_.part.weight and round_.part.trial is None:
            self.speeds.append(len(round_.part.samples) / max(1e-9, self.clock() - round_.began_at))
        self.sources = -1 if row is None else sum(w > 0 for w in row([m.rank for m in self.view.members])) - 1
        divisor = 0.0
        if row is None and self.encoded is None and self.average is average:
            own, number = round_.part.weight if weight is None else weight, len(self.view.members)
            divisor = divisor_for(own, round_.part.total if weight is None else weight * number, number, tensors)
        headers: Headers | None = yield from self._exchange("mean", tensors, weight, numbers, scalars, divisor)
        if headers is None:
            return self._missed()
        round_.has_published = True
        good = up_to_date(headers)
        if self.rank not in good:
            yield from self._follow(headers)
            return self._missed()  # it has missed a step, and would mix its old parameters with new gradients
        given = [q for q in sorted(good) if headers[q].kind == "mean"]
        target = position(self.view.where, round_.num_exchanges)
        contributions = []
        for q, w in zip(given, [headers[q].weight for q in given] if row is None else row(given), strict=True):
            header, area = headers[q], self._tensors(q, headers[q], target)
            if area is None:
                yield None
                return self._missed()  # it was excluded, and what it has read has changed meanwhile
            contributions.append(Contribution(q, w, int.from_bytes(header.present, "little"), area, header.divisor))
        yield None
        total = self.average(tensors, self.rank, contributions)
        yield None
        if member.ends():  # no other member waited for this one: areas may have changed while it read them
            return self._missed()
        member.count += 1
        round_.has_averaged |= headers is round_.averaged
        round_.divide_missing(headers)
        return Outcome(True, total, headers[leader_of(headers)].numbers, means(headers, given))

    def _missed(self) -> Outcome:
        """Note that the others go on without this member, whose contribution they may have taken or computed again."""
        if self.encoded is not None:
            self.encoded.forget()
        return Outcome(False)

    def _tensors(self, rank: int, header: Header, target: int) -> Sequence[Tensor] | None:
        """Return the tensors that a member has published; None if this member was excluded while it read them."""
        slot = self.membership.slot_of(rank, target)
        tensors = self.board.tensors(rank, slot)
        if not header.encoded:
            return tensors
        assert self.encoded is not None, "all members have the same codec"
        present = int.from_bytes(header.present, "little")
        try:
            return self.encoded.decode(self.board.area(rank, slot), header.encoded, present, tensors, target)
        except ValueError:
            if self.membership.ends():
                return None
            raise

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
            self.membership.count += 1

    def _exchange(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None] = (),
        weight: float | None = None,
        numbers: Sequence[float] = (),
        scalars: Sequence[float] = (),
        divisor: float = 0.0,
    ) -> Waiting:
        """Publish a contribution, wait for those of all members, and return their headers; None if excluded."""
        member, round_ = self.membership, self.round
        if member.ends():
            return None
        yield None
        target = position(self.view.where, round_.num_exchanges + 1)
        sizes: tuple[int, ...] = ()
        weight = float(round_.part.weight if weight is None else weight)
        if tensors and self.encoded is not None:
            # A part that another member has lost has another weight; trials look at what was computed.
            plain = bool(round_.missing) or round_.part.trial is not None
            sizes = self.encoded.encode(tensors, self.board.area(self.rank, member.slot), target, plain)
            yield None
        elif tensors:
            if len(self.view.members) > 1:  # others read it
                area = self.board.tensors(self.rank, member.slot)
                write(area, tensors, weight / divisor if divisor else 1.0)
            yield None
        header = self._header(kind, tensors, weight, numbers, scalars, sizes, divisor)
        self.board.publish(member.slot, target, header)
        member.slot = 1 - member.slot
        round_.num_exchanges += 1
        yield member.when_all_reached(target)
        headers = round_.last = member.headers(target, header)
        self.has_left = self.has_left or has_left(headers)
        yield None
        if member.ends():
            return None
        round_.note(headers)
        return headers

    def _header(
        self,
        kind: Kind,
        tensors: Sequence[Tensor | None],
        weight: float,
        numbers: Sequence[float],
        scalars: Sequence[float],
        encoded: tuple[int, ...],
        divisor: float,
    ) -> Header:
        member, is_first = self.membership, not self.round.num_exchanges
        left_out, joins = 0, member.asking() if is_first else ()
        if is_first:
            left_out, self.left_out = self.left_out, 0
        if joins and self.view.longest_serving == self.rank:
            self.handover.prepare()
        return Header(
            kind=kind,
            count=member.count,
            view=member.view_key,
            since=member.own.since,
            weight=weight,
            excluded=member.excluded_members() if is_first else (),
            joins=joins,
            reason=self.round.reason,
            samples=self.round.digest if is_first else 0,
            left_out=left_out,
            speed=statistics.median(self.speeds) if self.speeds and is_first and self.view.may_recut else 0.0,
            fingerprint=self.holder.fingerprint() if is_first and self._compares(kind) else 0,
            present=mask_of(tensors).to_bytes(-(-len(tensors) // 8), "little"),
            numbers=tuple(numbers),
            scalars=tuple(scalars),
            sources=self.sources,
            encoded=encoded,
            divisor=divisor,
        )

    def _compares(self, kind: Kind) -> bool:
        """Return whether the parameters are compared in this round."""
        changed = self.holder.has_changed()
        regularly = self.view.serial % DRIFT_ROUNDS == DRIFT_ROUNDS - 1
        return changed or regularly or self.view.compares or kind == "end"

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def pause(self) -> Waiting:
        """End the round, and let no other member wait for this one."""
        if self.is_in and self.round.is_cut:
            yield from self._end_round()
        if self.is_in:
            self.membership.end()
        yield None

    def leave(self) -> Waiting:
        """End the round, and leave for good."""
        if self.is_in and self.round.is_cut:
            yield from self._end_round()
        if self.is_in:
            yield from self.joining.leave()
        yield None

    def take_final(self) -> Waiting:
        """Take the state of a member that has left at its end, if there is one: then nothing is left to train."""
        if (yield from self.joining.take_final()):
            self.round = self._new_round()
