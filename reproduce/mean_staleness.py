"""Mean staleness of soft synchronisation is (workers - 1) / c; its tail depends on the machines (Gupta et al. 2016).

Thirty workers, one update for every c = 30 / n gradients. The mean holds for any distribution of step times; that no
gradient misses more than 2n updates holds for equal machines, and not for exponential times. The mean is taken while
all workers compute: at the end of a run some have no work.
"""

from __future__ import annotations

from reproduce.runs import arguments, draw_panels, mean_and_spread, report, simulate

WORKERS, STEPS = 30, 400
ALL_COMPUTE = 0.8  # fraction of the data until which all workers compute
NS = (1, 2, 5, 15, 30)
KINDS = {"equal (10 % jitter)": {"kind": "lognormal", "spread": 0.1}, "exponential": {"kind": "exponential"}}


def measure(n: int, compute: dict[str, object], seed: int = 0, steps: int = STEPS) -> tuple[float, float, int]:
    """Return the mean staleness, the percentage of gradients beyond 2n, and the maximum."""
    done = simulate("digits", "soft_sync", WORKERS, seed, compute=compute, steps=steps, n=n)
    staleness = done.result.staleness
    mean = [mean for part, mean in done.staleness if part <= ALL_COMPUTE][-1]
    histogram = {int(missed): times for missed, times in staleness["histogram"].items()}
    beyond = sum(times for missed, times in histogram.items() if missed > 2 * n)
    return mean, 100 * beyond / sum(histogram.values()), staleness["max"]


def main() -> None:
    asked = arguments("mean_staleness", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {"(workers - 1) / c": []}
    beyonds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in KINDS}
    worst, tails = 0.0, dict.fromkeys(KINDS, 0.0)
    for name, compute in KINDS.items():
        lines[name] = []
        for n in NS:
            found = [measure(n, compute, seed) for seed in range(asked.seeds)]
            mean, spread = mean_and_spread([one[0] for one in found])
            beyond, most = max(one[1] for one in found), max(one[2] for one in found)
            exact = (WORKERS - 1) / (WORKERS // n)
            told = f"mean {mean:6.2f} ± {spread:.2f} (exact {exact:5.2f})"
            print(f"n={n:2}  {name:20} {told}  beyond 2n at most {beyond:5.2f} %  largest {most}")
            lines[name].append((n, mean, spread))
            beyonds[name].append((n, *mean_and_spread([one[1] for one in found])))
            worst = max(worst, abs(mean - exact) / exact)
            tails[name] = max(tails[name], beyond)
    lines["(workers - 1) / c"] = [(n, (WORKERS - 1) / (WORKERS // n), 0.0) for n in NS]
    alike, exponential = tails.values()
    report(
        "the mean staleness is (workers - 1) / c, about n; on equal machines the maximum is 2n",
        f"within {100 * worst:.1f} % of it while all compute; beyond 2n: {alike:.2f} % on equal machines, "
        f"{exponential:.1f} % with exponential times",
        worst < 0.01 and alike < 0.5 and exponential > 1,  # the ends of a run count more with exponential times
    )
    panels = {"mean staleness, updates": lines, "gradients that missed more than 2n, %": beyonds}
    draw_panels(asked.figure, "staleness of 30 workers", "n", panels)


if __name__ == "__main__":
    main()
