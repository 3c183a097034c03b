"""Ring: each part travels once around the ring, growing into the sum, and once more, as the sum.

    step s = 0 ... P−2       rank r+1 adds part r−s of rank r          (reduce-scatter)
    step s = P−1 ... 2P−3    rank r+1 stores part r−s of rank r        (all-gather; parts and ranks modulo P)

Each rank has two neighbors, whatever the number of ranks, and sends 2(P−1)/P N bytes, which is the least possible.
The number of steps grows with P: latency is linear in the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce


@dataclass(frozen=True)
class Ring(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("2(P−1)", "1", "2(P−1)/P N")
    is_fast: ClassVar[bool] = True

    def table(self, num_ranks: int) -> MoveTable:
        moves = []
        for step in range(2 * num_ranks - 2):
            for rank in range(num_ranks):
                part = (rank - step) % num_ranks
                moves.append(Move(step, rank, (rank + 1) % num_ranks, part, part + 1, step < num_ranks - 1))
        return all_reduce(num_ranks, num_ranks, moves)

    def textbook(self, num_ranks: int) -> Textbook:
        others = num_ranks - 1
        return Textbook(2 * others, min(1, others), 2 * others / num_ranks, 2 * others)
