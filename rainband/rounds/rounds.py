"""The exchange of one member: drives its state machine, and waits where that waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from rainband.protocol.accounting import SkipReasons
from rainband.rounds.board import Board
from rainband.rounds.cut import cut_beside, each_twice
from rainband.rounds.exchange import Differences, Outcome, Part, RoundId, StateHolder
from rainband.rounds.member import RoundMember
from rainband.rounds.membership import Waiting
from rainband.rounds.statistics import RoundStatistics
from rainband.rounds.view import RoundView, has_other_samples, leader_of

NO_DIFFERENCES = Differences()


class RoundExchange:
    """An `Exchange` over any board."""

    def __init__(
        self,
        board: Board,
        holder: StateHolder,
        clock: Callable[[], float],
        equal_parts: bool = False,
        waited: Callable[[float], None] = lambda seconds: None,
        trial_rounds: int = 0,
    ) -> None:
        """`waited` gets the seconds of each wait for other members."""
        self.board = board
        self.waited = waited
        self.rank = board.rank
        self.reasons = SkipReasons()
        self.has_left = False
        self.member = RoundMember(board, holder, clock, equal_parts, trial_rounds=trial_rounds)

    @property
    def view(self) -> RoundView:
        """Return what all members know, with the account of samples."""
        return self.member.view

    @property
    def last_view(self) -> RoundView:
        """Return the view after the open round, as far as this member knows: for one whose script has failed."""
        return self.member.decide().view if self.member.round.first else self.view

    @property
    def members(self) -> tuple[int, ...]:
        return tuple([member.rank for member in self.view.members])

    @property
    def is_first(self) -> bool:
        return self.view.first == self.rank

    @property
    def drifted(self) -> int:
        return self.view.drifted

    @property
    def batches(self) -> int:
        return self.view.batches

    @property
    def differences(self) -> Differences:
        member, first, last = self.member, self.member.round.first, self.member.round.last
        other = len({header.samples for header in first.values()}) > 1
        usual = len(last) == len(first) and not other and all(header.kind == "mean" for header in last.values())
        if usual or not member.is_in:
            return NO_DIFFERENCES
        other = other and self.rank in first and has_other_samples(first[self.rank], first[leader_of(first)])
        there = {one.rank for one in member.view.members if self.board.excluded(one.rank) < one.life}
        # Those that have contributed gradients of this batch, and went on; a worker that skips it says so.
        gone = [rank for rank, h in member.round.averaged.items() if h.kind == "mean" and rank not in last]
        behind = tuple(rank for rank in gone if rank in there)
        kinds = {rank: header.kind for rank, header in last.items()}
        apart: tuple[int, ...] = ()
        if {"scalars", "mean"} <= set(kinds.values()):
            apart = tuple(rank for rank, kind in kinds.items() if kind == "mean")
        elif kinds.get(self.rank) == "scalars":
            ended = [rank for rank, kind in kinds.items() if kind == "end" and not member.round.is_cut]
            apart = (*behind, *(rank for rank in ended if rank in there))
        return Differences(apart, behind, other)

    def collect(self) -> dict[str, Any]:
        """Return the state at the beginning of this round, for a checkpoint."""
        member = self.member
        view = msgspec.json.encode(member.view).decode()
        return {"view": view, "count": member.count, "training": member.holder.collect()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin, in place of the first round, with a state that was collected in an earlier run."""
        member = self.member
        member.holder.apply(state["training"])
        member.membership.count = max(0, state["count"])
        before = msgspec.json.decode(state["view"], type=RoundView)
        member.membership.take(msgspec.structs.replace(before, members=(), shares=(), trial=0, giver=-1, receivers=()))

    def begin(self, epoch: int) -> RoundId:
        where: RoundId = self._run(self.member.begin(epoch))
        return where

    def cut(self, batch: Sequence[int] | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        return self.member.cut(batch, lengths, digest)

    def cut_beside(self, batch: Sequence[int], is_sum: bool = False) -> Sequence[int]:
        member, view = self.member, self.member.view
        ranks = [one.rank for one in view.members]
        if self.rank not in ranks:
            return batch
        part = cut_beside(batch, view.sizes(len(member.round.samples)), ranks.index(self.rank), is_sum)
        return each_twice(batch, ()) if member.round.part.trial == "doubled" else part

    def mean(
        self,
        tensors: list[Tensor | None],
        weight: float | None = None,
        numbers: Sequence[float] = (),
        scalars: Sequence[float] = (),
    ) -> Outcome:
        outcome: Outcome = self._run(self.member.mean(tensors, weight, numbers, scalars))
        return outcome

    def mean_scalars(self, scalars: Sequence[float], weight: float | None = None) -> Outcome:
        outcome: Outcome = self._run(self.member.mean_scalars(scalars, weight))
        return outcome

    def statistics(self, weight: Callable[[], float]) -> RoundStatistics:
        return RoundStatistics(self.member, self._run, weight)

    def skip(self, reason: str) -> None:
        self.member.round.kind, self.member.round.reason = "skip", self.reasons.bounded(reason)

    def defer(self) -> None:
        self.member.round.kind = "defer"

    def leave_out(self, samples: int) -> None:
        self.member.left_out += samples

    def stepped(self) -> None:
        self.member.stepped()

    def pause(self) -> None:
        self._run(self.member.pause())

    def leave(self) -> None:
        self._run(self.member.leave())

    def take_final(self) -> None:
        """Take the state of the member that left last, if this one left before it."""
        self._run(self.member.take_final())

    def abandon(self) -> None:
        """Let no other member wait for this one any more: its script has failed."""
        self.board.exclude()

    def _run(self, waiting: Waiting) -> Any:
        try:
            while True:
                until = next(waiting)
                if until is not None and not until():
                    began = self.member.clock()
                    self.board.wait(until)
                    self.waited(self.member.clock() - began)
        except StopIteration as end:
            self.has_left = self.member.has_left
            return end.value
