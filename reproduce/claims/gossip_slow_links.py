"""D-PSGD trains as well per epoch as all-reduce, and is faster on slow links (Lian et al. 2017).

Eight workers. All methods make steps with eight batches of 8. At x = 1, links have 50 us latency and 10 Gbit/s; x makes
the latency longer, or the bandwidth lower. The server is the other kind of central method in the paper.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reproduce.claim import Check, Claim, Method, Results
from reproduce.runs import simulate

WORKERS, BATCH, STEP_S = 8, 8, 0.01
LATENCY_S, BYTES_PER_S = 50e-6, 1.25e9
SLOW = 300.0
RATES = [{"lr": rate} for rate in (0.05, 0.1, 0.2, 0.4)]
RING = {"strategy": "all_reduce", "algorithm": "ring"}
SERVER = {"strategy": "sync", "batch_per_worker": True, "scaling": "none"}


def point(seed: int, x: float, task: str, strategy: str, slow: str, **settings: object) -> dict[str, float]:
    shared = WORKERS if strategy == "all_reduce" else 1  # it divides a batch among the workers
    network = {
        "latency_s": LATENCY_S * (x if slow == "latency" else 1),
        "bytes_per_s": BYTES_PER_S / (x if slow == "bandwidth" else 1),
    }
    done = simulate(
        task,
        strategy,
        WORKERS,
        seed,
        compute={"step_s": STEP_S * shared},
        batch_size=BATCH * shared,
        network=network,
        **settings,  # type: ignore[arg-type]
    )
    return {"error": done.error, "seconds": done.result.seconds}


def times_as_fast(other: str, slow: str, x: float) -> object:
    def of(r: Results) -> NDArray[np.float64]:
        return r(f"{other}, {slow}", "seconds", x) / r(f"D-PSGD, {slow}", "seconds", x)

    return of


CLAIM = Claim(
    paper="Lian et al. 2017",
    text="D-PSGD has the errors of all-reduce after as many epochs, and is faster on slow links",
    part="Model averaging",
    methods=tuple(
        Method(f"{name}, {slow}", {**how, "slow": slow}, RATES, tuned_at=1.0)
        for slow in ("latency", "bandwidth")
        for name, how in (("D-PSGD", {"strategy": "gossip"}), ("ring all-reduce", RING), ("one server", SERVER))
    ),
    settings={"epochs": 6},
    point=point,
    why=(
        "Where bandwidth is low, D-PSGD sends two models in each step, and a ring of eight sends 1.75, so it cannot be "
        "faster. Against one server it is, and where latency is high also against the ring."
    ),
    x=(1.0, 10.0, SLOW),
    x_label="times the latency, or a fraction of the bandwidth",
    log_x=True,
    tuned_by="error",
    shown={"seconds": "simulated seconds", "error": "test error, %"},
    checks=(
        Check(
            "at most 1 point more errors than all-reduce",
            lambda r: r("D-PSGD, latency", "error", 1.0) - r("ring all-reduce, latency", "error", 1.0),
            below=1.0,
            unit="points",
        ),
        Check(
            "with 300 times the latency, over twice as fast as the ring",
            times_as_fast("ring all-reduce", "latency", SLOW),  # type: ignore[arg-type]
            above=2.0,
            unit="times",
        ),
        Check(
            "with 1/300 of the bandwidth, over twice as fast as one server",
            times_as_fast("one server", "bandwidth", SLOW),  # type: ignore[arg-type]
            above=2.0,
            unit="times",
        ),
        Check(
            "with 1/300 of the bandwidth, faster than the ring",
            times_as_fast("ring all-reduce", "bandwidth", SLOW),  # type: ignore[arg-type]
            above=1.0,
            unit="times",
        ),
        Check(
            "on the fast network, at most 1.3 times as fast as the ring: the links make the difference",
            times_as_fast("ring all-reduce", "latency", 1.0),  # type: ignore[arg-type]
            below=1.3,
            unit="times",
            control=True,
        ),
    ),
)
