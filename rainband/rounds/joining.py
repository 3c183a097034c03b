"""Joining the rounds: the members admit a worker, or, if there are none, it goes on and admits others."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from rainband.errors import StateLost
from rainband.rounds.board import Asking, RoundEntry
from rainband.rounds.exchange import RoundId
from rainband.rounds.handover import StateHandover
from rainband.rounds.membership import RoundMembership, Waiting
from rainband.rounds.view import Member, RoundView, position

STATE_COPIES = 4  # parameters, gradients, two numbers of an optimizer for each: our allocator keeps what is freed
LAST_EPOCH = (1 << 19) - 2  # after all epochs of any loop


class Joining:
    """Lets a worker join the rounds with its next life, and leave them for good."""

    def __init__(self, membership: RoundMembership, handover: StateHandover, trial_rounds: int) -> None:
        self.membership = membership
        self.board = membership.board
        self.handover = handover
        self.trial_rounds = trial_rounds  # of a run that this member begins

    def join(self, view_after: Callable[[], RoundView]) -> Waiting:
        """Ask to join, and take part when a member admits this worker; go on alone if there is no member.

        `view_after` returns the view after the round that was open when the membership ended. The worker is not in if
        it was excluded, or the member that admitted it was lost: then it may ask again.
        """
        board, member = self.board, self.membership
        member.life = max(member.life, board.excluded(member.rank)) + 1
        last = board.final(member.rank, member.life - 1)
        known = [p if p <= last else 0 for p in (board.published(member.rank, 0), board.published(member.rank, 1))]
        member.slot = 1 if known[0] > known[1] else 0  # the other one may still be read
        board.set_position(0)  # so that nothing is inferred of this life from the position of an earlier one
        board.set_life(member.life)
        yield None
        self._prepare()
        since = next((m.since for m in member.view.members if m.rank == member.rank), 0)
        asking = Asking(member.life, member.count, since)
        board.ask(asking)
        yield None
        while True:
            yield lambda: self._admitted() is not None or self._is_best() or member.is_excluded()
            if member.is_excluded():
                return
            admission = self._admitted()
            if admission is not None:
                yield from self._enter(admission)
                return
            board.ask(asking._replace(electing=True))
            yield None
            if self._admitted() is None and self._is_best():
                yield from self._go_on_alone(view_after)
                return
            board.ask(asking)
            yield None

    def _prepare(self) -> None:
        """Map what other workers share, and get memory for a state, before they wait for this one."""
        board, own = self.board, self.membership.rank
        others = [rank for rank in range(board.num_ranks) if rank != own and board.excluded(rank) < board.life(rank)]
        for rank in (own, *others):
            board.tensors(rank, 0)
        if others and self.membership.count < 0:
            torch.empty(STATE_COPIES * sum(t.nbytes for t in board.tensors(own, 0)), dtype=torch.uint8).fill_(0)

    def leave(self) -> Waiting:
        """Leave for good. A worker that returns, or has left before, finds the final state after all have left."""
        member = self.membership
        if len(member.view.members) < self.board.num_ranks or self._has_trained_on():
            after_all = RoundId(LAST_EPOCH, 0)
            view = msgspec.structs.replace(member.view, epoch=after_all.epoch, batch=after_all.batch)
            yield from self.handover.give(position(after_all, 0), view)
            self.board.set_position(position(after_all, 0))
        member.end()

    def _has_trained_on(self) -> bool:
        """Return True if another member of the last round left before it was over."""
        own, board = self.membership.rank, self.board
        left = [one for one in self.membership.view.members if board.excluded(one.rank) >= one.life]
        return any(board.final(one.rank, one.life) < board.position(own) for one in left)

    def take_final(self) -> Waiting:
        """Take the state of a member that has left at its end; return False if there is none.

        Then nothing is left to train.
        """
        at = position(RoundId(LAST_EPOCH, 0), 0)
        for rank in range(self.board.num_ranks):
            life = self.board.excluded(rank)
            if not life or self.board.final(rank, life) != at:
                continue
            if (yield from self.handover.take(rank, at, is_final=True)):
                return True
        return False

    def _admitted(self) -> RoundEntry | None:
        return self._admission(self.membership.rank, self.membership.life)

    def _admission(self, rank: int, life: int) -> RoundEntry | None:
        """Return what members have written about a worker's joining."""
        for writer in range(self.board.num_ranks):
            found = self.board.admission(writer)
            if found is not None and any(m.rank == rank and m.life == life for m in found.members):
                return found
        return None

    def _enter(self, admission: RoundEntry) -> Waiting:
        giver = next(m for m in admission.members if m.rank == admission.giver)
        if (yield from self.handover.receive(giver.rank, giver.life, admission.position)):
            self._enter_at(admission.position)
        else:  # the giver was lost: let no other member wait for this life, and ask again
            self.board.exclude()

    def _enter_at(self, at: int) -> None:
        """Begin a round as a new member. The others do not count what an earlier life has published in it."""
        self.membership.is_in = True
        for slot in range(2):
            if self.board.published(self.membership.rank, slot) > at:
                self.board.withdraw(slot)
        self.board.set_position(at)
        self.board.ask(None)

    def _is_best(self) -> bool:
        """Return True if all workers ask or are excluded, and this one has the newest state."""
        board, rank_here = self.board, self.membership.rank
        mine = (-self.membership.count, self._since_asked(), rank_here)
        for rank in range(board.num_ranks):
            if rank == rank_here or board.excluded(rank) >= max(1, board.life(rank)):
                continue
            asking = board.asking(rank)
            if asking is None or asking.life != board.life(rank) or asking.electing:
                return False
            if (-asking.steps, asking.since, rank) < mine or self._admission(rank, asking.life) is not None:
                return False
        return True

    def _since_asked(self) -> int:
        asking = self.board.asking(self.membership.rank)
        return 0 if asking is None else asking.since

    def _go_on_alone(self, view_after: Callable[[], RoundView]) -> Waiting:
        """Make a view of all workers that ask, and give them the state."""
        board, member = self.board, self.membership
        final = yield from self.take_final()
        view = member.view if final else view_after()
        if member.count < 0:
            if any(board.published(rank, slot) for rank in range(board.num_ranks) for slot in range(2)):
                raise StateLost("all workers that had the trained parameters were lost: start the run again.")
            member.count = 0
            view = msgspec.structs.replace(view, trial=self.trial_rounds)
        view = self._view_of_all_that_ask(view)
        at = position(view.where, 0)
        if len(view.members) > 1:
            board.admit(RoundEntry(at, member.rank, view.members))
            yield from self.handover.give(at, view)
        member.take(view)
        self._enter_at(at)

    def _view_of_all_that_ask(self, view: RoundView) -> RoundView:
        """Return the view with this worker and all that ask to join as members, and all samples carried over."""
        board = self.board
        lives = {self.membership.rank: self.membership.life}
        for rank in range(board.num_ranks):
            asking = board.asking(rank)
            if asking is not None and asking.life == board.life(rank) and board.excluded(rank) < asking.life:
                lives[rank] = asking.life
        deferred = [sample for _, samples in view.deferred for sample in samples]
        return msgspec.structs.replace(
            view,
            members=tuple(Member(rank, lives[rank], view.serial) for rank in sorted(lives)),
            shares=(),
            carried=(*view.carried, *deferred),
            deferred=(),
            carried_over=view.carried_over + len(deferred),
            transfers=view.transfers + len(lives) - 1,
            giver=self.membership.rank,
            receivers=tuple(rank for rank in sorted(lives) if rank != self.membership.rank),
        )
