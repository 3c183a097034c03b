"""Arithmetic of image tiles: which part of its input each tile needs, and whose it is."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """A local layer in one direction: what an output place sees of the input."""

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def outputs(self, inputs: int) -> int:
        return (inputs + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def sees(self, begin: int, end: int, inputs: int) -> Seen:
        """The inputs of output places begin to end; those outside the image are padding."""
        first = begin * self.stride - self.padding
        last = (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
        return Seen(max(0, first), min(inputs, last), max(0, -first), max(0, last - inputs))


class Seen(NamedTuple):
    begin: int
    end: int
    zeros_before: int
    zeros_after: int


class Overlap(NamedTuple):
    """A piece of a tile, in the tile's own coordinates."""

    tile: int
    begin: int
    end: int


def bounds(length: int, tiles: int) -> list[int]:
    """Where tiles begin, and the end: about equal, none empty."""
    if not 1 <= tiles <= length:
        raise ValueError(f"cannot cut {length} rows or columns into {tiles} tiles: choose from 1 to {length}.")
    return [length * n // tiles for n in range(tiles + 1)]


def overlaps(edges: list[int], begin: int, end: int) -> list[Overlap]:
    """The tiles that hold begin to end, with their pieces of it."""
    found = []
    for tile, (first, last) in enumerate(pairwise(edges)):
        low, high = max(first, begin), min(last, end)
        if low < high:
            found.append(Overlap(tile, low - first, high - first))
    return found
