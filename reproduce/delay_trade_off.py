"""A larger delay means less idle time but staler gradients; the best delay is in between (Li et al. 2014, figure 13).

Sixteen workers with exponential step times. With tau = 0 they wait for each other most of the time; with a larger tau
they wait less, but need more steps, because gradients are staler. So the time to a loss has a minimum in between.
"""

from __future__ import annotations

import math
from itertools import pairwise

from reproduce.runs import Done, arguments, draw_panels, mean_and_spread, report, simulate

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
    idle, needed, times = [], [], []
    for tau in TAUS:
        runs = [train(tau, seed) for seed in range(asked.seeds)]
        idle.append((tau, *mean_and_spread([run.idle for run in runs])))
        needed.append((tau, *mean_and_spread([run.samples_to(TARGET) or math.inf for run in runs])))
        times.append((tau, *mean_and_spread([run.seconds_to(TARGET) or math.inf for run in runs])))
        (_, idle_of, _), (_, samples, spread), (_, mean_s, spread_s) = idle[-1], needed[-1], times[-1]
        print(
            f"tau {tau:2}:  idle {idle_of:5.1f} %,  loss {TARGET} after {samples:6,.0f} ± {spread:,.0f} samples, "
            f"{mean_s:5.2f} ± {spread_s:.2f} s",
            flush=True,
        )
    best, best_s, best_spread_s = min(times, key=lambda point: point[1])
    falls = all(later[1] <= earlier[1] + 1 for earlier, later in pairwise(idle))
    report(
        "idle 50 % at tau = 0 and 1.7 % at tau = 16; compute grows with tau; the best is tau = 8",
        f"idle {idle[0][1]:.0f} % at tau = 0, {idle[-2][1]:.1f} % at 16, "
        f"{'decreasing' if falls else 'not decreasing'}; {needed[0][1]:,.0f} samples at 0, {needed[-1][1]:,.0f} "
        f"at {TAUS[-1]}; the best is tau = {best} with {best_s:.2f} ± {best_spread_s:.2f} s, tau = {TAUS[-1]} takes "
        f"{times[-1][1]:.2f} ± {times[-1][2]:.2f} s",
        falls and needed[-1][1] > needed[0][1] and 0 < best < TAUS[-1],
    )
    panels = {
        "idle, % of the time": {"mean of all workers": idle},
        f"samples to a loss of {TARGET}": {"samples": needed},
        f"virtual seconds to a loss of {TARGET}": {"time": times},
    }
    draw_panels(asked.figure, "16 workers with exponential times on digits", "tau, tasks", panels)


if __name__ == "__main__":
    main()
