"""Other collective operations, from the tables of all-reduces where these have them."""

from __future__ import annotations

from rainband.collectives.algorithm import Algorithm
from rainband.collectives.check import TableError, check_table
from rainband.collectives.table import Move, MoveTable


def reduce_scatter(algorithm: Algorithm, num_ranks: int) -> MoveTable:
    """Return the first phase of an all-reduce: afterwards each part's owner has the part's sum.

    Raises ValueError if the algorithm has no such phase.
    """
    return _phases(algorithm, num_ranks)[0]


def all_gather(algorithm: Algorithm, num_ranks: int) -> MoveTable:
    """Return the second phase: every rank stores the parts of all owners. Raises ValueError if there is none."""
    return _phases(algorithm, num_ranks)[1]


def broadcast(num_ranks: int, root: int = 0) -> MoveTable:
    """Return a binomial tree: in step s, the 2^s ranks that have the vector give it to as many others."""
    moves = [
        Move(step, (root + rank) % num_ranks, (root + rank + (1 << step)) % num_ranks, 0, 1, False)
        for step in range((num_ranks - 1).bit_length())
        for rank in range(min(1 << step, num_ranks - (1 << step)))
    ]
    return MoveTable("broadcast", num_ranks, 1, tuple(moves), (root,))


def reduce(num_ranks: int, root: int = 0) -> MoveTable:
    """Return the same tree upside down: the root adds the vectors of all."""
    down = broadcast(num_ranks, root)
    last = down.num_steps - 1
    up = [Move(last - move.step, move.target, move.source, 0, 1, True) for move in down.moves]
    return MoveTable("reduce", num_ranks, 1, tuple(sorted(up)), (root,))


def _phases(algorithm: Algorithm, num_ranks: int) -> tuple[MoveTable, MoveTable]:
    table, name = algorithm.table(num_ranks), type(algorithm).__name__
    adds = tuple(move for move in table.moves if move.add)
    stores = tuple(move for move in table.moves if not move.add)
    problem = f"{name} has no reduce-scatter for {num_ranks} ranks"
    if adds and stores and adds[-1].step >= stores[0].step:
        raise ValueError(f"{problem}: it adds and stores in the same step. Use direct or ring.")
    owners: list[int] = []
    for part in range(table.num_parts):
        gives = {move.source for move in stores if move.first <= part < move.last}
        gets = {move.target for move in stores if move.first <= part < move.last}
        owner = gives - gets or ({0} if num_ranks == 1 else set())
        if len(owner) != 1:
            raise ValueError(f"{problem}: no rank has the sum of part {part} first. Use direct or ring.")
        owners += owner
    tables = (
        MoveTable("reduce_scatter", num_ranks, table.num_parts, adds, tuple(owners)),
        MoveTable("all_gather", num_ranks, table.num_parts, stores, tuple(owners)),
    )
    try:
        for phase in tables:
            check_table(phase)
    except TableError as error:
        raise ValueError(f"{problem}: {error} Use direct or ring.") from None
    return tables
