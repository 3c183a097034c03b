"""Deep gradient compression keeps the accuracy with over 50 times fewer bytes (Lin et al. 2018).

Four workers train digits in lock-step. The control sends gradients as they are, and the servers' SGD has a momentum of
0.9. With the codec each worker has the momentum, and sends the largest 1 %; the paper: 0.1 %, of larger models. Without
masking, momentum goes on in entries that were just sent. Verdicts are 95 % intervals of the difference in test error,
seed by seed.
"""

from __future__ import annotations

from reproduce.runs import Done, arguments, draw, interval, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 4, 8, 10, 0.02


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


CODEC = "deep_gradient:0.01,momentum=0.9,warmup=2"
ALIKE, FEWER = 1.0, 50.0  # points of error, times


def main() -> None:
    asked = arguments("sparse_momentum", __doc__, seeds=8)
    seeds = range(asked.seeds)
    found = {
        "as they are": runs(seeds, ""),
        "deep gradient": runs(seeds, CODEC, 0.0),
        "without masking": runs(seeds, f"{CODEC},masking=no", 0.0),
    }
    for name, done in found.items():
        mean, width = interval([one.error for one in done])
        print(f"{name:22} error {mean:5.2f} ± {width:.2f} %, {done[0].fewer_bytes:.3g} times fewer bytes", flush=True)
    judge(*found.values())
    lines = {name: [(n, one.error, 0.0) for n, one in enumerate(done)] for name, done in found.items()}
    draw(asked.figure, "4 workers on digits", "seed", "test error, %", lines)


def judge(control: list[Done], compressed: list[Done], unmasked: list[Done]) -> None:
    more, width = difference(compressed, control)
    fewer = compressed[0].fewer_bytes
    report(
        f"with over {FEWER:g} times fewer bytes, the error is at most {ALIKE:g} point higher",
        f"{more:+.2f} ± {width:.2f} points of error, with {fewer:.3g} times fewer bytes",
        more + width < ALIKE and fewer >= FEWER,
    )
    worse, width = difference(unmasked, compressed)
    report(
        "without masking, it is worse",
        f"{worse:+.2f} ± {width:.2f} points more errors than with it",
        worse - width > 0,
    )


if __name__ == "__main__":
    main()
