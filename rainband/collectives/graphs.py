"""Graphs of workers that average with their neighbors, and their mixing matrices.

Entry (i, j) of a mixing matrix is the weight that worker i gives to worker j. The matrices are symmetric, and the rows
sum to 1: so each mixing keeps the mean of all workers, and brings them together if the graph is connected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

NAMES = ("ring", "torus", "exponential", "complete")
Matrix = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=256)
def mixing_matrix(graph: str, number: int) -> Matrix:
    """Return the matrix of a graph of `number` workers: one of NAMES, or a file with one edge per line, such as 0 1.

        ring           1/3 for oneself and each of two neighbors
        torus          1/5 for oneself and each of four neighbors in a grid, as square as possible
        exponential    equal weights for oneself and those 1, 2, 4, 8, ... further, in both directions
        complete       1/n for all
        a file         1 / (1 + the larger degree) for each edge, and the rest for oneself (Metropolis and Hastings)

    Of a file, workers beyond `number` are left out.
    """
    match graph:
        case "ring":
            return _circulant(number, (1, -1))
        case "torus":
            return _torus(number)
        case "exponential":
            steps = [1 << k for k in range((number - 1).bit_length())]
            return _circulant(number, (*steps, *(-step for step in steps)))
        case "complete":
            return _circulant(number, range(1, number))
    return _metropolis(read_edges(graph), number)


def check_graph(graph: str) -> None:
    """Raise ValueError if there is no such graph."""
    if graph not in NAMES:
        read_edges(graph)


def is_connected(matrix: Sequence[Sequence[float]]) -> bool:
    """Return True if every worker reaches all others along edges."""
    reached, waiting = {0}, [0]
    while waiting:
        row = matrix[waiting.pop()]
        new = {j for j, weight in enumerate(row) if weight and j not in reached}
        reached |= new
        waiting += new
    return len(reached) == len(matrix)


def advice_of(graph: str, number: int, workers: str) -> list[str]:
    """Return what a user should know about a graph of `number` workers, which messages call `workers`."""
    lines = []
    if not is_connected(mixing_matrix(graph, number)):
        lines.append(f"graph={graph} is not connected with {workers}: parts of it never learn from each other.")
    last = -1 if graph in NAMES else max(map(max, read_edges(graph)))
    if last >= number:
        lines.append(f"graph={graph} has edges of worker {last}, which are left out: use --workers {last + 1}.")
    return lines


@lru_cache(maxsize=16)
def read_edges(path: str) -> frozenset[tuple[int, int]]:
    """Return the edges of a file: two ranks per line, and comments after #."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        names = ", ".join(NAMES)
        raise ValueError(
            f"graph={path}: it must be {names}, or a file with one edge per line, such as  0 1  ({error.strerror})."
        ) from None
    edges = set()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() for word in words) or words[0] == words[1]:
            raise ValueError(f"{path}, line {number}: {line.strip()!r} must be two different ranks, such as  0 1.")
        one, other = map(int, words)
        edges.add((min(one, other), max(one, other)))
    if not edges:
        raise ValueError(f"{path} has no edges: write one per line, such as  0 1.")
    return frozenset(edges)


def _circulant(number: int, steps: Sequence[int]) -> Matrix:
    """Return equal weights for oneself and the workers at these distances; those that coincide add up."""
    matrix = [[0.0] * number for _ in range(number)]
    steps = steps if number > 1 else ()
    for i, row in enumerate(matrix):
        for step in (0, *steps):
            row[(i + step) % number] += 1 / (len(steps) + 1)
    return tuple(map(tuple, matrix))


def _torus(number: int) -> Matrix:
    rows = max(rows for rows in range(1, math.isqrt(number) + 1) if number % rows == 0)
    columns = number // rows
    matrix = [[0.0] * number for _ in range(number)]
    for i, weights in enumerate(matrix):
        row, column = divmod(i, columns)
        for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            weights[(row + down) % rows * columns + (column + right) % columns] += 1 / 5
    return tuple(map(tuple, matrix))


def _metropolis(edges: frozenset[tuple[int, int]], number: int) -> Matrix:
    inside = [(one, other) for one, other in edges if other < number]
    degree = [sum(i in edge for edge in inside) for i in range(number)]
    matrix = [[0.0] * number for _ in range(number)]
    for one, other in inside:
        matrix[one][other] = matrix[other][one] = 1 / (1 + max(degree[one], degree[other]))
    for i, row in enumerate(matrix):
        row[i] = 1.0 - sum(row)
    return tuple(map(tuple, matrix))
