"""Time until a test accuracy of 95 % against the number of machines, for one process, Downpour and Sandblaster.

Every replica has two machines with a stage of the model each, as in the paper every replica is partitioned. Learning
rates are tuned for each number of machines, and Sandblaster gets as many settings. Gradients are true, seconds virtual,
on a network of 1 Gbit/s; the accuracy is measured twice in the time of an epoch of one process. A run that does not
reach it is infinitely slow.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import msgspec
import numpy as np

from rainband.cli.options.words import configured
from rainband.options import RunOptions
from rainband.protocol import events
from rainband.runtimes.simulation import run as sim
from rainband.views.training_time import TrainingTime
from reproduce.claim import Check, Claim, Method, Results, Values

TARGET, STAGES, STEP_S = "accuracy=0.95", 2, 0.02  # seconds of a batch of 32 samples on one machine
EVAL_EVERY_S = 0.45  # an epoch has 45 batches
RATES = [{"lr": rate} for rate in (0.02, 0.05, 0.1, 0.2)]
ADAGRAD_RATES = [{"lr": rate} for rate in (0.005, 0.01, 0.02, 0.05)]
NEWTON = [{"history": history, "n_push": n_push} for history in (5, 20) for n_push in (1, 4)]
MACHINES = (2, 4, 8, 16)
MOST = MACHINES[-1]


def point(seed: int, x: float, task: str, strategy: str, epochs: int = 0, **settings: Any) -> Values:
    """Return the virtual seconds until the target; `x`: machines, two to a replica, or one with the whole model."""
    machines, seen, training = int(x), list[events.TargetReached](), TrainingTime()
    options: RunOptions = {
        "workers": machines,
        "runtime": "sim",
        "network": "1gbit",
        "compute": {"step_s": STEP_S},
        "seed": seed,
        "target": TARGET,
        "eval_every_s": EVAL_EVERY_S,
        **({"stages": STAGES, "servers": 1} if machines > 1 else {}),  # type: ignore[typeddict-item]
        **({"epochs": epochs} if epochs else {}),  # type: ignore[typeddict-item]
    }

    def view(event: events.AnyEvent) -> None:
        training.absorb(event)
        if isinstance(event, events.TargetReached):
            seen.append(event)

    config = configured([task, strategy, *(f"{name}={value}" for name, value in settings.items())], options)
    with tempfile.TemporaryDirectory() as folder:
        sim.run(msgspec.structs.replace(config, directory=folder), view)
    if not seen:
        return {"seconds": math.inf, "samples": math.inf}
    return {"seconds": seen[0].at_s - (training.began_s or 0.0), "samples": float(seen[0].samples)}


ONE, FIXED, ADAGRAD, SANDBLASTER = "one machine, SGD", "Downpour, fixed rate", "Downpour, Adagrad", "Sandblaster"


def times(fast: str, at: float, slow: str, than: float) -> Any:
    """Return how many times as fast one method is as another, seed by seed; without an end, 100 times slower."""

    def ratio(r: Results) -> Any:
        return np.clip(r(slow, "seconds", than) / r(fast, "seconds", at), 0.01, 100.0)

    return ratio


CLAIM = Claim(
    paper="Dean et al. 2012, figures 4 and 5",
    text="Downpour with Adagrad reaches an accuracy first, and Sandblaster gains most from more machines",
    part="Model parallelism",
    methods=(
        Method(ONE, {"strategy": "single", "optimizer": "sgd", "epochs": 30}, RATES, x=(1,)),
        Method(FIXED, {"strategy": "downpour", "optimizer": "sgd", "epochs": 30}, RATES),
        Method(ADAGRAD, {"strategy": "downpour", "optimizer": "adagrad", "epochs": 30}, ADAGRAD_RATES),
        Method(SANDBLASTER, {"strategy": "sandblaster", "iterations": 100}, NEWTON),
    ),
    point=point,
    x=MACHINES,
    x_label="machines, two to a replica",
    log_x=True,
    tuned_by="seconds",
    shown={"seconds": f"virtual seconds to {TARGET}", "samples": f"samples to {TARGET}"},
    checks=(
        Check(f"Adagrad on {MOST} machines", times(ADAGRAD, MOST, ONE, 1), above=1.0, unit="times as fast as one"),
        Check(
            f"Adagrad on {MOST} machines",
            times(ADAGRAD, MOST, FIXED, MOST),
            above=1.0,
            unit="times as fast as the best fixed rate",
        ),
        Check(
            f"Adagrad on {MOST} machines",
            times(ADAGRAD, MOST, SANDBLASTER, MOST),
            above=1.0,
            unit="times as fast as Sandblaster",
            control=True,
        ),
        Check(
            f"Sandblaster on {MOST} machines",
            times(SANDBLASTER, MOST, SANDBLASTER, MACHINES[0]),
            above=2.0,
            unit="times as fast as on 2",
        ),
        Check(
            f"from 2 to {MOST} machines Sandblaster gains more than Downpour with Adagrad",
            lambda r: (
                times(SANDBLASTER, MOST, SANDBLASTER, MACHINES[0])(r) / times(ADAGRAD, MOST, ADAGRAD, MACHINES[0])(r)
            ),
            above=1.0,
            unit="times its gain",
        ),
    ),
)
