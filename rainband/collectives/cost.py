"""The cost model: the time of a table from alpha (a message), beta (a byte moved) and gamma (a byte added).

In a step, a rank that receives m messages of b bytes in all, and adds a of these bytes, takes m alpha + b beta +
a gamma seconds; a rank that sends them takes m alpha + b beta. Large messages are cut into chunks: chunk k of step s is
due in time slot k + s, and those after the first follow it without another alpha. A slot takes as long as its busiest
rank; or, with more ranks than cores, as long as all ranks divided by the cores.

The three costs are fitted to a few measured all-reduces of three sizes, each of which all ranks begin together. What
waking a rank costs is thus in alpha, and what a second buffer costs, as in recursive doubling, in gamma.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from rainband.collectives.algorithm import fast_algorithms
from rainband.collectives.table import Move, MoveTable

CHUNK_BYTES = 256 << 10  # parts that are larger are cut
MAX_CHUNKS = 16  # that the model counts: more hardly change a prediction
# The all-reduces from whose times the costs are found: they differ in messages, bytes moved and bytes added.
MEASURED_NAMES, MEASURED_BYTES = ("recursive_doubling", "direct", "ring"), (4 << 10, 256 << 10, 4 << 20)
FIRST_GUESS, FIT_STEPS = (1e-5, 1e-10, 1e-10), 6

Measured = Mapping[tuple[str, int], float]  # (algorithm, bytes of the vector) -> seconds


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


def fitted(num_ranks: int, measured: Measured) -> LinkCosts:
    """Return the costs with which the measured all-reduces take these times, in the sense of least relative squares."""
    tables, cores = _fast_tables(num_ranks), os.cpu_count() or 1
    found = np.array(FIRST_GUESS)
    for _ in range(FIT_STEPS):  # a prediction is linear in the costs as long as the same ranks are the busiest
        rows = []
        for (name, num_bytes), seconds in measured.items():
            base_s = predict_s(tables[name], num_bytes, _costs(found, cores))
            row = []
            for which, value in enumerate(found):
                step = max(value, FIRST_GUESS[which] * 1e-3) * 1e-6
                changed = found.copy()
                changed[which] += step
                row.append((predict_s(tables[name], num_bytes, _costs(changed, cores)) - base_s) / step)
            rows.append([value / seconds for value in row])
        found = _least_squares(np.array(rows))
    return _costs(found, cores)


def _costs(values: np.ndarray, cores: int) -> LinkCosts:
    alpha_s, beta_s, gamma_s = values.tolist()
    return LinkCosts(alpha_s, beta_s, gamma_s, cores)


def _least_squares(rows: np.ndarray) -> np.ndarray:
    """Return the numbers, none of them negative, whose products with each row are nearest to 1."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, error = np.zeros(len(scale)), math.inf
    for used in product((True, False), repeat=len(scale)):
        values = np.zeros(len(scale))
        columns = list(used)
        values[columns] = np.linalg.lstsq((rows / scale)[:, columns], np.ones(len(rows)), rcond=None)[0]
        apart = float(np.square(rows / scale @ values - 1).sum())
        if (values >= 0).all() and apart < error:
            best, error = values / scale, apart
    return best


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
