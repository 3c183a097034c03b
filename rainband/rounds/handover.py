"""The training state that one member gives to others, through the board."""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.rounds.exchange import StateHolder
from rainband.rounds.membership import RoundMembership, Waiting
from rainband.rounds.view import RoundView


class StateHandover:
    """Gives this member's state to others, or takes that of another one."""

    def __init__(self, membership: RoundMembership, holder: StateHolder) -> None:
        self.membership = membership
        self.holder = holder

    def give(self, at: int, view: RoundView) -> Waiting:
        """Leave the state for those that begin the round at this position."""
        yield None
        self.membership.board.put_state(at, self._state(view))
        yield None

    def prepare(self) -> None:
        """Make room for the state, a round before it is given: new memory takes longer than copying."""
        self.membership.board.put_state(0, self._state(self.membership.view))

    def _state(self, view: RoundView) -> dict[str, Any]:
        count = self.membership.count
        return {"view": msgspec.json.encode(view).decode(), "count": count, "training": self.holder.collect()}

    def receive(self, giver: int, life: int, at: int) -> Waiting:
        """Take the state of a member when it has given it; return False if it, or this member, is lost before."""
        member = self.membership
        yield member.when_reached(giver, life, at)
        if not member.reached(giver, life, at):
            return False
        return (yield from self.take(giver, at))

    def take(self, giver: int, at: int, is_final: bool = False) -> Waiting:
        """Take a state that was given; return False if there is none, or this member was excluded meanwhile.

        A final state is taken by members that have left, too: it does not change any more.
        """
        member = self.membership
        state = member.board.state(giver, at)
        yield None
        if state is None or (not is_final and member.ends()):
            return False
        self.holder.apply(state["training"])
        member.count = state["count"]
        member.take(msgspec.json.decode(state["view"], type=RoundView))
        return True
