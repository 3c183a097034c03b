"""Double binary tree: each half of the vector is summed up one tree and comes down again, in chunks.

    up      a rank adds its children's vectors, then its parent adds its own
    down    a rank stores its parent's sum, then its children do

In the first tree, the parent of rank r > 0 is found in its bits: with b the lowest set bit, (r xor b) or 2b, or just
r xor b where that is no rank. The second tree is its mirror image if P is even, and shifted by one if P is odd. So
every rank (but one, if P is odd) is a leaf of one tree, and sends at most 2N bytes. Chunks follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce


@dataclass(frozen=True)
class DoubleTree(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("≤ 2 log2 P + 2", "≤ 3", "≤ 2N")
    is_fast: ClassVar[bool] = True

    def table(self, num_ranks: int) -> MoveTable:
        depths = [_depth(rank, num_ranks) for rank in range(num_ranks)]
        heights = [0] * num_ranks
        for rank in sorted(range(1, num_ranks), key=lambda rank: -depths[rank]):
            parent = _parent(rank, num_ranks)
            heights[parent] = max(heights[parent], heights[rank] + 1)
        moves = []
        for part in range(2):
            for rank in range(1, num_ranks):
                child = _rank_in_tree(part, rank, num_ranks)
                parent = _rank_in_tree(part, _parent(rank, num_ranks), num_ranks)
                moves.append(Move(heights[rank], child, parent, part, part + 1, True))
                moves.append(Move(heights[0] + depths[rank] - 1, parent, child, part, part + 1, False))
        return all_reduce(num_ranks, 2, moves)

    def textbook(self, num_ranks: int) -> Textbook:
        others = num_ranks - 1
        log = others.bit_length()  # rounded up
        return Textbook(2 * log + 2 if others else 0, min(others, 3), 2 if others else 0, 2 * others)


def _rank_in_tree(part: int, rank: int, num_ranks: int) -> int:
    if part == 0:
        return rank
    return num_ranks - 1 - rank if num_ranks % 2 == 0 else (rank + 1) % num_ranks


def _parent(rank: int, num_ranks: int) -> int:
    lowest = rank & -rank
    parent = rank ^ lowest | 2 * lowest
    return parent if parent < num_ranks else rank ^ lowest


def _depth(rank: int, num_ranks: int) -> int:
    depth = 0
    while rank:
        rank, depth = _parent(rank, num_ranks), depth + 1
    return depth
