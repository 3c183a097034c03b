"""Dividing by the staleness rescues soft synchronisation (Zhang et al. 2016, figure 3).

Thirty workers with batches of 4 train the digits until they have learnt them. With one learning rate for all, updates
of few gradients that missed many (large n) fail, at about nine errors in ten; divided by what each gradient missed, the
same rate learns for all n. The paper trains CIFAR-10 for 140 epochs, with a momentum of 0.9, which is left out here.
"""

from __future__ import annotations

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 30, 4, 12, 0.3
NS = (1, 5, 15, 30)
SCALINGS = {"none": "one rate for all", "staleness": "divided by the staleness"}


def error(n: int, scaling: str, seed: int) -> float:
    done = simulate(
        "digits",
        "soft_sync",
        WORKERS,
        seed,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        n=n,
        scaling=scaling,
        lr=LR,
        guard=False,  # it would lower the rate, and hide what is shown here
    )
    return done.error


def main() -> None:
    asked = arguments("staleness_aware", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for scaling, name in SCALINGS.items():
        lines[name] = []
        for n in NS:
            mean, spread = over_seeds(range(asked.seeds), lambda s, n=n, k=scaling: error(n, k, s))  # type: ignore[misc]
            lines[name].append((n, mean, spread))
            print(f"n={n:2}  {name:25} error {mean:5.1f} ± {spread:.1f} %")
    fixed, divided = (lines[name] for name in SCALINGS.values())
    report(
        "with one rate 15- and 30-softsync fail (90 % error); divided by the staleness all protocols end alike",
        f"n=30: {fixed[-1][1]:.0f} % and {divided[-1][1]:.0f} %; divided, "
        f"{min(p[1] for p in divided):.0f} to {max(p[1] for p in divided):.0f} % over all n",
        fixed[-1][1] > 80 and fixed[-2][1] > 80 and max(p[1] for p in divided) - min(p[1] for p in divided) < 5,
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
