"""Find a partitioner by its name, or module:function of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rainband.model_parallel.placement.balanced import balanced
from rainband.model_parallel.placement.pipedream_planner import interleaved, one_machine_per_stage, pipedream
from rainband.model_parallel.placement.placement import Placement, check
from rainband.model_parallel.placement.predict import predicted
from rainband.model_parallel.placement.profile import Profile, Resources
from rainband.model_parallel.placement.split_layers import split_layers

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
        raise ValueError(
            f"no partitioner named '{name}': choose from {', '.join(PARTITIONERS)}, or give module:function of your "
            "own."
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
    """A plan that was checked and has a prediction, whoever made it."""
    plan = partitioner(profile, resources)
    if not isinstance(plan, Placement):
        raise ValueError(
            f"the partitioner returned a {type(plan).__name__}: it should return a rainband.model_parallel Plan."
        )
    check(plan, profile, resources)
    return predicted(plan, profile, resources)
