"""Thirty workers, one update for every c = 30 / n gradients. The mean is taken while all workers compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from reproduce.claim import Check, Claim, Method, Results, Values
from reproduce.runs import simulate

WORKERS = 30
ALL_COMPUTE = 0.8  # fraction of the data until which all workers compute: at the end, some have no work
NS = (1, 2, 5, 15, 30)
EQUAL, EXPONENTIAL = "equal machines (10 % jitter)", "exponential times"


def point(seed: int, x: float, task: str, steps: int, **compute: Any) -> Values:
    n = int(x)
    done = simulate(task, "soft_sync", WORKERS, seed, compute=compute, steps=steps, n=n)
    staleness = done.result.staleness
    mean = [mean for part, mean in done.staleness if part <= ALL_COMPUTE][-1]
    histogram = {int(missed): times for missed, times in staleness["histogram"].items()}
    beyond = sum(times for missed, times in histogram.items() if missed > 2 * n)
    exact = (WORKERS - 1) / (WORKERS // n)
    return {"mean": mean, "off": 100 * abs(mean / exact - 1), "beyond": 100 * beyond / sum(histogram.values())}


def largest(method: str, measure: str) -> Any:
    def over_n(r: Results) -> Any:
        return np.max([r(method, measure, n) for n in NS], axis=0)

    return over_n


CLAIM = Claim(
    paper="Gupta et al. 2016",
    text="the mean staleness is (workers - 1) / c; on equal machines no gradient misses more than 2n updates",
    methods=(Method(EQUAL, {"kind": "lognormal", "spread": 0.1}), Method(EXPONENTIAL, {"kind": "exponential"})),
    settings={"steps": 400},
    point=point,
    x=NS,
    x_label="n",
    shown={"mean": "mean staleness, updates", "beyond": "gradients that missed more than 2n, %"},
    checks=(
        Check("equal machines: the mean, at the worst n", largest(EQUAL, "off"), below=1.0, unit="% off"),
        Check("exponential times: the mean, at the worst n", largest(EXPONENTIAL, "off"), below=1.0, unit="% off"),
        Check("equal machines: beyond 2n, at the worst n", largest(EQUAL, "beyond"), below=0.5, unit="%"),
        Check(
            "exponential times: beyond 2n, at the worst n",
            largest(EXPONENTIAL, "beyond"),
            above=1.0,
            unit="%",
            control=True,
        ),
    ),
)
