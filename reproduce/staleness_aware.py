"""Dividing by the staleness rescues soft synchronisation (Zhang et al. 2016, figure 3).

Thirty workers with batches of 4 train the digits until they have learnt them. With one learning rate for all, updates
of few gradients that missed many (large n) fail, at about nine errors in ten; divided by what each gradient missed, the
same rate learns for all n, as well as in lock-step (hardsync). The paper trains CIFAR-10 for 140 epochs, with a
momentum of 0.9, which is left out here.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 30, 4, 12, 0.3
NS = (1, 15, 30)
ALIKE = 2.0  # points of error, give or take the spread over seeds
SCALINGS = {"none": "one rate for all", "staleness": "divided by the staleness"}


def error(seed: int, strategy: str = "sync", **settings: Any) -> float:
    done = simulate("digits", strategy, WORKERS, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, lr=LR, **settings)
    return done.error


def soft_error(n: int, scaling: str, seed: int) -> float:
    """Without the guard: it would lower the rate, and hide what is shown here."""
    return error(seed, "soft_sync", n=n, scaling=scaling, guard=False)


def main() -> None:
    asked = arguments("staleness_aware", __doc__)
    hard, hard_spread = over_seeds(range(asked.seeds), error)
    print(f"hardsync                        error {hard:5.1f} ± {hard_spread:.1f} %", flush=True)
    lines = {"hardsync": [(n, hard, hard_spread) for n in NS]}
    for scaling, name in SCALINGS.items():
        lines[name] = []
        for n in NS:
            mean, spread = over_seeds(range(asked.seeds), lambda s, n=n, k=scaling: soft_error(n, k, s))  # type: ignore[misc]
            lines[name].append((n, mean, spread))
            print(f"n={n:2}  {name:25} error {mean:5.1f} ± {spread:.1f} %", flush=True)
    fixed, divided = (lines[name] for name in SCALINGS.values())
    off, spread_of_it = max((abs(mean - hard), spread) for _, mean, spread in divided)
    report(
        "with one rate 15- and 30-softsync fail (90 % error); divided by the staleness all protocols end like hardsync",
        f"with one rate {fixed[-2][1]:.0f} and {fixed[-1][1]:.0f} %; divided, {min(p[1] for p in divided):.1f} to "
        f"{max(p[1] for p in divided):.1f} % over all n, hardsync {hard:.1f} %: at most {off:.1f} ± "
        f"{spread_of_it:.1f} points apart",
        fixed[-1][1] > 80 and fixed[-2][1] > 80 and off - spread_of_it < ALIKE,
    )
    draw(
        asked.figure,
        "30 workers on the digits",
        "n (updates per round of pushes)",
        "test error, %",
        lines,
        xscale="log",
    )


if __name__ == "__main__":
    main()
