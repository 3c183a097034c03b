"""Stale-synchronous beats lock-step where there are stragglers, and not where there are none (Cui et al. 2014).

Eight workers train the digits; with stragglers, one step in twenty takes ten times as long. What counts is the virtual
time in which the same data is done, and the test error after it.
"""

from __future__ import annotations

from reproduce.runs import Done, arguments, draw, over_seeds, report, simulate

WORKERS, EPOCHS = 8, 8
BOUNDS = (0, 1, 3, 8)
CLUSTERS = {"no stragglers": 0.0, "stragglers": 0.05}


def train(bound: int, chance: float, seed: int) -> Done:
    compute = {"kind": "lognormal", "spread": 0.05, "straggler_chance": chance, "straggler_factor": 10.0}
    return simulate("digits", "stale_sync", WORKERS, seed, compute=compute, epochs=EPOCHS, bound=bound, lr=0.03)


def main() -> None:
    asked = arguments("stragglers", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, chance in CLUSTERS.items():
        lines[name] = []
        for bound in BOUNDS:
            runs = [train(bound, chance, seed) for seed in range(asked.seeds)]
            mean_s, spread_s = over_seeds(range(asked.seeds), lambda s, runs=runs: runs[s].result.seconds)  # type: ignore[misc]
            error, _ = over_seeds(range(asked.seeds), lambda s, runs=runs: runs[s].error)  # type: ignore[misc]
            print(f"{name:14} bound {bound}:  {mean_s:5.2f} ± {spread_s:.2f} s,  error {error:.1f} %")
            lines[name].append((bound, mean_s, spread_s))
    quiet, slow = lines.values()
    gain_quiet, gain_slow = quiet[0][1] / min(point[1] for point in quiet), slow[0][1] / min(point[1] for point in slow)
    report(
        "without stragglers lock-step is about as fast; with stragglers stale-synchronous wins",
        f"the best bound is {gain_quiet:.2f} times as fast as lock-step without, {gain_slow:.2f} times with stragglers",
        gain_quiet < 1.25 and gain_slow > 1.3 * gain_quiet,
    )
    draw(asked.figure, "8 workers on the digits", "bound, clocks", "virtual seconds for the same data", lines)


if __name__ == "__main__":
    main()
