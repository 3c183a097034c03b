"""Sixteen workers with exponential step times: with a larger delay they wait less, and their gradients are staler."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reproduce.claim import Check, Claim, Method, Results, Values
from reproduce.runs import simulated

TAUS, UNBOUNDED = (0, 1, 2, 4, 8, 16, 32), 1000
NAME = "bounded delay"


def point(seed: int, x: float, **settings: Any) -> Values:
    compute = {"kind": "exponential"}
    return simulated(strategy="bounded_delay", workers=16, seed=seed, compute=compute, tau=int(x), **settings)


def slower(tau: int) -> Any:
    """Return how many times the seconds of the best delay in between are needed with `tau`.

    For each seed the best delay is that of the other seeds, so that luck does not choose it.
    """

    def times(r: Results) -> NDArray[np.float64]:
        between = np.array([r(NAME, "seconds_to", between) for between in TAUS[1:]])
        seeds = range(between.shape[1])
        best = [between[np.delete(between, seed, axis=1).mean(axis=1).argmin(), seed] for seed in seeds]
        return r(NAME, "seconds_to", tau) / np.array(best)

    return times


CLAIM = Claim(
    paper="Li et al. 2014, figure 13",
    text="a larger delay means less idle time but more samples, and the best delay is in between",
    methods=(Method(NAME, {}, [{"lr": rate} for rate in (0.01, 0.02, 0.04, 0.08)]),),
    settings={"guard": False, "batch_size": 8},
    tasks={"digits": {"epochs": 8, "loss": 0.25}},
    point=point,
    x=(*TAUS, UNBOUNDED),
    x_label="tau, tasks",
    log_x=True,
    tuned_by="seconds_to",
    shown={
        "idle": "idle, % of the time",
        "samples_to": "samples to the loss",
        "seconds_to": "virtual seconds to the loss",
    },
    checks=(
        Check("idle time falls", lambda r: r(NAME, "idle", 0) - r(NAME, "idle", 16), above=30.0, unit="points to 16"),
        Check(
            "the samples that are needed rise",
            lambda r: r(NAME, "samples_to", UNBOUNDED) / r(NAME, "samples_to", 0),
            above=1.0,
            unit="times",
        ),
        Check("no delay is slower than the best of 1 to 32", slower(0), above=1.0, unit="times"),
        Check("no bound is slower than the best of 1 to 32", slower(UNBOUNDED), above=1.0, unit="times", control=True),
    ),
    why="With 16 workers a gradient is about 15 updates late however large tau is, so beyond tau = 16 nothing "
    "changes: neither samples nor time rise, and no bound is as fast as the best one. The paper has 800 "
    "workers and a convex problem in blocks, where staleness and computing go on rising with tau.",
)
