"""Dividing gradients by their staleness makes soft synchronization work (Zhang et al. 2016, figure 3).

Thirty workers train digits with batches of 4. With one learning rate for all n, training fails at large n (about 90 %
errors), where updates average few and stale gradients. Divided by the staleness of each gradient, the same rate works
for all n, as well as hardsync (synchronous SGD). The paper trains CIFAR-10 for 140 epochs with a momentum of 0.9; here
the momentum is 0.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 30, 4, 12, 0.3
NS = (1, 15, 30)
ALIKE = 2.0  # points of error
Point = tuple[float, float, float]  # n, mean error, spread
SCALINGS = {"none": "one rate for all", "staleness": "divided by the staleness"}


def error(seed: int, strategy: str = "sync", **settings: Any) -> float:
    if strategy == "sync":
        settings = {"batch_per_worker": True, **settings}
    done = simulate("digits", strategy, WORKERS, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, lr=LR, **settings)
    return done.error


def soft_error(n: int, scaling: str, seed: int) -> float:
    """Return the error of soft synchronization without the divergence guard, which would lower the rate."""
    return error(seed, "soft_sync", n=n, scaling=scaling, guard=False)


def main() -> None:
    asked = arguments("staleness_aware", __doc__)
    hard, hard_spread = over_seeds(range(asked.seeds), error)
    print(f"hardsync                        error {hard:5.1f} ± {hard_spread:.1f} %", flush=True)
    lines: dict[str, list[Point]] = {"hardsync": [(n, hard, hard_spread) for n in NS]}
    for scaling, name in SCALINGS.items():
        lines[name] = []
        for n in NS:
            mean, spread = over_seeds(range(asked.seeds), lambda s, n=n, k=scaling: soft_error(n, k, s))  # type: ignore[misc]
            lines[name].append((n, mean, spread))
            print(f"n={n:2}  {name:25} error {mean:5.1f} ± {spread:.1f} %", flush=True)
    judge(lines)
    draw(
        asked.figure,
        "30 workers on digits",
        "n (updates per round of pushes)",
        "test error, %",
        lines,
        xscale="log",
    )


def judge(lines: dict[str, list[Point]]) -> None:
    (_, hard, _), *_ = lines["hardsync"]
    fixed, divided = (lines[name] for name in SCALINGS.values())
    least, most = min(point[1] for point in divided), max(point[1] for point in divided)
    report(
        "with one rate, 15- and 30-softsync fail (90 % error); divided by the staleness, all n learn",
        f"with one rate {fixed[-2][1]:.0f} and {fixed[-1][1]:.0f} %; divided, {least:.1f} to {most:.1f} % over all n",
        fixed[-1][1] > 80 and fixed[-2][1] > 80 and most - least < 5,
    )
    off, n, spread = max((abs(mean - hard), n, spread) for n, mean, spread in divided)
    report(
        f"divided by the staleness, all n end within {ALIKE:g} points of hardsync",
        f"hardsync {hard:.1f} %; the furthest from it is n = {n:g}, by {off:.1f} ± {spread:.1f} points",
        off < ALIKE,
    )


if __name__ == "__main__":
    main()
