"""One worker that is 10 times slower hardly slows AD-PSGD (Lian et al. 2018).

Eight workers; x is how many times slower the first one is. Steps are those of eight batches of 8. All-reduce divides
batches equally, as in the paper; by default Rainband divides them by speed.
"""

from __future__ import annotations

from reproduce.claim import Check, Claim, Method
from reproduce.runs import simulate

WORKERS, BATCH, STEP_S = 8, 8, 0.01
RATES = [{"lr": rate} for rate in (0.025, 0.05, 0.1, 0.2)]
RING = {"strategy": "all_reduce", "algorithm": "ring"}


def point(seed: int, x: float, task: str, strategy: str, **settings: object) -> dict[str, float]:
    shared = WORKERS if strategy == "all_reduce" else 1
    done = simulate(
        task,
        strategy,
        WORKERS,
        seed,
        compute={"step_s": STEP_S * shared, "slow_workers": (0,), "slow_factor": x},
        batch_size=BATCH * shared,
        network={"latency_s": 50e-6, "bytes_per_s": 1.25e9},
        **settings,  # type: ignore[arg-type]
    )
    return {"error": done.error, "seconds": done.result.seconds}


CLAIM = Claim(
    paper="Lian et al. 2018",
    text="one worker that is 10 times slower hardly slows AD-PSGD, and slows all-reduce and D-PSGD 10 times",
    part="Model averaging",
    methods=(
        Method("AD-PSGD", {"strategy": "async_gossip"}, RATES, tuned_at=1.0),
        Method("D-PSGD", {"strategy": "gossip"}, RATES, tuned_at=1.0),
        Method("all-reduce", {**RING, "parts": "equal"}, RATES, tuned_at=1.0),
        Method("all-reduce, parts by speed", {**RING, "parts": "speed"}, RATES, tuned_at=1.0),
    ),
    settings={"epochs": 6},
    point=point,
    why=(
        "1.13 times is the least possible, where seven workers do nearly all of the work. The run is 20 steps of the "
        "slow worker long, and probably ends with batches that it still has; longer runs were not tried."
    ),
    x=(1.0, 10.0),
    x_label="times slower: one of eight workers",
    tuned_by="error",
    shown={"seconds": "simulated seconds", "error": "test error, %"},
    checks=(
        Check(
            "AD-PSGD takes at most 1.3 times as long",
            lambda r: r("AD-PSGD", "seconds", 10.0) / r("AD-PSGD", "seconds", 1.0),
            below=1.3,
            unit="times",
        ),
        Check(
            "with the slow worker, at most 1 point more errors than without it",
            lambda r: r("AD-PSGD", "error", 10.0) - r("AD-PSGD", "error", 1.0),
            below=1.0,
            unit="points",
        ),
        Check(
            "all-reduce takes over 5 times as long",
            lambda r: r("all-reduce", "seconds", 10.0) / r("all-reduce", "seconds", 1.0),
            above=5.0,
            unit="times",
            control=True,
        ),
        Check(
            "D-PSGD takes over 5 times as long",
            lambda r: r("D-PSGD", "seconds", 10.0) / r("D-PSGD", "seconds", 1.0),
            above=5.0,
            unit="times",
        ),
    ),
)
