"""Find a partitioner by its name, or module:function of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rainband.errors import did_you_mean
from rainband.model_parallel.placement.balanced import balanced
from rainband.model_parallel.placement.pipedream_planner import interleaved, one_machine_per_stage, pipedream
from rainband.model_parallel.placement.placement import Placement, check, from_placement
from rainband.model_parallel.placement.predict import predicted
from rainband.model_parallel.placement.profile import Profile, Resources
from rainband.model_parallel.placement.shard_names import shard_of


def split_layers(profile: Profile, resources: Resources) -> Placement:
    """Return a partition with the shards of each layer on different machines, even if it is slower; see `balanced`."""
    if all(shard_of(name) is None for name in profile.names):
        raise ValueError(
            f"{profile.model or 'the model'} has no shards to place: split a layer (--split fc1=2), or let another "
            "partitioner plan."
        )
    where: dict[str, int] = {}
    read: dict[str, set[int]] = {name: set() for name in profile.names}
    for unit in profile.names:
        number = shard_of(unit)
        if number is not None:
            where[unit] = number % resources.num_machines
        else:
            where[unit] = next(iter(read[unit])) if len(read[unit]) == 1 else 0
        for value in profile.values:
            if value.maker == unit:
                for reader in value.readers:
                    read[reader].add(where[unit])
    return predicted(from_placement(profile, where, "split_layers", resources.num_machines), profile, resources)


HYBRID = "hybrid"  # it also splits layers, so it has a search of its own: `wide_stages`
Partitioner = Callable[[Profile, Resources], Placement]
PARTITIONERS: dict[str, Partitioner] = {
    "balanced": balanced,
    "interleaved": interleaved,
    "one_machine_per_stage": one_machine_per_stage,
    "pipedream": pipedream,
    "split_layers": split_layers,
}


def find_partitioner(name: str) -> Partitioner:
    if name in PARTITIONERS:
        return PARTITIONERS[name]
    module_name, _, function = name.partition(":")
    if not function:
        known = sorted([*PARTITIONERS, HYBRID])
        raise ValueError(
            f"no partitioner named '{name}'{did_you_mean(name, known)}: choose from {', '.join(known)}, or give "
            "module:function of your own."
        )
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"no module named '{module_name}', neither installed nor here ({error}).") from None
    if not callable(found):
        raise ValueError(f"{module_name} has no function '{function}' that takes a Profile and Resources.")
    partitioner: Partitioner = found
    return partitioner


def make_plan(partitioner: Partitioner, profile: Profile, resources: Resources) -> Placement:
    """Return the partitioner's placement, checked and with a prediction."""
    plan = partitioner(profile, resources)
    if not isinstance(plan, Placement):
        raise ValueError(
            f"the partitioner returned a {type(plan).__name__}: it must return a rainband.model_parallel Placement."
        )
    check(plan, profile, resources)
    return predicted(plan, profile, resources)
