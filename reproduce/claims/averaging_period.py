"""Eight workers with batches of 8; the control is one process with eight times the batch."""

from __future__ import annotations

from typing import Any

from reproduce.claim import Check, Claim, Method, Values, difference
from reproduce.runs import simulated

RATES = [{"lr": rate} for rate in (0.05, 0.1, 0.2, 0.4)]
ONE, EIGHTFOLD, MEAN, MOMENTUM = "one process", "8 times the batch", "averaging", "block momentum"


def point(seed: int, x: float, strategy: str, workers: int = 8, **settings: Any) -> Values:
    period = {"batch_per_worker": True} if strategy == "sync" else {} if strategy == "single" else {"period": int(x)}
    return simulated(strategy=strategy, workers=workers, seed=seed, **period, **settings)


CLAIM = Claim(
    paper="Chen et al. 2016; Su et al. 2015",
    text="accuracy falls with the averaging period, and block momentum recovers it",
    part="Model averaging",
    methods=(
        Method(ONE, {"strategy": "single", "workers": 1}, RATES, x=(1,)),
        Method(EIGHTFOLD, {"strategy": "sync"}, RATES, x=(1,)),
        Method(MEAN, {"strategy": "averaging"}, RATES),
        Method(MOMENTUM, {"strategy": "block_momentum"}, RATES),
    ),
    tasks={"digits": {"batch_size": 8, "epochs": 6}},
    point=point,
    x=(1, 16, 64),
    x_label="steps between two means",
    log_x=True,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "with a period of 1, the error is that of 8 times the batch",
            lambda r: abs(r(MEAN, "error", 1) - r(EIGHTFOLD, "error")),
            below=0.5,
            unit="points apart",
            control=True,
        ),
        Check(
            "a period of 64 has more errors than one of 1",
            lambda r: r(MEAN, "error", 64) - r(MEAN, "error", 1),
            above=0.0,
            unit="points",
        ),
        Check(
            "at a period of 16, block momentum has fewer errors than averaging",
            difference(MEAN, MOMENTUM, 16),
            above=0.0,
            unit="points",
        ),
        Check(
            "at a period of 16, block momentum is within 1 point of one process",
            lambda r: r(MOMENTUM, "error", 16) - r(ONE, "error"),
            below=1.0,
            unit="points",
        ),
    ),
    why="This task reaches its error with every period: 64 steps between two averages cost at most 1.4 points, as the "
    "interval says, so there is little that block momentum could recover. Larger tasks would be needed to decide.",
)
