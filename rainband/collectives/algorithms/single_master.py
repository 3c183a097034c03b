"""Single master: every rank sends its vector to rank 0, which adds them and sends the sum back.

    step 0    rank 0 adds the vectors of all other ranks
    step 1    every other rank stores the sum

Rank 0 sends (P−1)N bytes, and receives as many: the more ranks, the slower. Use it for comparison only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce


@dataclass(frozen=True)
class SingleMaster(Algorithm):
    formulas: ClassVar[Formulas] = Formulas("2", "P−1", "(P−1)N")

    def table(self, num_ranks: int) -> MoveTable:
        others = range(1, num_ranks)
        up = [Move(0, rank, 0, 0, 1, True) for rank in others]
        return all_reduce(num_ranks, 1, up + [Move(1, 0, rank, 0, 1, False) for rank in others])

    def textbook(self, num_ranks: int) -> Textbook:
        others = num_ranks - 1
        return Textbook(2 if others else 0, others, others, 2 * others)
