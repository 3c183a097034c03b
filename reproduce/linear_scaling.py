"""A learning rate proportional to the number of workers needs a warm-up, and fails for many (Goyal et al. 2017).

Synchronous SGD on digits with K workers and K times the learning rate of one. Without a warm-up the first steps are too
large; with one, larger K still work; at some K both fail. As in the paper, momentum is 0.9, the warm-up is a small part
of the training (5 of 90 epochs there), and the rate decreases afterwards (there in steps, here along a cosine). The
rate is the largest of 0.02, 0.05, 0.1 and 0.2 with which one worker learns.

The model has no batch normalization, unlike the paper's. With it (seed 0, rates of 0.05 and 0.1), training worked with
up to 32 workers, with or without a warm-up: this task is too easy to show the effect.
"""

from __future__ import annotations

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS = (1, 2, 4, 8, 16)
EPOCHS, BATCH_SIZE, LR, MOMENTUM = 15, 16, 0.05, 0.9
WARMUPS = {"no warm-up": 0.0, "warm-up over a tenth": 0.1}


def error(workers: int, warmup: float, seed: int) -> float:
    done = simulate(
        "digits",
        "sync",
        workers,
        seed,
        batch_per_worker=True,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        lr=LR,
        momentum=MOMENTUM,
        scaling="linear",
        lr_schedule="cosine",
        warmup_fraction=warmup,
    )
    return done.error


def main() -> None:
    asked = arguments("linear_scaling", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, warmup in WARMUPS.items():
        lines[name] = []
        for workers in WORKERS:
            mean, spread = over_seeds(range(asked.seeds), lambda s, w=workers, u=warmup: error(w, u, s))  # type: ignore[misc]
            lines[name].append((workers, mean, spread))
            print(f"K={workers:2}  {name:22} error {mean:5.1f} ± {spread:.1f} %")
    without, with_warmup = lines.values()
    gains = [a[1] - b[1] for a, b in zip(without, with_warmup, strict=True)]
    k = WORKERS[gains.index(max(gains))]
    report(
        "without a warm-up, linear scaling is worse at large K; both fail at some K",
        f"the warm-up helps most at K = {k}: {max(gains):.0f} points fewer errors; at worst it adds {-min(gains):.0f}; "
        f"at K = {WORKERS[-1]} {without[-1][1]:.0f} % and {with_warmup[-1][1]:.0f} % errors",
        max(gains) > 3 and min(gains) > -3 and with_warmup[-1][1] > with_warmup[0][1] + 3,
    )
    draw(asked.figure, "synchronous SGD on digits, rate times K", "workers K", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
