"""One bit per value is enough with error feedback, and is not without it (Seide et al. 2014).

The paper trains on speech, and keeps two scales per column of a matrix.
"""

from __future__ import annotations

from typing import Any

from reproduce.claim import Check, Claim, Method, Values, difference
from reproduce.runs import train

RATES = [{"lr": rate} for rate in (0.025, 0.05, 0.1, 0.2, 0.4)]
SETTINGS: dict[str, Any] = {"batch_per_worker": True, "scaling": "none", "optimizer": "sgd", "lr_schedule": "cosine"}
TASKS: dict[str, dict[str, Any]] = {"digits": {"batch_size": 16, "epochs": 6}}


def point(seed: int, x: float, task: str, **settings: Any) -> Values:
    return train(task, "sync", workers=2, servers=1, seed=seed, **settings)


CLAIM = Claim(
    paper="Seide et al. 2014",
    text="with error feedback one bit per value is enough, and without it is not",
    part="Compression",
    how="processes",
    methods=(
        Method("as they are", {}, RATES),
        Method("one bit", {"codec": "sign"}, RATES),
        Method("one bit, no feedback", {"codec": "sign:feedback=no"}, RATES),
    ),
    settings=SETTINGS,
    tasks=TASKS,
    point=point,
    tuned_by="error",
    shown={"error": "test error, %"},
    checks=(
        Check(
            "with error feedback, at most 1 point more errors than with plain gradients",
            difference("one bit", "as they are"),
            below=1.0,
            unit="points",
        ),
        Check("over 10 times fewer bytes", lambda r: r("one bit", "fewer_bytes"), above=10.0, unit="times"),
        Check(
            "without error feedback, more errors than with it",
            difference("one bit, no feedback", "one bit"),
            above=0.0,
            unit="points",
            control=True,
        ),
    ),
)
