"""Recursive doubling: in step s, ranks that differ in bit s exchange their whole vectors and add them.

    step s    ranks r and r xor 2^s add each other's vector, for s = 0 ... log2 Q − 1

Q is the largest power of two up to P. The P−Q ranks in excess give their vectors to a neighbor before, and receive
the sum after: two more steps. The fewest steps of all, but each sends the whole vector: the choice for small vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce, fold, power_of_two


@dataclass(frozen=True)
class RecursiveDoubling(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("log2 Q, +2 if P>Q", "1", "N log2 Q, +N if P>Q", "QN log2 Q + 2(P−Q)N")
    is_fast: ClassVar[bool] = True

    def table(self, num_ranks: int) -> MoveTable:
        inner = power_of_two(num_ranks)
        moves = [
            Move(step, rank ^ (1 << step), rank, 0, 1, True)
            for step in range(inner.bit_length() - 1)
            for rank in range(inner)
        ]
        return fold(num_ranks, 1, all_reduce(inner, 1, moves))

    def textbook(self, num_ranks: int) -> Textbook:
        inner = power_of_two(num_ranks)
        log, rest = inner.bit_length() - 1, num_ranks - inner
        more = min(1, rest)
        return Textbook(log + 2 * more, min(1, log), log + more, inner * log + 2 * rest)
