"""Eight workers; with stragglers, one step in twenty takes ten times as long."""

from __future__ import annotations

from typing import Any

from reproduce.claim import Check, Claim, Method, Results, Values
from reproduce.runs import simulated

RATES = [{"lr": rate} for rate in (0.01, 0.03, 0.1)]


def point(seed: int, x: float, chance: float, **settings: Any) -> Values:
    compute = {"kind": "lognormal", "spread": 0.05, "straggler_chance": chance, "straggler_factor": 10.0}
    return simulated(strategy="stale_sync", workers=8, seed=seed, compute=compute, bound=int(x), **settings)


def gain(method: str, measure: str) -> Any:
    """Return how many times less a bound of 3 takes than lock-step."""

    def times(r: Results) -> Any:
        return r(method, measure, 0) / r(method, measure, 3)

    return times


CLAIM = Claim(
    paper="Cui et al. 2014",
    text="stale-synchronous SGD is faster than lock-step with stragglers, and not without them",
    methods=(Method("no stragglers", {"chance": 0.0}, RATES), Method("stragglers", {"chance": 0.05}, RATES)),
    tasks={"digits": {"epochs": 8, "loss": 1.0}},
    point=point,
    x=(0, 1, 3, 8),
    x_label="bound, clocks",
    tuned_by="seconds_to",
    shown={"seconds": "virtual seconds for the same data", "seconds_to": "virtual seconds to a loss"},
    checks=(
        Check("with stragglers, less time for the data", gain("stragglers", "seconds"), above=1.3, unit="times"),
        Check("with stragglers, less time to the loss", gain("stragglers", "seconds_to"), above=1.3, unit="times"),
        Check(
            "without, about the same time for the data",
            gain("no stragglers", "seconds"),
            below=1.25,
            unit="times",
            control=True,
        ),
        Check(
            "without, about the same time to the loss",
            gain("no stragglers", "seconds_to"),
            below=1.25,
            unit="times",
            control=True,
        ),
    ),
    why="On the two tuning seeds a rate of 0.1 was best for a bound of 3, and two of the eight others then never "
    "reach the loss, which counts as a gain of 0. With a bound of 8 and a rate of 0.03 all reach it, 1.8 to "
    "3.8 times sooner than lock-step.",
)
