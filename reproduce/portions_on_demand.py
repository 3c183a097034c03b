"""Assigning small portions on demand, with backup copies, hides a slow machine (Dean et al. 2012, section 4.2).

Sandblaster on digits with eight workers, one of them up to ten times slower. With a static split each has an eighth of
the data, and all wait for the slow one. The script measures the virtual time of one evaluation of the loss.
"""

from __future__ import annotations

import tempfile

from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from reproduce.runs import arguments, draw, over_seeds, report

WORKERS, STEP_S = 8, 0.01
FACTORS = (1.0, 2.0, 5.0, 10.0)
BATCHES = 90  # of 16 of the 1437 images
NAMES = ("on demand", "static split", "ideal")


def evaluation_s(factor: float, seed: int) -> float:
    """Return the mean virtual seconds of an evaluation."""
    seen: list[events.IterationDone] = []

    def note(event: events.AnyEvent) -> None:
        if isinstance(event, events.IterationDone):
            seen.append(event)

    compute = {"kind": "constant", "step_s": STEP_S, "slow_workers": (0,), "slow_factor": factor}
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task="digits",
            strategy="sandblaster",
            strategy_settings={"iterations": 6, "n_push": 1, "gradient_tolerance": 0.0, "loss_tolerance": 0.0},
            num_workers=WORKERS,
            num_servers=1,
            runtime="sim",
            seed=seed,
            batch_size=16,
            directory=folder,
            sim=SimSettings(compute=compute),
        )
        sim.run(config, note)
    first, last = seen[0], seen[-1]
    return (last.at_s - first.at_s) / (last.evaluations - first.evaluations)


def main() -> None:
    asked = arguments("portions_on_demand", __doc__)
    ours, static, best = [], [], []
    for factor in FACTORS:
        mean_s, spread_s = over_seeds(range(asked.seeds), lambda seed, f=factor: evaluation_s(f, seed))  # type: ignore[misc]
        ours.append((factor, 1000 * mean_s, 1000 * spread_s))
        static.append((factor, 1000 * factor * STEP_S * -(-BATCHES // WORKERS), 0.0))
        best.append((factor, 1000 * STEP_S * BATCHES / (WORKERS - 1 + 1 / factor), 0.0))
        named = zip(NAMES, (ours, static, best), strict=True)
        took = ", ".join(f"{name} {points[-1][1]:.0f} ms" for name, points in named)
        print(f"{factor:4.0f} times slower:  {took}")
    slower = ours[2][1] / ours[0][1]
    report(
        "with a slow worker, an evaluation takes less time than with a static split",
        f"with a worker that is 5 times slower an evaluation takes {slower:.2f} times as long as with equal ones, "
        f"a static split {static[2][1] / static[0][1]:.2f} times",
        slower < 1.5 and ours[2][1] < static[2][1],
    )
    lines = dict(zip(NAMES, (ours, static, best), strict=True))
    draw(asked.figure, "One slow worker of eight", "how many times slower", "virtual ms for an evaluation", lines)


if __name__ == "__main__":
    main()
