"""Each worker has the momentum, and sends the largest 1 % of what it has; the paper: 0.1 %, of larger models."""

from __future__ import annotations

from reproduce.claim import Check, Claim, Method, difference
from reproduce.claims.one_bit import SETTINGS, TASKS, point

CODEC = "deep_gradient:0.01,momentum=0.9,warmup=2"
RATES = [{"lr": rate} for rate in (0.005, 0.01, 0.02, 0.04, 0.08)]
DENSE, DEEP, UNMASKED = "as they are", "deep gradient", "without masking"

CLAIM = Claim(
    paper="Lin et al. 2018",
    text="deep gradient compression keeps the accuracy with over 50 times fewer bytes, and masking matters",
    part="Compression",
    how="processes",
    methods=(
        Method(DENSE, {"momentum": 0.9}, RATES),
        Method(DEEP, {"codec": CODEC}, RATES),
        Method(UNMASKED, {"codec": f"{CODEC},masking=no"}, RATES),
    ),
    settings=SETTINGS,
    tasks={name: {**how, "epochs": 2 * how["epochs"]} for name, how in TASKS.items()},
    point=point,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "at most 1 point more errors than dense gradients with the same momentum",
            difference(DEEP, DENSE),
            below=1.0,
            unit="points",
        ),
        Check("over 50 times fewer bytes", lambda r: r(DEEP, "fewer_bytes"), above=50.0, unit="times"),
        Check(
            "without masking, more errors than with it",
            difference(UNMASKED, DEEP),
            above=0.0,
            unit="points",
            control=True,
        ),
    ),
    why="With each method at its own best rate, momentum in entries that were just sent does no measurable harm "
    "to this small model. The paper sends 0.1 % of much larger models, where an entry waits ten times longer "
    "and its momentum is staler.",
)
