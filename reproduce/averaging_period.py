"""Accuracy falls with the averaging period, and block momentum recovers it (Chen et al. 2016; Su et al. 2015).

Eight workers train digits with batches of 8. The control is `sync batch_per_worker=true`: one process with eight times
the batch, which averaging with a period of 1 equals. The same learning rate for all. Verdicts are 95 % intervals of the
difference, seed by seed.
"""

from __future__ import annotations

from reproduce.runs import arguments, draw, interval, mean_and_spread, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 8, 8, 6, 0.2
PERIODS = (1, 16, 64)
Point = tuple[float, float, float]


def errors(strategy: str, seeds: range, workers: int = WORKERS, **settings: object) -> list[float]:
    return [
        simulate("digits", strategy, workers, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, lr=LR, **settings).error
        for seed in seeds
    ]


def main() -> None:
    asked = arguments("averaging_period", __doc__, seeds=8)
    seeds = range(asked.seeds)
    control = errors("sync", seeds, batch_per_worker=True)
    alone = errors("single", seeds, workers=1)
    found: dict[str, dict[int, list[float]]] = {"averaging": {}, "block_momentum": {}}
    for strategy, by_period in found.items():
        for period in PERIODS:
            by_period[period] = errors(strategy, seeds, period=period)
            print(f"{strategy:15} period={period:2}  error {mean_and_spread(by_period[period])[0]:5.1f} %", flush=True)
    judge(control, alone, found)
    lines: dict[str, list[Point]] = {
        name: [(period, *mean_and_spread(values)) for period, values in by_period.items()]
        for name, by_period in found.items()
    }
    lines["8 times the batch"] = [(period, *mean_and_spread(control)) for period in PERIODS]
    lines["one process"] = [(period, *mean_and_spread(alone)) for period in PERIODS]
    draw(asked.figure, "8 workers on digits", "steps between two means", "test error, %", lines, xscale="log")


def judge(control: list[float], alone: list[float], found: dict[str, dict[int, list[float]]]) -> None:
    averaging, momentum = found["averaging"], found["block_momentum"]
    off = max(abs(one - other) for one, other in zip(averaging[1], control, strict=True))
    report(
        "averaging with a period of 1 is training with 8 times the batch",
        f"errors differ by at most {off:.2f} points, seed by seed",
        off < 0.5,
    )
    worse, width = interval([one - other for one, other in zip(averaging[64], averaging[1], strict=True)])
    report(
        "the error of averaging rises with the period",
        f"period 64 has {worse:.1f} ± {width:.1f} points more errors than period 1",
        worse - width > 0,
    )
    better, width = interval([one - other for one, other in zip(averaging[16], momentum[16], strict=True)])
    against, wide = interval([one - other for one, other in zip(momentum[16], alone, strict=True)])
    report(
        "block momentum removes the loss of averaging, and is within noise of one process",
        f"period 16: {better:.1f} ± {width:.1f} points fewer errors than averaging; {against:.1f} ± {wide:.1f} more "
        "than one process",
        better - width > 0 and against - wide <= 0,
    )


if __name__ == "__main__":
    main()
