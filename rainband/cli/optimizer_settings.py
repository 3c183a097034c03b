"""Whether a strategy's optimizer can take its settings, told before anything starts, and so without asking torch."""

from __future__ import annotations

import math
from typing import Any

from rainband.optim_spec import BUILT_IN, OptimizerSpec
from rainband.types import Strategy

TAKERS = {  # which optimizers take what a strategy can set
    "lr": set(BUILT_IN),
    "momentum": {"sgd", "rmsprop"},
    "weight_decay": set(BUILT_IN) - {"rprop"},
}


def check_optimizer(strategy: Strategy) -> None:
    spec = _spec_of(strategy)
    if spec is None:
        return
    for name, value in spec.settings.items():
        if name not in TAKERS or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value}: choose a finite number, 0 or more.")
        if spec.name in BUILT_IN and spec.name not in TAKERS[name]:
            takes = " and ".join(other for other, takers in TAKERS.items() if spec.name in takers)
            raise ValueError(
                f"{name}={value}: {spec.name} has no {name}, it takes {takes}. Leave {name} out, or choose "
                f"optimizer={' or '.join(sorted(TAKERS[name])[:3])}."
            )


def _spec_of(strategy: Strategy) -> OptimizerSpec | None:
    """What the servers run, or the worker where there are none; none: the strategy keeps it to itself."""
    half: Any = strategy.server(1)
    spec = getattr(half, "optimizer", None)
    if half is None:
        own = getattr(strategy, "spec", None)
        spec = own() if callable(own) else None
    return spec if isinstance(spec, OptimizerSpec) else None
