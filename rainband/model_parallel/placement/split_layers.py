"""Place the pieces of split layers side by side: piece n, or tile n, is on machine n; what depends on one goes with it.

What depends on several of them, or on none, is on machine 0. With fewer machines than pieces, they are dealt in turn.
"""

from __future__ import annotations

import re

from rainband.model_parallel.graph.tiles import tile_of
from rainband.model_parallel.placement.placement import Placement, from_placement
from rainband.model_parallel.placement.predict import predicted
from rainband.model_parallel.placement.profile import Profile, Resources


def split_layers(profile: Profile, resources: Resources) -> Placement:
    """A partition whose pieces are on different machines, whatever that takes: `balanced` asks what is fastest."""
    if all(piece_of(name) is None for name in profile.names):
        raise ValueError(
            f"{profile.model or 'the model'} has no pieces to place: split a layer (--split fc1=2), or let another "
            "partitioner plan."
        )
    where: dict[str, int] = {}
    read: dict[str, set[int]] = {name: set() for name in profile.names}
    for unit in profile.names:
        number = piece_of(unit)
        if number is not None:
            where[unit] = number % resources.num_machines
        else:
            where[unit] = next(iter(read[unit])) if len(read[unit]) == 1 else 0
        for value in profile.values:
            if value.maker == unit:
                for reader in value.readers:
                    read[reader].add(where[unit])
    return predicted(from_placement(profile, where, "split_layers", resources.num_machines), profile, resources)


def piece_of(unit: str) -> int | None:
    """The number of the piece or tile that a unit is, or belongs to; None: of none."""
    found = re.search(r"(?:^|_)pieces_of_(\d+)", unit)
    return int(found[1]) if found else tile_of(unit)
