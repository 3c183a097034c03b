"""Thirty workers with soft synchronization; the rate is that of n = 1, and divided by the staleness or not.

The paper trains CIFAR-10 for 140 epochs with a momentum of 0.9; here the momentum is 0.
"""

from __future__ import annotations

from typing import Any

from reproduce.claim import Check, Claim, Method, Values, difference
from reproduce.runs import simulated

RATES = [{"lr": rate} for rate in (0.1, 0.2, 0.3)]
NS = (1, 15, 30)
HARD, ONE, DIVIDED, OWN = "lock-step", "the rate of n = 1", "divided by the staleness", "a rate tuned for each n"
SOFT = {"strategy": "soft_sync", "guard": False}


def point(seed: int, x: float, **settings: Any) -> Values:
    soft = {"n": int(x)} if settings["strategy"] == "soft_sync" else {"batch_per_worker": True}
    return simulated(workers=30, seed=seed, **soft, **settings)


def more(method: str, n: int) -> Any:
    return lambda r: r(method, "error", n) - r(HARD, "error")


CLAIM = Claim(
    paper="Zhang et al. 2016, figure 3",
    text="one rate fails for stale gradients; divided by the staleness of each, it ends like lock-step",
    methods=(
        Method(HARD, {"strategy": "sync"}, RATES, x=(1,)),
        Method(ONE, {**SOFT, "scaling": "none"}, RATES, tuned_at=1),
        Method(DIVIDED, {**SOFT, "scaling": "staleness"}, RATES, tuned_at=1),
        Method(OWN, {**SOFT, "scaling": "none"}, [{"lr": rate} for rate in (0.005, 0.015, 0.05)]),
    ),
    tasks={"digits": {"batch_size": 4, "epochs": 12}},
    point=point,
    x=NS,
    x_label="n, updates per round of pushes",
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check("the rate of n = 1 fails at n = 30", lambda r: r(ONE, "error", 30), above=50.0, unit="% errors"),
        Check("divided, n = 15 is within 2 points of lock-step", more(DIVIDED, 15), below=2.0, unit="points"),
        Check("divided, n = 30 is within 2 points of lock-step", more(DIVIDED, 30), below=2.0, unit="points"),
        Check(
            "a rate tuned for n = 30 does not do as well",
            difference(OWN, DIVIDED, 30),
            above=0.0,
            unit="points more errors",
            control=True,
        ),
    ),
    why="Dividing by the staleness does what is claimed. But a rate that is tuned for n = 30 does as well here, so the "
    "control cannot tell the rule from a smaller rate.",
)
