"""The shard or tile that a unit of a cut model belongs to, which its name tells."""

from __future__ import annotations

import re


def piece_of(unit: str) -> int | None:
    """Return the number of the shard or tile that a unit belongs to; None: to none."""
    found = re.search(r"(?:^|_)layer_shards_(\d+)", unit)
    return int(found[1]) if found else tile_of(unit)


def tile_of(unit: str) -> int | None:
    """Return the tile that a unit of a cut model belongs to; None: to no tile."""
    found = re.search(r"(?:^|_)tile(\d+)_(?:input|layer)", unit)
    return int(found[1]) if found else None
