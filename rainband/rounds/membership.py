"""A worker's membership in the rounds: its life, the view that all members have, and what it reads of the others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from rainband.rounds.board import Board, Condition
from rainband.rounds.view import Header, Member, RoundView

Waiting = Generator[Condition | None, None, Any]
Headers = dict[int, Header]


class RoundMembership:
    """One worker's membership. It ends when another process excludes this life, and may begin again with the next."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.rank = board.rank
        self.life = 0
        self.is_in = False
        self.count = -1  # exchanges and steps that are in the parameters; -1: no state yet
        self.view = RoundView(0, 0, ())
        self.view_key = 0
        self.slot = 0  # of the next contribution
        self.blocked_by: int | None = None  # the member for which this one has waited last

    def take(self, view: RoundView) -> None:
        self.view = view
        self.view_key = view.key()

    # ---- this member -----------------------------------------------------------------------------------------------

    @property
    def own(self) -> Member:
        return next(member for member in self.view.members if member.rank == self.rank)

    def is_excluded(self) -> bool:
        return self.board.excluded(self.rank) >= self.life

    def ends(self) -> bool:
        """Return True, and end the membership, if this member was excluded: others repeat its part of the round."""
        excluded = self.is_excluded()
        if excluded:
            self.is_in = False
        return excluded

    def end(self) -> None:
        """Let no other member wait for this one."""
        self.board.exclude()
        self.is_in = False

    # ---- other members ---------------------------------------------------------------------------------------------

    def reached(self, rank: int, life: int, target: int) -> bool | None:
        """Return True if a life has reached a position, False if it never will, None if it may.

        The position is read first: when it is of a later life, this life is seen to be excluded.
        """
        reached = self.board.position(rank) >= target
        if self.board.excluded(rank) >= life:
            return self.board.final(rank, life) >= target
        return True if reached else None

    def when_all_reached(self, target: int) -> Condition:
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

    def when_reached(self, rank: int, life: int, target: int) -> Callable[[], bool]:
        """Return the condition that one life has reached a position or never will, or this member was excluded."""
        return lambda: self.reached(rank, life, target) is not None or self.is_excluded()

    def lagging(self) -> int | None:
        """Return a member that has not come as far as this one's last contribution; None: none is known."""
        mine = self.board.position(self.rank)
        for member in self.view.members if self.is_in else ():
            if self.reached(member.rank, member.life, mine) is None:
                return member.rank
        return None

    def headers(self, target: int, own: Header) -> Headers:
        """Return the headers of the members that have contributed to an exchange; others are lost, or passed it."""
        headers = {}
        for member in self.view.members:
            if member.rank == self.rank:
                headers[member.rank] = own
            elif self.reached(member.rank, member.life, target):
                slot = self.slot_of(member.rank, target)
                if slot >= 0:
                    headers[member.rank] = self.board.header(member.rank, slot)
        return headers

    def slot_of(self, rank: int, target: int) -> int:
        """Return the slot of a member's contribution to an exchange; -1: it made none."""
        if self.board.published(rank, 0) == target:
            return 0
        return 1 if self.board.published(rank, 1) == target else -1

    def excluded_members(self) -> tuple[int, ...]:
        excluded = self.board.excluded
        return tuple([m.rank for m in self.view.members if excluded(m.rank) >= m.life])

    def asking(self) -> tuple[tuple[int, int], ...]:
        """Return the workers that ask to join, with their lives."""
        found = []
        for rank in range(self.board.num_ranks):
            asking = self.board.asking(rank)
            if asking is not None and self.board.excluded(rank) < asking.life and not self._has(rank, asking.life):
                found.append((rank, asking.life))
        return tuple(found)

    def _has(self, rank: int, life: int) -> bool:
        """Return True if this life of a worker, or a later one, is a member."""
        return any(member.rank == rank and member.life >= life for member in self.view.members)
