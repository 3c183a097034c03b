"""Two levels: sums inside each machine, then between machines, then back inside.

    step 0      rank j of each machine adds block j of its machine's other ranks, for j < L
    steps 1, 2  the M ranks j of all machines all-reduce block j directly (see `direct`)
    step 3      the other ranks of the machine store block j

L is the number of ranks on the smallest of M machines. Between machines, only 2(M−1)N bytes are sent in all, by L ranks
of each machine at the same time. Ranks are numbered machine by machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rainband.collectives.algorithm import Algorithm, Formulas, Textbook
from rainband.collectives.table import Move, MoveTable, all_reduce


@dataclass(frozen=True)
class TwoLevel(Algorithm):
    machines: int = 2  # among which the ranks are divided, as evenly as possible
    formulas: ClassVar[Formulas] = Formulas("4", "max(P/M, M)−1", "2(P−1)/P N if M divides P")

    def table(self, num_ranks: int) -> MoveTable:
        machines = self._ranks_of_machines(num_ranks)
        num_blocks, num_machines = min(map(len, machines)), len(machines)
        moves = []
        for number, ranks in enumerate(machines):
            for block in range(num_blocks):
                owner, first = ranks[block], block * num_machines
                for rank in ranks:
                    if rank != owner:
                        moves.append(Move(0, rank, owner, first, first + num_machines, True))
                        moves.append(Move(3, owner, rank, first, first + num_machines, False))
                for distance in range(1, num_machines):
                    other = (number + distance) % num_machines
                    source = machines[other][block]
                    moves.append(Move(1, source, owner, first + number, first + number + 1, True))
                    moves.append(Move(2, source, owner, first + other, first + other + 1, False))
        return all_reduce(num_ranks, num_blocks * num_machines, moves)

    def textbook(self, num_ranks: int) -> Textbook:
        sizes = [len(ranks) for ranks in self._ranks_of_machines(num_ranks)]
        least, most, num = min(sizes), max(sizes), len(sizes)
        steps = 2 * (most > 1) + 2 * (num > 1)  # inside, and between
        owner = (least - 1) / least + 2 * (num - 1) / (num * least) + (most - 1) / least
        return Textbook(steps, max(most - 1, num - 1), max(owner, float(most > least)), 2 * (num_ranks - 1))

    def _ranks_of_machines(self, num_ranks: int) -> list[range]:
        if self.machines < 1:
            raise ValueError(f"machines={self.machines}: it must be at least 1.")
        number = min(self.machines, num_ranks)
        bounds = [num_ranks * machine // number for machine in range(number + 1)]
        return [range(first, last) for first, last in pairwise(bounds)]
