"""Stale-synchronous SGD is faster than lock-step with stragglers, and not without them (Cui et al. 2014).

Eight workers train digits; with stragglers, one step in twenty takes ten times as long. The script measures the virtual
time to process the same data, the time to a loss, and the final test error.
"""

from __future__ import annotations

import math

from reproduce.runs import Done, arguments, draw_panels, mean_and_spread, report, simulate

WORKERS, EPOCHS, TARGET = 8, 8, 1.0
BOUNDS = (0, 1, 3, 8)
CLUSTERS = {"no stragglers": 0.0, "stragglers": 0.05}
Points = list[tuple[float, float, float]]  # bound, mean, spread


def train(bound: int, chance: float, seed: int) -> Done:
    compute = {"kind": "lognormal", "spread": 0.05, "straggler_chance": chance, "straggler_factor": 10.0}
    return simulate("digits", "stale_sync", WORKERS, seed, compute=compute, epochs=EPOCHS, bound=bound, lr=0.03)


def main() -> None:
    asked = arguments("stragglers", __doc__)
    whole: dict[str, Points] = {name: [] for name in CLUSTERS}
    to_loss: dict[str, Points] = {name: [] for name in CLUSTERS}
    for name, chance in CLUSTERS.items():
        for bound in BOUNDS:
            runs = [train(bound, chance, seed) for seed in range(asked.seeds)]
            mean_s, spread_s = mean_and_spread([run.result.seconds for run in runs])
            loss_s, loss_spread_s = mean_and_spread([run.seconds_to(TARGET) or math.inf for run in runs])
            error, error_spread = mean_and_spread([run.error for run in runs])
            print(
                f"{name:14} bound {bound}:  {mean_s:5.2f} ± {spread_s:.2f} s,  loss {TARGET:g} after {loss_s:.2f} ± "
                f"{loss_spread_s:.2f} s,  error {error:.1f} ± {error_spread:.1f} %",
                flush=True,
            )
            whole[name].append((bound, mean_s, spread_s))
            to_loss[name].append((bound, loss_s, loss_spread_s))
    gains = [
        [points[0][1] / min(point[1] for point in points) for points in times.values()] for times in (whole, to_loss)
    ]
    (quiet, slow), (quiet_to_loss, slow_to_loss) = gains
    report(
        "without stragglers lock-step is about as fast; with stragglers stale-synchronous is faster",
        f"the best bound is {quiet:.2f} times as fast as lock-step without, {slow:.2f} times with stragglers; "
        f"to a loss of {TARGET:g} {quiet_to_loss:.2f} and {slow_to_loss:.2f} times",
        max(quiet, quiet_to_loss) < 1.25 and slow > 1.3 * quiet and slow_to_loss > 1.3 * quiet_to_loss,
    )
    panels = {"virtual seconds for the same data": whole, f"virtual seconds to a loss of {TARGET:g}": to_loss}
    draw_panels(asked.figure, "8 workers on digits", "bound, clocks", panels)


if __name__ == "__main__":
    main()
