"""The latency of a ring all-reduce grows with the number of ranks, that of a tree with its logarithm (Jeaugey 2019).

Simulated, time only: a step of `all_reduce` without computing, on links where only latency counts, or only bandwidth.
"""

from __future__ import annotations

from reproduce.claim import Check, Claim, Method
from reproduce.runs import simulate

STEPS = 10
LINKS = {
    "latency": {"latency_s": 1e-3, "bytes_per_s": 1e12},
    "bandwidth": {"latency_s": 1e-9, "bytes_per_s": 1e7},
}


def point(seed: int, x: float, task: str, algorithm: str, link: str) -> dict[str, float]:
    done = simulate(
        task,
        "all_reduce",
        int(x),
        seed,
        compute={"step_s": 1e-9, "kind": "constant"},
        steps=STEPS,
        network=LINKS[link],
        algorithm=algorithm,
    )
    return {"ms": 1e3 * done.result.seconds / STEPS}


CLAIM = Claim(
    paper="Jeaugey 2019",
    text="the latency of a ring grows with the number of ranks, that of a double tree with its logarithm",
    part="Model averaging",
    methods=tuple(
        Method(f"{algorithm}, {link}", {"algorithm": algorithm, "link": link})
        for link in LINKS
        for algorithm in ("ring", "double_tree")
    ),
    point=point,
    x=(4.0, 8.0, 16.0, 32.0),
    x_label="ranks",
    log_x=True,
    repeated=False,
    shown={"ms": "milliseconds for one all-reduce"},
    checks=(
        Check(
            "where latency counts, a ring of 32 takes over 8 times as long as one of 4",
            lambda r: r("ring, latency", "ms", 32.0) / r("ring, latency", "ms", 4.0),
            above=8.0,
            unit="times",
        ),
        Check(
            "a double tree takes at most 3 times as long",
            lambda r: r("double_tree, latency", "ms", 32.0) / r("double_tree, latency", "ms", 4.0),
            below=3.0,
            unit="times",
        ),
        Check(
            "where bandwidth counts, the ring of 32 takes no longer than the tree: latency makes the difference",
            lambda r: r("ring, bandwidth", "ms", 32.0) / r("double_tree, bandwidth", "ms", 32.0),
            below=1.05,
            unit="times",
            control=True,
        ),
    ),
)
