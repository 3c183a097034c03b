"""EASGD works with 64 steps between two exchanges, where Downpour does not (Zhang et al. 2015).

Four workers with batches of 8, 540 steps of each; x is the period, for Downpour that of pushes and of pulls.
"""

from __future__ import annotations

from reproduce.claim import Check, Claim, Method
from reproduce.runs import simulate

RATES = [{"lr": rate} for rate in (0.0125, 0.025, 0.05, 0.1, 0.2)]


def point(seed: int, x: float, task: str, strategy: str, **settings: object) -> dict[str, float]:
    period = int(x)
    periods = {"period": period} if strategy == "elastic" else {"n_push": period, "n_fetch": period, "guard": False}
    return {"error": simulate(task, strategy, 4, seed, batch_size=8, **periods, **settings).error}  # type: ignore[arg-type]


CLAIM = Claim(
    paper="Zhang et al. 2015",
    text="EASGD trains as well with 64 steps between two exchanges as with 1, where Downpour does not",
    part="Model averaging",
    methods=(
        Method("EASGD", {"strategy": "elastic"}, RATES),
        Method("Downpour", {"strategy": "downpour", "optimizer": "sgd"}, RATES),
    ),
    settings={"epochs": 12},
    point=point,
    x=(1.0, 4.0, 16.0, 64.0),
    x_label="steps between two exchanges",
    log_x=True,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "EASGD has at most 2 points more errors with 64 steps than with 1",
            lambda r: r("EASGD", "error", 64.0) - r("EASGD", "error", 1.0),
            below=2.0,
            unit="points",
        ),
        Check(
            "with 64 steps, Downpour has over 2 points more errors than EASGD",
            lambda r: r("Downpour", "error", 64.0) - r("EASGD", "error", 64.0),
            above=2.0,
            unit="points",
        ),
        Check(
            "with 1 step, Downpour has at most 2 points more errors than EASGD",
            lambda r: r("Downpour", "error", 1.0) - r("EASGD", "error", 1.0),
            below=2.0,
            unit="points",
            control=True,
        ),
    ),
)
