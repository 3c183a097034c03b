"""The cost model: the time of a table from alpha (a message), beta (a byte moved) and gamma (a byte added).

In a step, a rank that receives m messages of b bytes in all, and adds a of these bytes, takes m alpha + b beta +
a gamma seconds; a rank that sends them takes m alpha + b beta. Large messages are cut into chunks: chunk k of step s is
due in time slot k + s, and those after the first follow it without another alpha. A slot takes as long as its busiest
rank; or, with more ranks than cores, as long as all ranks divided by the cores.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rainband.collectives.algorithm import fast_algorithms
from rainband.collectives.table import Move, MoveTable

CHUNK_BYTES = 256 << 10  # parts that are larger are cut
MAX_GAMMA = 16.0  # times beta: what recursive doubling takes longer through a second buffer counts as adding, too
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
        first, further = (_busy_s(moves, part_bytes / chunks, costs, alpha_s) for alpha_s in (costs.alpha_s, 0.0))
        for chunk in range(chunks):
            for rank, seconds in (further if chunk else first).items():
                slots[number + chunk][rank] += seconds
    cores = max(1, costs.cores)
    return sum(max(max(slot.values()), sum(slot.values()) / cores) for slot in slots.values())


def _busy_s(moves: Iterable[Move], part_bytes: float, costs: LinkCosts, alpha_s: float) -> dict[int, float]:
    """Return how long each rank is busy with a chunk of each move."""
    received: dict[int, float] = defaultdict(float)
    sent: dict[int, float] = defaultdict(float)
    for move in moves:
        moved = (move.last - move.first) * part_bytes
        sent[move.source] += alpha_s + costs.beta_s * moved
        received[move.target] += alpha_s + (costs.beta_s + costs.gamma_s * move.add) * moved
    return {rank: max(sent[rank], received[rank]) for rank in sent.keys() | received.keys()}


class Timings(NamedTuple):
    """Seconds of all-reduces from which the costs are found."""

    small_s: float  # recursive_doubling of no bytes
    direct_s: float  # of many bytes
    doubling_s: float  # recursive_doubling of as many, which adds more of them


def fitted(num_ranks: int, timings: Timings, large_bytes: int) -> LinkCosts:
    """Return the costs with which these all-reduces take the measured times."""
    tables, cores = _fast_tables(num_ranks), os.cpu_count() or 1

    def units(name: str, num_bytes: int, alpha_s: float, beta_s: float, gamma_s: float) -> float:
        return predict_s(tables[name], num_bytes, LinkCosts(alpha_s, beta_s, gamma_s, cores)) or 1.0

    def of_bytes(name: str, seconds: float) -> float:
        # Messages that follow each other cost less than single ones: at least half of the time is that of the bytes.
        messages_s = units(name, large_bytes, alpha_s, 0.0, 0.0) if alpha_s else 0.0
        return max(seconds / 2, seconds - messages_s)

    alpha_s = timings.small_s / units("recursive_doubling", 0, 1.0, 0.0, 0.0)
    direct_s, doubling_s = of_bytes("direct", timings.direct_s), of_bytes("recursive_doubling", timings.doubling_s)
    low, high = 0.0, MAX_GAMMA  # gamma / beta: the more an addition costs, the longer doubling takes than direct
    for _ in range(60):
        ratio = (low + high) / 2
        times = units("recursive_doubling", large_bytes, 0.0, 1.0, ratio) / units(
            "direct", large_bytes, 0.0, 1.0, ratio
        )
        low, high = (ratio, high) if times < doubling_s / max(direct_s, 1e-12) else (low, ratio)
    beta_s = max(direct_s / units("direct", large_bytes, 0.0, 1.0, low), 1e-13)
    return LinkCosts(alpha_s, beta_s, low * beta_s, cores)


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
