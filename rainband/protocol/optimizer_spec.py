"""Name an optimizer and check its settings without importing torch: what a strategy says and what travels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from rainband.errors import did_you_mean

Settings = dict[str, Any]  # by name: a number, a bool, a string, None or a tuple of numbers

BUILT_IN = {  # name -> class in torch.optim; any other class is named module:Class
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adadelta": "Adadelta",
    "asgd": "ASGD",
    "rprop": "Rprop",
}
TAKERS = {  # which of them take what a strategy can set; importing torch to see it would take seconds
    "lr": set(BUILT_IN),
    "momentum": {"sgd", "rmsprop"},
    "weight_decay": set(BUILT_IN) - {"rprop"},
}
HOW_TO_COMPUTE = {"foreach", "fused", "capturable", "differentiable"}  # chosen by us, not a setting of the update
NOTES = {  # what torch's schedulers and users write into a parameter group for themselves
    *("params", "param_names", "name"),
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
}
NOT_THE_UPDATE = HOW_TO_COMPUTE | NOTES


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer by name, with settings for its constructor: OptimizerSpec("sgd", {"lr": 0.1})."""

    name: str  # one of BUILT_IN, or module:Class
    settings: dict[str, float | int | bool | str | list[float]] = {}

    def __post_init__(self) -> None:
        module, _, class_name = self.name.partition(":")
        if self.name in BUILT_IN or (module and class_name):
            return
        raise ValueError(
            f"no optimizer named '{self.name}'{did_you_mean(self.name.lower(), BUILT_IN)}: "
            f"choose from {', '.join(sorted(BUILT_IN))}, or give module:Class, such as mylab:Lion."
        )


def plain(settings: Mapping[str, object]) -> Settings:
    """The settings as torch has them: tuples, where lists have travelled."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def own_settings(owner: str, given: Mapping[str, object], known: Collection[str]) -> Settings:
    """Return the settings in `known`; raise an error naming `owner` for others, and ignore notes of schedulers."""
    own = {name: value for name, value in given.items() if name in known or name not in NOT_THE_UPDATE}
    for name in own:
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"{owner} has no setting '{name}'{near}: it has {', '.join(known)}.")
    return plain(own)


def changed_numbers(owner: str, number: int, old: Settings, group: Mapping[str, object]) -> Settings:
    """The settings to which group `number` gives a new value; raise if one may not change during a run."""
    own = own_settings(owner, group, old)
    changed = {name: value for name, value in own.items() if value != old[name]}
    for name, value in changed.items():
        on_or_off = name == "momentum" and 0 in (value, old[name])
        if on_or_off or not _can_become(value, old[name]):
            raise ValueError(
                f"parameter group {number}: {name} cannot go from {old[name]} to {value} during a run. "
                "Finite numbers can change, but momentum not from or to 0, because the state would not fit: "
                f"set {name} before the run begins."
            )
    return changed


def _can_become(value: object, old: object) -> bool:
    """Return True if `value` is a finite number, or a sequence of them, of the form of `old`; a bool is no number."""
    if isinstance(value, tuple) and isinstance(old, tuple):
        return len(value) == len(old) and all(map(_can_become, value, old))
    if isinstance(value, bool) or isinstance(old, bool) or not isinstance(old, int | float):
        return False
    return isinstance(value, int | float) and math.isfinite(value)


def element_wise(name: str, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """The optimizer a strategy's plain settings describe. To one of torch's own, 0 is a value like any other."""
    given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    takes = {key for key in given if name in TAKERS[key]}
    spec = OptimizerSpec(name, {key: value for key, value in given.items() if value or key == "lr" or key in takes})
    for key, value in given.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{key}={value}: choose a finite number, 0 or more.")
        if value and name in BUILT_IN and key not in takes:
            raise ValueError(
                f"{key}={value}: {name} has no {key}, it takes {' and '.join(k for k in given if k in takes)}. "
                f"Leave {key} out, or choose optimizer={' or '.join(sorted(TAKERS[key])[:3])}."
            )
    return spec
