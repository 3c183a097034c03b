"""A collective operation as a table: who gives which parts of the vector to whom in which step.

In a step, every rank reads what was there before the step. The vector is divided into equal parts. A move stores the
parts of its source at its target, or adds them to the target's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "update"]


class Move(NamedTuple):
    """Parts first to last - 1 of `source`, stored at `target`, or added there."""

    step: int
    source: int
    target: int
    first: int
    last: int
    add: bool

    def __str__(self) -> str:
        verb = "adds" if self.add else "stores"
        return (
            f"step {self.step}: rank {self.target} {verb} parts {self.first} to {self.last - 1} of rank {self.source}"
        )


@dataclass(frozen=True)
class MoveTable:
    """The moves of one operation.

    `owners` has the rank of each part: of its sum after a reduce-scatter, of its values before an all-gather.
    It is empty where there are no owners.
    """

    operation: Operation
    num_ranks: int
    num_parts: int
    moves: tuple[Move, ...]
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.owners) in (0, self.num_parts), "every part has an owner, or none has"

    @property
    def num_steps(self) -> int:
        return len({move.step for move in self.moves})

    def steps(self) -> Iterator[list[Move]]:
        """Return the moves of each step."""
        for _, moves in groupby(sorted(self.moves, key=lambda move: move.step), key=lambda move: move.step):
            yield list(moves)

    def parts_of(self, rank: int) -> range:
        """Return the parts that a rank owns; they are consecutive."""
        owned = [part for part, owner in enumerate(self.owners) if owner == rank]
        return range(owned[0], owned[-1] + 1) if owned else range(0)


def all_reduce(num_ranks: int, num_parts: int, moves: Iterable[Move]) -> MoveTable:
    """Return the table of an all-reduce."""
    return MoveTable("all_reduce", num_ranks, num_parts, tuple(sorted(moves)))


def fold(num_ranks: int, num_parts: int, inner: MoveTable) -> MoveTable:
    """Return an all-reduce for any number of ranks from one for the largest power of two below.

    The ranks in excess give their vectors to a neighbor first, and receive the sum from it at the end.
    """
    rest = num_ranks - inner.num_ranks
    if not rest:
        return inner
    rank_of = [2 * i + 1 if i < rest else i + rest for i in range(inner.num_ranks)]
    end = 2 + max((move.step for move in inner.moves), default=-1)
    return all_reduce(
        num_ranks,
        num_parts,
        [
            *(Move(0, 2 * i, 2 * i + 1, 0, num_parts, True) for i in range(rest)),
            *(m._replace(step=m.step + 1, source=rank_of[m.source], target=rank_of[m.target]) for m in inner.moves),
            *(Move(end, 2 * i + 1, 2 * i, 0, num_parts, False) for i in range(rest)),
        ],
    )


def power_of_two(num_ranks: int) -> int:
    """Return the largest power of two that is at most `num_ranks`."""
    return 1 << (num_ranks.bit_length() - 1)
