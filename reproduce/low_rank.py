"""Gradients of rank 2 keep the accuracy, with r (m + n) numbers in place of m n (Vogels et al. 2019).

Four workers train digits in lock-step, with a momentum of 0.9 after the mean. The control sends gradients as they are;
another sends as little by random places. Each worker decomposes its own matrix here, while the paper's decompose the
mean in two all-reduces. Verdicts are 95 % intervals of the difference in test error, seed by seed.
"""

from __future__ import annotations

from reproduce.runs import Done, arguments, draw, interval, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 4, 8, 6, 0.02


def runs(seeds: range, codec: str, momentum: float = 0.9) -> list[Done]:
    return [
        simulate(
            "digits",
            "sync",
            WORKERS,
            seed,
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            batch_per_worker=True,
            scaling="none",
            lr_schedule="cosine",
            optimizer="sgd",
            lr=LR,
            momentum=momentum,
            codec=codec,
        )
        for seed in seeds
    ]


def difference(runs: list[Done], control: list[Done]) -> tuple[float, float]:
    """Return the mean of how many points of error runs have more, seed by seed, and its 95 % interval."""
    return interval([one.error - other.error for one, other in zip(runs, control, strict=True)])


CODECS = {"as they are": "", "rank 2": "powersgd:2", "random places": "randk:0.04"}
ALIKE, FEWER = 1.0, 10.0  # points of error, times


def main() -> None:
    asked = arguments("low_rank", __doc__, seeds=8)
    found = {}
    for name, codec in CODECS.items():
        found[name] = runs(range(asked.seeds), codec)
        mean, width = interval([one.error for one in found[name]])
        print(
            f"{name:22} error {mean:5.2f} ± {width:.2f} %, {found[name][0].fewer_bytes:.3g} times fewer bytes",
            flush=True,
        )
    judge(*found.values())
    lines = {name: [(n, one.error, 0.0) for n, one in enumerate(done)] for name, done in found.items()}
    draw(asked.figure, "4 workers on digits", "seed", "test error, %", lines)


def judge(control: list[Done], low_rank: list[Done], random_places: list[Done]) -> None:
    more, width = difference(low_rank, control)
    fewer = low_rank[0].fewer_bytes
    report(
        f"with over {FEWER:g} times fewer bytes, rank 2 ends within {ALIKE:g} point of plain gradients",
        f"{more:+.2f} ± {width:.2f} points of error, with {fewer:.3g} times fewer bytes",
        more + width < ALIKE and fewer >= FEWER,
    )
    worse, width = difference(random_places, low_rank)
    report(
        "as few values at random places are worse",
        f"{worse:+.2f} ± {width:.2f} points more errors, with {random_places[0].fewer_bytes:.3g} times fewer bytes",
        worse - width > 0,
    )


if __name__ == "__main__":
    main()
