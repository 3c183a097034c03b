"""Recursive halving and doubling: exchange half of the vector, then a quarter, and so on; then all the way back.

    step s         ranks r and r xor Q/2^(s+1) share a range of parts; each adds the half that it keeps
    on the way back  the same pairs, in reverse order, store what the other kept

Q is the largest power of two up to P. The P−Q ranks in excess give their vectors to a neighbor before, and receive
the sum after. That neighbor sends 2(Q−1)/Q N + N bytes, more than in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce, fold, power_of_two


@dataclass(frozen=True)
class HalvingDoubling(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("2 log2 Q, +2 if P>Q", "1", "2(Q−1)/Q N, +N if P>Q")
    is_fast: ClassVar[bool] = True

    def table(self, num_ranks: int) -> MoveTable:
        inner = power_of_two(num_ranks)
        bits, moves = inner.bit_length() - 1, []
        for step in range(bits):
            kept = inner >> (step + 1)  # parts of each half, and the distance between partners
            for rank in range(inner):
                partner, first = rank ^ kept, rank // kept * kept
                moves.append(Move(step, partner, rank, first, first + kept, True))
                moves.append(Move(2 * bits - 1 - step, rank, partner, first, first + kept, False))
        return fold(num_ranks, inner, all_reduce(inner, inner, moves))

    def textbook(self, num_ranks: int) -> Textbook:
        inner = power_of_two(num_ranks)
        log, rest = inner.bit_length() - 1, num_ranks - inner
        more = min(1, rest)
        return Textbook(2 * (log + more), min(1, log), 2 * (inner - 1) / inner + more, 2 * (num_ranks - 1))
