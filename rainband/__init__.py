"""Fault-tolerant, asynchronous data-parallel training of PyTorch models with parameter servers.

    rainband.fit(task, strategy=rainband.Downpour(n_push=4), workers=4, servers=2)      train with one call
    rainband.minimize(task, method="lbfgs", workers=4, servers=2)                       full-batch optimization
    with rainband.join(model, optimizer) as run: ...                                    a custom training loop

Every strategy has its name here, such as rainband.Downpour. Importing this module imports no torch.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

from rainband.fit import FitResult, fit
from rainband.join import join, num_workers, rank
from rainband.minimize import MinimizeResult, minimize
from rainband.options import OptionError

__all__ = [
    "DatasetData",
    "FitResult",
    "MinimizeResult",
    "ModuleTask",
    "OptionError",
    "TensorData",
    "__version__",
    "fit",
    "join",
    "minimize",
    "num_workers",
    "rank",
]

_OF_TASKS = ("ModuleTask", "TensorData", "DatasetData")


def __getattr__(name: str) -> Any:
    """Import strategies and the classes for tasks when they are first used."""
    if name in _OF_TASKS:
        from rainband.tasks import task

        return getattr(task, name)
    from rainband.errors import did_you_mean
    from rainband.plugins import find_strategy, strategy_names

    for file_name in strategy_names():
        if file_name.replace("_", "") == name.lower() and name[:1].isupper():
            return find_strategy(file_name)
    known = [*__all__, *(file_name.title().replace("_", "") for file_name in strategy_names())]
    # Without a period, because Python may add a hint of its own.
    raise AttributeError(f"rainband has no '{name}'{did_you_mean(name, known)}: it has {', '.join(known)}")
