"""Direct: every rank is the parameter server of one part (direct reduce-scatter, then direct all-gather).

    step 0    rank j adds part j of all other ranks
    step 1    every rank stores part j of rank j, for all j

Two steps, and no rank sends more than 2(P−1)/P N bytes. But every rank exchanges with all others in each step.
The best choice for large vectors in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce


@dataclass(frozen=True)
class Direct(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("2", "P−1", "2(P−1)/P N")
    is_fast: ClassVar[bool] = True

    def table(self, num_ranks: int) -> MoveTable:
        moves = []
        for distance in range(1, num_ranks):  # every rank reads from another source at each distance
            for rank in range(num_ranks):
                source = (rank + distance) % num_ranks
                moves.append(Move(0, source, rank, rank, rank + 1, True))
                moves.append(Move(1, source, rank, source, source + 1, False))
        return all_reduce(num_ranks, num_ranks, moves)

    def textbook(self, num_ranks: int) -> Textbook:
        others = num_ranks - 1
        return Textbook(2 if others else 0, others, 2 * others / num_ranks, 2 * others)
