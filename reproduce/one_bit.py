"""One bit per value is enough with error feedback, and is not without it (Seide et al. 2014).

Four workers train digits in lock-step: gradients of 8 samples each, their mean makes one update of SGD. The control
sends gradients as they are. The same learning rate for all, chosen for the control. Verdicts are 95 % intervals of the
difference in test error, seed by seed. The paper trains on speech, and keeps two scales per column of a matrix.
"""

from __future__ import annotations

from reproduce.runs import Done, arguments, draw, interval, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 4, 8, 6, 0.1


def runs(seeds: range, codec: str, momentum: float = 0.0) -> list[Done]:
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


CODECS = {"as they are": "", "one bit": "sign", "one bit, no feedback": "sign:feedback=no"}
ALIKE = 1.0  # points of error


def main() -> None:
    asked = arguments("one_bit", __doc__, seeds=8)
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


def judge(control: list[Done], with_feedback: list[Done], without: list[Done]) -> None:
    more, width = difference(with_feedback, control)
    report(
        f"with error feedback, one bit per value ends within {ALIKE:g} point of plain gradients",
        f"{more:+.2f} ± {width:.2f} points of error, with {with_feedback[0].fewer_bytes:.3g} times fewer bytes",
        more + width < ALIKE,
    )
    worse, width = difference(without, with_feedback)
    report(
        "without error feedback, it is worse",
        f"{worse:+.2f} ± {width:.2f} points more errors than with it",
        worse - width > 0,
    )


if __name__ == "__main__":
    main()
