"""Train one PyTorch model on machines you do not fully control, and know how stale, complete and far it is.

    rainband.fit(task, strategy=rainband.Downpour(n_push=4), workers=4, servers=2)      one call
    rainband.minimize(task, method="lbfgs", workers=4, servers=2)                       full-batch, second order
    with rainband.join(model, optimizer) as run: ...                                    a loop of your own

Every strategy can be had by its name from here. Importing this imports neither torch nor anything that starts.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

from rainband.fit import fit
from rainband.join import join, place
from rainband.minimize import minimize

__all__ = ["DatasetData", "ModuleTask", "TensorData", "__version__", "fit", "join", "minimize", "place"]

_TASK_PIECES = ("ModuleTask", "TensorData", "DatasetData")


def __getattr__(name: str) -> Any:
    """Strategies and the pieces of tasks, imported when they are first asked for."""
    if name in _TASK_PIECES:
        from rainband.tasks import task

        return getattr(task, name)
    from rainband.plugins import find_strategy, strategy_names

    for file_name in strategy_names():
        if file_name.replace("_", "") == name.lower() and name[:1].isupper():
            return find_strategy(file_name)
    raise AttributeError(
        f"rainband has no '{name}': it has fit, join, minimize, place, {', '.join(_TASK_PIECES)} and the strategies."
    )
