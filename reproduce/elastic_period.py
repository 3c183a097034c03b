"""Elastic averaging bears long communication periods at which Downpour fails (Zhang et al. 2015).

Four workers train digits with batches of 16, and exchange with the servers every 1 or 64 steps. Each method uses
the better of two learning rates for each period, by the mean error. Verdicts are 95 % intervals of the difference, seed
by seed.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from reproduce.runs import arguments, draw, interval, mean_and_spread, report, simulate

WORKERS, BATCH_SIZE, EPOCHS = 4, 16, 12
PERIODS = (1, 64)
RATES = (0.05, 0.3)


def errors(strategy: str, seeds: range, **settings: Any) -> list[float]:
    return [
        simulate("digits", strategy, WORKERS, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, **settings).error
        for seed in seeds
    ]


def settings_of(strategy: str, period: int, lr: float) -> dict[str, Any]:
    if strategy == "elastic":
        return {"period": period, "lr": lr}
    return {"n_push": period, "n_fetch": period, "lr": lr, "optimizer": "sgd", "guard": False}


def best(strategy: str, period: int, seeds: range) -> tuple[list[float], float]:
    """Return the errors with the best of the rates, and that rate."""
    tried = {lr: errors(strategy, seeds, **settings_of(strategy, period, lr)) for lr in RATES}
    lr = min(tried, key=lambda rate: fmean(tried[rate]))
    return tried[lr], lr


def main() -> None:
    asked = arguments("elastic_period", __doc__, seeds=8)
    seeds = range(asked.seeds)
    found: dict[str, dict[int, list[float]]] = {"downpour": {}, "elastic": {}}
    for strategy, by_period in found.items():
        for period in PERIODS:
            by_period[period], lr = best(strategy, period, seeds)
            mean, spread = mean_and_spread(by_period[period])
            print(f"{strategy:9} period={period:2}  lr={lr:g}  error {mean:5.1f} ± {spread:.1f} %", flush=True)
    pairs = zip(found["downpour"][64], found["elastic"][64], strict=True)
    fewer, width = interval([downpour - elastic for downpour, elastic in pairs])
    report(
        "elastic averaging tolerates a period of 64, where Downpour does not",
        f"with 64 steps between exchanges, elastic has {fewer:.1f} ± {width:.1f} points fewer errors",
        fewer - width > 0,
    )
    lines = {
        name: [(period, *mean_and_spread(values)) for period, values in by_period.items()]
        for name, by_period in found.items()
    }
    draw(asked.figure, "4 workers on digits", "steps between exchanges", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
