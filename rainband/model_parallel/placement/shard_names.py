"""Read from the name of a unit which shard of a layer, or which tile, it belongs to."""

from __future__ import annotations

import re


def shard_of(unit: str) -> int | None:
    """Return the number of the shard or tile that a unit belongs to; None: to none."""
    found = re.search(r"(?:^|_)layer_shards_(\d+)", unit)
    return int(found[1]) if found else tile_of(unit)


def tile_of(unit: str) -> int | None:
    """Return the tile that a unit of a cut model belongs to; None: to no tile."""
    found = re.search(r"(?:^|_)tile(\d+)_(?:input|layer)", unit)
    return int(found[1]) if found else None
