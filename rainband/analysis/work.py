"""Work and depth of operations on tensors, counted in scalar operations: additions, products, comparisons, functions.

An operation is described by its levels: how many scalar operations can be done at the same time, level after level. Its
work W is their sum, and its depth D their number. n products that are summed in groups of k are n operations, then a
tree of additions:

    levels    n, n / 2, n / 4, ...  down to n / k        W = 2 n - n / k        D = 1 + ceil(log2 k)

Moving data (views, copies, filling with constants) counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeAlias

Levels: TypeAlias = tuple[int, ...]

NOTHING: Levels = ()


def each(number: int, times: int = 1) -> Levels:
    """Return `times` operations on each of `number` values, one after the other."""
    return (number,) * times if number else NOTHING


def summed(number: int, results: int) -> Levels:
    """Return trees of additions (or comparisons) that reduce `number` values to `results`."""
    levels, groups = [], max(1, results)
    left = -(-number // groups)  # values of the largest group
    missing = groups * left - number  # of the smaller groups
    while left > 1:
        half = left // 2
        level = groups * half - min(missing, groups * half - 1)
        missing -= groups * half - level
        levels.append(level)
        left -= half
    return tuple(levels)


def products(number: int, results: int) -> Levels:
    """Return `number` products, summed to `results` values: a matrix product or a convolution."""
    return (number, *summed(number, results)) if number else NOTHING


def softmax(number: int, groups: int) -> Levels:
    """Return the largest value of each group, differences, exponentials, their sum, and quotients."""
    return (*summed(number, groups), *each(number, 2), *summed(number, groups), *each(number))


def normalized(number: int, groups: int) -> Levels:
    """Return a mean, differences, squares, their mean, and the scaled values."""
    return (*summed(number, groups), *each(number, 2), *summed(number, groups), *each(number, 3))


def together(parts: Iterable[Levels]) -> Levels:
    """Return operations that do not depend on each other, level by level."""
    return tuple(sum(level) for level in zip_longest(*parts, fillvalue=0))


def in_turn(*parts: Levels) -> Levels:
    """Return operations that need each other's results."""
    return tuple(level for part in parts for level in part)
