"""DiLoCo with 50 steps between exchanges ends within 2 % of the loss of synchronous training (Douillard et al. 2023).

Four workers train digits with AdamW, 45 epochs. The control is `sync batch_per_worker=true` with AdamW: as many samples
for each step of one model, exchanged after every step. The task is small, and no language model: see the page.
"""

from __future__ import annotations

from reproduce.runs import Done, arguments, draw, interval, mean_and_spread, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 4, 8, 45, 0.001
PERIODS = (10, 50)


def run(strategy: str, seed: int, **settings: object) -> Done:
    return simulate(
        "digits", strategy, WORKERS, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, lr=LR, optimizer="adamw", **settings
    )


def main() -> None:
    asked = arguments("diloco_loss", __doc__, seeds=8)
    seeds = range(asked.seeds)
    control = [run("sync", seed, batch_per_worker=True) for seed in seeds]
    found = {period: [run("diloco", seed, period=period) for seed in seeds] for period in PERIODS}
    mean, spread = mean_and_spread([one.result.metrics["loss"] for one in control])
    print(f"sync       loss {mean:.4f} ± {spread:.4f}", flush=True)
    for period, runs in found.items():
        mean, spread = mean_and_spread([one.result.metrics["loss"] for one in runs])
        print(f"period {period:3} loss {mean:.4f} ± {spread:.4f}", flush=True)
    ratios = [a.result.metrics["loss"] / b.result.metrics["loss"] for a, b in zip(found[50], control, strict=True)]
    ratio, width = interval(ratios)
    more, wide = interval([a.error - b.error for a, b in zip(found[50], control, strict=True)])
    report(
        "with a period of 50, the loss is within 2 % of synchronous training",
        f"{ratio:.3f} ± {width:.3f} times its loss; {more:.2f} ± {wide:.2f} points more errors",
        ratio - width < 1.02,
    )
    lines = {
        "diloco": [(p, *mean_and_spread([r.result.metrics["loss"] for r in runs])) for p, runs in found.items()],
        "sync": [(p, *mean_and_spread([r.result.metrics["loss"] for r in control])) for p in PERIODS],
    }
    draw(asked.figure, "4 workers on digits, AdamW", "steps between exchanges", "test loss", lines)


if __name__ == "__main__":
    main()
