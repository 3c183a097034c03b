"""Advice before a run that several strategies share: each sentence with the number that makes the setting bad."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rainband.strategy import Cluster

SLOWER = 2.0  # times as slow as the others: a straggler
MANY_TIMES = 10.0  # warn if the largest stable learning rate is smaller by this factor


def missed_updates(number: float) -> str:
    """Format a mean staleness: "1 update", "2.5 updates"."""
    return f"{number:.3g} update{'' if f'{number:.3g}' == '1' else 's'}"


def of_momentum(momentum: float, missed: float, cluster: Cluster) -> list[str]:
    """Warn about momentum: gradients with a mean staleness s act as a momentum of s / (s + 1)."""
    own = missed / (missed + 1)
    if not momentum or momentum + own < 1:
        return []
    return [
        f"momentum={momentum:g} with {cluster}: gradients miss {missed_updates(missed)} on average, which "
        f"acts as a momentum of {own:.2f} by itself; their sum is 1 or more. Omit momentum, or choose sync."
    ]


def of_stale_rate(optimizer: str, missed: float) -> list[str]:
    """Warn that x <- x - a h x(t - s) is stable only for a h < 2 sin(pi / (4 s + 2)); with s = 0 that is 2."""
    times = 1 / math.sin(math.pi / (4 * missed + 2))
    if optimizer != "sgd" or times < MANY_TIMES:
        return []
    return [
        f"gradients will miss {missed_updates(missed)} on average: the largest stable learning rate is then "
        f"{times:.2g} times smaller than that of one process. Choose a smaller lr, or soft_sync, which divides it, or "
        "adagrad."
    ]


def of_waiting(cluster: Cluster, bound: int = 0, how: str = "") -> list[str]:
    """Warn about a straggler: workers that wait for it run at its speed, `bound` steps later."""
    straggler = cluster.straggler
    if straggler is None:
        return []
    setting = how or f"with a bound of {bound}"
    idle = 1 - 1 / straggler.factor
    if not straggler.always:
        if bound:
            return []  # the bound absorbs it
        return [
            f"{straggler.who} takes {straggler.factor:.3g} times as long, and {setting} all workers wait for it: "
            f"{100 * idle:.0f} % of such a step. Choose stale_sync bound=3, or soft_sync."
        ]
    after = "" if not bound else f" after {bound} steps"
    return [
        f"{straggler.who} is {straggler.factor:.3g} times slower, and {setting}{after} all workers run at its speed: "
        f"the others wait {100 * idle:.0f} % of the time. Choose soft_sync or downpour, or sync batch_per_worker=true "
        "backup_workers=1."
    ]
