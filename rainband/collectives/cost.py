"""The cost model: the time of a table from alpha (a message), beta (a byte moved) and gamma (a byte added).

In a step, a rank that receives m messages of b bytes in all, and adds a of these bytes, takes m alpha + b beta +
a gamma seconds; a rank that sends them takes m alpha + b beta. Chunk k of step s is due in time slot k + s. A slot
takes as long as its busiest rank; or, with more ranks than cores, as long as all ranks divided by the cores.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from rainband.collectives.algorithm import fast_algorithms
from rainband.collectives.table import MoveTable

CHUNK_BYTES = 256 << 10  # parts that are larger are cut
MAX_CHUNKS = 16  # that the model counts: more hardly change a prediction


class LinkCosts(NamedTuple):
    """Seconds of a message, of a byte moved and of a byte added, and the cores that the ranks share."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    cores: int


def num_chunks(num_bytes: int, num_parts: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of chunks that a part is cut into."""
    return max(1, -(-num_bytes // num_parts // chunk_bytes))


def predict_s(table: MoveTable, num_bytes: int, costs: LinkCosts) -> float:
    """Return the time that a table takes with vectors of this size."""
    chunks = min(MAX_CHUNKS, num_chunks(num_bytes, table.num_parts))
    part_bytes = num_bytes / table.num_parts
    slots: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for number, moves in enumerate(table.steps()):
        received: dict[int, float] = defaultdict(float)
        sent: dict[int, float] = defaultdict(float)
        for move in moves:
            moved = (move.last - move.first) * part_bytes / chunks
            sent[move.source] += costs.alpha_s + costs.beta_s * moved
            received[move.target] += costs.alpha_s + (costs.beta_s + costs.gamma_s * move.add) * moved
        for chunk in range(chunks):
            slot = slots[number + chunk]
            for rank in sent.keys() | received.keys():
                slot[rank] += max(sent[rank], received[rank])
    cores = max(1, costs.cores)
    return sum(max(max(slot.values()), sum(slot.values()) / cores) for slot in slots.values())


def fitted(num_ranks: int, small_s: float, large_s: float, large_bytes: int, gamma_s: float) -> LinkCosts:
    """Return the costs with which `recursive_doubling` of no bytes, and `direct` of many, take the measured times."""
    tables, cores = _fast_tables(num_ranks), os.cpu_count() or 1

    def units(name: str, num_bytes: int, costs: LinkCosts) -> float:
        return predict_s(tables[name], num_bytes, costs._replace(cores=cores))

    # Adding a byte takes at most twice as long as moving it: a measurement beyond that was disturbed by something else.
    alpha_s = small_s / (units("recursive_doubling", 0, LinkCosts(1, 0, 0, 0)) or 1.0)
    # Messages that follow each other cost less than single ones: at least half of the time is that of the bytes.
    rest_s = max(large_s / 2, large_s - units("direct", large_bytes, LinkCosts(alpha_s, 0, 0, 0)))
    gamma_s = min(gamma_s, rest_s / (units("direct", large_bytes, LinkCosts(0, 1, 1, 0)) or 1.0))
    added_s = units("direct", large_bytes, LinkCosts(0, 0, gamma_s, 0))
    beta_s = (rest_s - added_s) / (units("direct", large_bytes, LinkCosts(0, 1, 0, 0)) or 1.0)
    return LinkCosts(alpha_s, max(beta_s, 1e-13), gamma_s, cores)


@lru_cache(maxsize=1024)
def choose(num_ranks: int, num_bytes: int, costs: LinkCosts) -> str:
    """Return the name of the fast algorithm that takes the least time."""
    return ranking(num_ranks, num_bytes, costs)[0]


def ranking(num_ranks: int, num_bytes: int, costs: LinkCosts) -> list[str]:
    """Return the names of the fast algorithms, the fastest first; of equals the one with the fewest steps."""
    tables = _fast_tables(num_ranks)
    seconds = {name: predict_s(table, num_bytes, costs) for name, table in tables.items()}
    return sorted(tables, key=lambda name: (seconds[name], tables[name].num_steps, name))


def crossover_bytes(num_ranks: int, costs: LinkCosts, small: str, large: str, max_bytes: int = 1 << 32) -> int | None:
    """Return the size from which algorithm `large` is faster than `small`; None: it never is."""
    tables = _fast_tables(num_ranks)

    def is_faster(num_bytes: int) -> bool:
        return predict_s(tables[large], num_bytes, costs) < predict_s(tables[small], num_bytes, costs)

    low, high = 1, max_bytes
    if not is_faster(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle + 1, high)
    return high


@lru_cache(maxsize=64)
def _fast_tables(num_ranks: int) -> dict[str, MoveTable]:
    return {name: algorithm.table(num_ranks) for name, algorithm in fast_algorithms().items()}
