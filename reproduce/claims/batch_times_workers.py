"""Soft synchronization with n = 1: an update averages about mu * lambda samples, mu for each of lambda workers."""

from __future__ import annotations

from typing import Any

from reproduce.claim import Check, Claim, Method, Results, Values
from reproduce.runs import simulated

RATES = [{"lr": rate} for rate in (0.1, 0.2, 0.4)]
WORKERS = (1, 4, 16, 32)
SMALL, LARGE, SAME_UPDATES = "128", "512", "512, as many updates as 128"


def point(seed: int, x: float, product: int, **settings: Any) -> Values:
    size = product // int(x)
    how: dict[str, Any] = {"n": 1, "scaling": "none", "guard": False}
    return simulated(strategy="soft_sync", workers=int(x), seed=seed, batch_size=size, **how, **settings)


def more(name: str, than: str) -> Any:
    """Return the difference in errors, the mean over all numbers of workers, seed by seed."""

    def points(r: Results) -> Any:
        return sum(r(name, "error", x) - r(than, "error", x) for x in WORKERS) / len(WORKERS)

    return points


CLAIM = Claim(
    paper="Gupta et al. 2016, Rudra",
    text="a constant product of batch size and number of workers keeps the error, and a larger one raises it",
    methods=(
        Method(SMALL, {"product": 128, "epochs": 12}, RATES),
        Method(LARGE, {"product": 512, "epochs": 12}, RATES),
        Method(SAME_UPDATES, {"product": 512, "epochs": 48}, RATES),
    ),
    point=point,
    x=WORKERS,
    x_label="workers",
    log_x=True,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "128: with 32 workers at most 2 points more errors than with 1",
            lambda r: r(SMALL, "error", 32) - r(SMALL, "error", 1),
            below=2.0,
            unit="points",
        ),
        Check("512: more errors than with 128", more(LARGE, SMALL), above=0.0, unit="points"),
        Check(
            "512 also has more errors after as many updates",
            more(SAME_UPDATES, SMALL),
            above=0.0,
            unit="points",
            control=True,
        ),
    ),
    why="The first two halves hold, but a larger product also makes fewer updates in as many passes: after as many "
    "updates, the error is the same. So on this task it is the number of updates that decides, not the staleness.",
)
