"""Splits of layers as they are typed, such as fc1=2; read without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = ("columns", "rows", "pair")


class SplitWords(NamedTuple):
    """One split: LAYER=HOW."""

    layer: str
    kind: str  # columns, rows, pair or tiles
    grid: tuple[int, ...]  # tiles: rows and columns; otherwise the number of shards

    @property
    def ways(self) -> int:
        """Number of shards."""
        product = 1
        for number in self.grid:
            product *= number
        return product


def parse_split(words: str) -> SplitWords:
    """Return what was typed; raise ValueError if it is no split."""
    name, _, how = words.rpartition("=")
    if name and (grid := re.fullmatch(r"(?:tiles:)?([1-9]\d*)x([1-9]\d*)", how)):
        return SplitWords(name, "tiles", (int(grid[1]), int(grid[2])))
    found = re.fullmatch(r"(?:(\w+):)?([1-9]\d*)", how)
    if not name or not found or (found[1] or KINDS[0]) not in KINDS:
        raise ValueError(
            f"'{words}' is not a split: type fc1=2 or fc1=columns:2 (outputs of a linear layer), fc1=rows:2 (its "
            "inputs), mlp=pair:2 (two linear layers) or conv=2x2 (tiles), with the name of a layer."
        )
    return SplitWords(name, found[1] or KINDS[0], (int(found[2]),))


def splits_of(typed: Sequence[str]) -> dict[str, str]:
    """Return layer -> how, of all splits that were typed."""
    found: dict[str, str] = {}
    for words in typed:
        layer = parse_split(words).layer
        if layer in found:
            raise ValueError(f"--split {layer} is given twice: give each layer once.")
        found[layer] = words.rpartition("=")[2]
    return found


def most_ways(splits: dict[str, str]) -> int:
    """Return the largest number of shards of a layer; 1 without splits."""
    return max((parse_split(f"{layer}={how}").ways for layer, how in splits.items()), default=1)
