"""The alpha-beta-gamma model names the fastest all-reduce algorithm at each size, and where algorithms cross (Thakur et
al. 2005).

Four processes on this machine, over TCP on the loopback interface; the costs are fitted to other all-reduces than those
that are compared. Each seed is a run of `rainband bench allreduce`.
"""

from __future__ import annotations

import math
from statistics import median

from rainband.bench.cases.allreduce import crossing, measured_times
from rainband.collectives.cost import LinkCosts, choose, crossover_bytes
from reproduce.claim import Check, Claim, Method

SMALL, LARGE = 16 << 10, 16 << 20


def point(seed: int, x: float, task: str, place: str) -> dict[str, float]:
    ranks = int(x)
    times = measured_times(ranks, divisor=4)
    costs = LinkCosts(*times.costs[place])

    def medians(size: int) -> dict[str, float]:
        rows = times.seconds[size].items()
        return {name.split()[1]: median(values) for name, values in rows if name.startswith(place)}

    ratios = {size: medians(size)["recursive_doubling"] / medians(size)["direct"] for size in times.seconds}
    found, predicted = crossing(ratios), crossover_bytes(ranks, costs, "recursive_doubling", "direct")
    off = max(found / predicted, predicted / found) if found and predicted else math.inf
    choices = {size: medians(size)[choose(ranks, size, costs)] / min(medians(size).values()) for size in times.seconds}
    return {
        "worst": max(choices.values()),
        "typical": median(choices.values()),
        "log2_off": min(10.0, math.log2(off)),
        "small": ratios[SMALL],
        "large": ratios[LARGE],
    }


CLAIM = Claim(
    paper="Thakur et al. 2005",
    text="a model of alpha, beta and gamma names the fastest all-reduce at each size, and the size at which they cross",
    part="Model averaging",
    how="processes",
    methods=(Method("TCP", {"place": "tcp"}), Method("shared memory", {"place": "segment"})),
    point=point,
    x=(4.0,),
    x_label="ranks",
    shown={"worst": "time of the choice, against the fastest"},
    checks=(
        Check(
            "over TCP, at half of the sizes the choice takes at most 1.1 times as long as the fastest",
            lambda r: r("TCP", "typical"),
            below=1.1,
            unit="times",
        ),
        Check("at no size more than twice as long", lambda r: r("TCP", "worst"), below=2.0, unit="times"),
        Check(
            "the predicted crossing is within a factor of two of the measured one",
            lambda r: r("TCP", "log2_off"),
            below=1.0,
            unit="doublings",
        ),
        Check(
            "in shared memory, the same",
            lambda r: r("shared memory", "log2_off"),
            below=1.0,
            unit="doublings",
        ),
        Check(
            "for 16 KB recursive doubling is faster than the direct algorithm: they do cross",
            lambda r: r("TCP", "small"),
            below=1.0,
            unit="times",
            control=True,
        ),
        Check("and for 16 MB slower", lambda r: r("TCP", "large"), above=1.0, unit="times"),
    ),
)
