"""Adagrad lets more replicas train one model, and a warm start helps (Dean et al. 2012, figures 4 and 5).

Downpour on digits with an increasing number of workers. The fixed learning rate is the best of six for each number of
workers; that of Adagrad is always the same, because its steps shrink where gradients are large. With a warm start, one
worker trains the first batches alone, before the other workers start.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS = (1, 8, 16, 32)
EPOCHS, BATCH_SIZE, USABLE = 4, 16, 30.0  # a number of workers is usable if its test error, in %, is below USABLE
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # with many workers the smallest is not the best
ADAGRAD: dict[str, Any] = {"optimizer": "adagrad", "lr": 0.01}
WARM: dict[str, Any] = {"warm_start_batches": 90}  # one epoch
Point = tuple[float, float, float]  # workers, mean error, spread


def error(workers: int, settings: dict[str, Any], seed: int) -> float:
    done = simulate(
        "digits",
        "downpour",
        workers,
        seed,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        guard=False,
        overlap=False,
        **settings,
    )
    return done.error


def measured(workers: int, settings: dict[str, Any], seeds: int) -> Point:
    return (workers, *over_seeds(range(seeds), lambda seed: error(workers, settings, seed)))


def main() -> None:
    asked = arguments("adagrad_replicas", __doc__)
    lines: dict[str, list[Point]] = {
        "the best fixed rate": [],
        "the same, warm start": [],
        "adagrad": [],
        "adagrad, warm start": [],
    }
    for workers in WORKERS:
        tried = {rate: measured(workers, {"optimizer": "sgd", "lr": rate}, asked.seeds) for rate in RATES}
        best = min(tried, key=lambda rate, tried=tried: tried[rate][1])  # type: ignore[misc]
        points = (
            tried[best],
            measured(workers, {"optimizer": "sgd", "lr": best, **WARM}, asked.seeds),
            measured(workers, ADAGRAD, asked.seeds),
            measured(workers, {**ADAGRAD, **WARM}, asked.seeds),
        )
        for name, point in zip(lines, points, strict=True):
            lines[name].append(point)
            print(f"{workers:2} workers  {name:22} error {point[1]:5.1f} ± {point[2]:.1f} %")
        print(f"{workers:2} workers  the best fixed rate is {best} of {', '.join(map(str, RATES))}", flush=True)
    judge(lines)
    draw(asked.figure, "Downpour on the digits", "workers", "test error, %", lines, xscale="log")


def judge(lines: dict[str, list[Point]]) -> None:
    usable = {name: max((w for w, mean, _ in points if mean < USABLE), default=0) for name, points in lines.items()}
    fixed, fixed_warm, adagrad, adagrad_warm = usable.values()
    report(
        "the best fixed rate misses the target with many replicas, Adagrad goes further",
        f"below {USABLE:.0f} % errors: up to {fixed:g} workers with the best fixed rate, {adagrad:g} with Adagrad",
        adagrad > fixed,
    )
    pairs = list(zip(lines["adagrad"], lines["adagrad, warm start"], strict=True))[-2:]
    told = "; ".join(f"{cold[0]:g} workers: {cold[1]:.0f} % become {warm[1]:.0f} %" for cold, warm in pairs)
    report(
        "a warm start makes training with many replicas more stable",
        f"with Adagrad, {told}; below {USABLE:.0f} %: up to {fixed_warm:g} workers with a fixed rate, {adagrad_warm:g} "
        "with Adagrad",
        all(warm[1] <= cold[1] for cold, warm in pairs) and pairs[-1][1][1] < pairs[-1][0][1] - pairs[-1][0][2],
    )


if __name__ == "__main__":
    main()
