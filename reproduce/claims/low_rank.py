"""Gradients of rank 2, with momentum after their mean; each worker decomposes its own matrix and sends it to servers.

The paper's workers decompose the mean in two all-reduces.
"""

from __future__ import annotations

from reproduce.claim import Check, Claim, Method, difference
from reproduce.claims.one_bit import SETTINGS, TASKS, point
from reproduce.claims.sparse_momentum import RATES

PLAIN, RANK_2, RANDOM = "as they are", "rank 2", "random places"

CLAIM = Claim(
    paper="Vogels et al. 2019",
    text="gradients of rank 2 keep the accuracy, with r (m + n) numbers in place of m n",
    part="Compression",
    how="processes",
    methods=(
        Method(PLAIN, {}, RATES),
        Method(RANK_2, {"codec": "powersgd:2"}, RATES),
        Method(RANDOM, {"codec": "randk:0.04"}, RATES),
    ),
    settings={**SETTINGS, "momentum": 0.9},
    tasks=TASKS,
    point=point,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "at most 1 point more errors than with plain gradients", difference(RANK_2, PLAIN), below=1.0, unit="points"
        ),
        Check("over 10 times fewer bytes", lambda r: r(RANK_2, "fewer_bytes"), above=10.0, unit="times"),
        Check(
            "as few values at random places have more errors",
            difference(RANDOM, RANK_2),
            above=0.0,
            unit="points",
            control=True,
        ),
    ),
    why="Each worker decomposes its own matrix and sends it to servers; the paper's two all-reduces of the thin "
    "matrices were not tried.",
)
