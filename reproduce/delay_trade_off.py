"""The delay of a parameter server trades idle time for progress; the best is in between (Li et al. 2014, figure 13).

Sixteen workers whose computing times jitter. With tau = 0 they wait for each other most of the time; the larger tau,
the less they wait and the more steps they need, as gradients are staler. So the time to a loss has its best in between.
"""

from __future__ import annotations

import math
from itertools import pairwise

from reproduce.runs import Done, arguments, draw, over_seeds, report, simulate

WORKERS, EPOCHS, LR, TARGET = 16, 12, 0.02, 0.25
TAUS = (0, 1, 2, 4, 8, 16, 32)


def train(tau: int, seed: int) -> Done:
    compute = {"kind": "exponential"}
    return simulate(
        "digits",
        "bounded_delay",
        WORKERS,
        seed,
        compute=compute,
        epochs=EPOCHS,
        batch_size=8,
        tau=tau,
        lr=LR,
        guard=False,
    )


def main() -> None:
    asked = arguments("delay_trade_off", __doc__)
    idle, times = [], []
    for tau in TAUS:
        runs = [train(tau, seed) for seed in range(asked.seeds)]
        idle.append((tau, *over_seeds(range(asked.seeds), lambda s, runs=runs: runs[s].idle)))  # type: ignore[misc]
        reached = [run.seconds_to(TARGET) or math.inf for run in runs]
        mean_s, spread_s = over_seeds(range(asked.seeds), lambda s, reached=reached: reached[s])  # type: ignore[misc]
        times.append((tau, mean_s, spread_s if math.isfinite(mean_s) else 0.0))
        print(f"tau {tau:2}:  idle {idle[-1][1]:5.1f} %,  loss {TARGET} after {mean_s:5.2f} ± {times[-1][2]:.2f} s")
    best, best_s, best_spread_s = min(times, key=lambda point: point[1])
    falls = all(later[1] <= earlier[1] + 1 for earlier, later in pairwise(idle))
    report(
        "idle 50 % at tau = 0 and 1.7 % at tau = 16; compute grows with tau; the best is tau = 8",
        f"idle {idle[0][1]:.0f} % at tau = 0, {idle[-2][1]:.1f} % at 16, "
        f"{'falling all the way' if falls else 'not falling'}; the best is tau = {best} with {best_s:.2f} ± "
        f"{best_spread_s:.2f} s, tau = {TAUS[-1]} takes {times[-1][1]:.2f} ± {times[-1][2]:.2f} s",
        falls and 0 < best < TAUS[-1],
    )
    lines = {
        "idle, % of the time": idle,
        f"tenths of a virtual second to loss {TARGET}": [(t, 10 * s, 10 * d) for t, s, d in times],
    }
    draw(asked.figure, "16 jittering workers on the digits", "tau, tasks", "", lines)


if __name__ == "__main__":
    main()
