"""The memory that the members of a round share: an interface, and an implementation inside one process.

Each word and each area has one writer: its member, or, for exclusions, the launcher. A member excludes itself only
when it pauses or leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from rainband.rounds.view import Header, Member

Condition = Callable[[], bool]


class Asking(NamedTuple):
    """A worker that asks to join, and the state that it can give if no member is left."""

    life: int
    steps: int  # its count of exchanges and steps; -1: it has no state
    since: int
    electing: bool = False  # it is about to go on by itself, because all others ask or are excluded


class RoundEntry(msgspec.Struct, frozen=True, array_like=True):
    """The members of a round that some of them enter, and the member that gives the state."""

    position: int
    giver: int
    members: tuple[Member, ...]


class Board(Protocol):
    """The shared memory, seen from one member. Methods without a rank write this member's own words."""

    rank: int

    @property
    def num_ranks(self) -> int:
        """Return the number of workers that can be members."""

    def position(self, rank: int) -> int: ...

    def set_position(self, value: int) -> None: ...

    def life(self, rank: int) -> int: ...

    def set_life(self, life: int) -> None: ...

    def excluded(self, rank: int) -> int:
        """Return the last life of this worker that was excluded; 0: none."""

    def final(self, rank: int, life: int) -> int:
        """Return the position that an excluded life had; that of its last life but one is kept."""

    def exclude(self) -> None:
        """Exclude this member's own life, at its present position."""

    def asking(self, rank: int) -> Asking | None: ...

    def ask(self, asking: Asking | None) -> None: ...

    def admission(self, rank: int) -> RoundEntry | None: ...

    def admit(self, admission: RoundEntry) -> None: ...

    def published(self, rank: int, slot: int) -> int:
        """Return the position of the contribution in one of a member's two slots."""

    def header(self, rank: int, slot: int) -> Header: ...

    def tensors(self, rank: int, slot: int) -> Sequence[Tensor]: ...

    def area(self, rank: int, slot: int) -> Tensor:
        """Return the memory of a contribution, as bytes: for tensors that are encoded."""

    def publish(self, slot: int, position: int, header: Header) -> None:
        """Write the header, then the position of the slot, then that of the member."""

    def withdraw(self, slot: int) -> None:
        """Hide the contribution in this slot from the other members."""

    def put_state(self, position: int, state: Any) -> None:
        """Give a state; with position 0, only make room for it, so that giving it later takes less time."""

    def state(self, rank: int, position: int) -> Any | None:
        """Return a copy of the state that a member has given at this position; None: it has not."""

    def wait(self, until: Condition) -> None: ...


class _Words:
    """One member's words, areas and state."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.position = 0
        self.life = 0
        self.excluded = 0
        self.finals = [0, 0]
        self.asking: Asking | None = None
        self.admission: RoundEntry | None = None
        self.published = [0, 0]
        self.headers: list[Header | None] = [None, None]
        self.areas = [[torch.zeros_like(tensor) for tensor in like] for _ in range(2)]
        self.encoded: dict[int, Tensor] = {}  # the same areas, for contributions that are encoded
        self.state: tuple[int, Any] = (0, None)


class SharedMemory:
    """The memory of all members that are in one process."""

    def __init__(self, num_ranks: int, like: Sequence[Tensor]) -> None:
        self.words = [_Words(like) for _ in range(num_ranks)]

    def add_rank(self, like: Sequence[Tensor]) -> None:
        """Make room for one more member."""
        self.words.append(_Words(like))

    def exclude(self, rank: int) -> None:
        """Exclude a worker that will not write any more, or not before it has seen this."""
        words = self.words[rank]
        life = max(1, words.life)
        if words.excluded < life:
            words.finals[life % 2] = words.position
            words.excluded = life


def _never(until: Condition) -> None:
    raise RuntimeError("this member would wait for others forever, because they are in the same thread")


class LocalBoard:
    """A board whose members are in one process; alone, a member never waits."""

    def __init__(self, memory: SharedMemory, rank: int, wait: Callable[[Condition], None] = _never) -> None:
        self.memory = memory
        self.rank = rank
        self.own = memory.words[rank]
        self._wait = wait

    @property
    def num_ranks(self) -> int:
        return len(self.memory.words)

    def position(self, rank: int) -> int:
        return self.memory.words[rank].position

    def set_position(self, value: int) -> None:
        self.own.position = value

    def life(self, rank: int) -> int:
        return self.memory.words[rank].life

    def set_life(self, life: int) -> None:
        self.own.life = life

    def excluded(self, rank: int) -> int:
        return self.memory.words[rank].excluded

    def final(self, rank: int, life: int) -> int:
        return self.memory.words[rank].finals[life % 2]

    def exclude(self) -> None:
        self.memory.exclude(self.rank)

    def asking(self, rank: int) -> Asking | None:
        return self.memory.words[rank].asking

    def ask(self, asking: Asking | None) -> None:
        self.own.asking = asking

    def admission(self, rank: int) -> RoundEntry | None:
        return self.memory.words[rank].admission

    def admit(self, admission: RoundEntry) -> None:
        self.own.admission = admission

    def published(self, rank: int, slot: int) -> int:
        return self.memory.words[rank].published[slot]

    def header(self, rank: int, slot: int) -> Header:
        header = self.memory.words[rank].headers[slot]
        assert header is not None, "only published slots are read"
        return header

    def tensors(self, rank: int, slot: int) -> Sequence[Tensor]:
        return self.memory.words[rank].areas[slot]

    def area(self, rank: int, slot: int) -> Tensor:
        words = self.memory.words[rank]
        if slot not in words.encoded:
            words.encoded[slot] = torch.zeros(sum(t.nbytes for t in words.areas[slot]), dtype=torch.uint8)
        return words.encoded[slot]

    def publish(self, slot: int, position: int, header: Header) -> None:
        self.own.headers[slot] = header
        self.own.published[slot] = position
        self.own.position = position

    def withdraw(self, slot: int) -> None:
        self.own.published[slot] = 0

    def put_state(self, position: int, state: Any) -> None:
        if position:
            self.own.state = position, _copied(state)

    def state(self, rank: int, position: int) -> Any | None:
        given_at, state = self.memory.words[rank].state
        return _copied(state) if given_at == position else None

    def wait(self, until: Condition) -> None:
        if not until():
            self._wait(until)


def _copied(state: Any) -> Any:
    match state:
        case Tensor():
            return state.detach().clone()
        case dict():
            return {key: _copied(value) for key, value in state.items()}
        case list():
            return [_copied(value) for value in state]
        case tuple():
            return tuple(_copied(value) for value in state)
    return state
