r"""Line searches: choose the step along a direction. They request the loss at a step and receive it; no I/O.

A search is a generator. It yields a step t and is sent the Trial there: the loss f(t) and the slope f'(t) along the
direction. It returns the trial it chose, which is always the last one that it requested.

    Armijo          f(t) <= f(0) + c1 t f'(0)                     the loss fell enough
    strong Wolfe    Armijo, and  |f'(t)| <= c2 |f'(0)|            and the slope shrank enough

The strong Wolfe search brackets a minimum, then zooms in by cubic interpolation (Nocedal & Wright, algorithms 3.5 and
3.6), with the safeguards of torch.optim.LBFGS: a step close to an end of the bracket is moved inside it. (That class
lets the second trial be higher than the first; here it may not.) If the loss is not finite, the step is too long, and
the bracket is halved.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple


class Trial(NamedTuple):
    """The loss and its slope at a step along the direction."""

    step: float
    loss: float
    slope: float


Search = Generator[float, Trial, Trial]

SHRINK = 0.1  # a backtracking step is between a tenth and a half of the one before
NEAR_END = 0.1  # of the bracket: a second trial closer to its end than this is moved


def armijo(start: Trial, step: float, c1: float = 1e-4, max_trials: int = 25) -> Search:
    """Backtrack until the loss falls enough; if it never does, request and return the start."""
    for _ in range(max_trials):
        trial = yield step
        if trial.loss <= start.loss + c1 * step * start.slope:
            return trial
        step = _backtracked(start, trial)
    return (yield 0.0)


def _backtracked(start: Trial, trial: Trial) -> float:
    """Return the minimum of the parabola through both losses and the first slope, within 0.1 to 0.5 of the step."""
    bend = 2 * (trial.loss - start.loss - trial.step * start.slope)
    lowest = -start.slope * trial.step**2 / bend if math.isfinite(bend) and bend > 0 else trial.step / 2
    return min(max(lowest, SHRINK * trial.step), 0.5 * trial.step)


def strong_wolfe(
    start: Trial,
    step: float,
    c1: float = 1e-4,
    c2: float = 0.9,
    length: float = 1.0,
    smallest: float = 1e-9,
    max_trials: int = 25,
) -> Search:
    """Bracket a minimum and zoom in, until the bracket is shorter than `smallest` in parameters (step x `length`)."""
    before, trials = start, 1
    trial = yield step
    while True:
        if _too_high(trial, start, c1) or (trials > 1 and trial.loss >= before.loss):
            bracket = before, trial
            break
        if abs(trial.slope) <= -c2 * start.slope:
            return trial
        if trial.slope >= 0:
            bracket = before, trial
            break
        if trials > max_trials:
            return trial  # the loss still falls at the longest step
        longer = trial.step + 0.01 * (trial.step - before.step), 10 * trial.step
        step = cubic_minimum(before, trial, longer)
        before = trial
        trial = yield step
        trials += 1
    return (yield from _zoom(start, bracket, trial, (c1, c2), (length, smallest), max_trials - trials + 1))


def _too_high(trial: Trial, start: Trial, c1: float) -> bool:
    return not trial.loss <= start.loss + c1 * trial.step * start.slope  # True also for nan


def _zoom(
    start: Trial,
    bracket: tuple[Trial, Trial],
    last: Trial,
    constants: tuple[float, float],
    limits: tuple[float, float],
    max_trials: int,
) -> Search:
    (c1, c2), (length, smallest) = constants, limits
    low, high = sorted(bracket, key=lambda trial: trial.loss if math.isfinite(trial.loss) else math.inf)
    stuck = False
    for _ in range(max_trials):
        if abs(high.step - low.step) * length < smallest:
            break
        step, stuck = _inside(cubic_minimum(*_in_order(low, high)), low, high, stuck)
        last = yield step
        if _too_high(last, start, c1) or last.loss >= low.loss:
            high = last
            if high.loss < low.loss:
                low, high = high, low
            continue
        if abs(last.slope) <= -c2 * start.slope:
            return last
        if last.slope * (high.step - low.step) >= 0:
            high = low
        low = last
    return low if low is last else (yield low.step)


def _in_order(one: Trial, other: Trial) -> tuple[Trial, Trial]:
    return (one, other) if one.step <= other.step else (other, one)


def _inside(step: float, low: Trial, high: Trial, stuck: bool) -> tuple[float, bool]:
    """Move a step that is too close to an end of the bracket, if the previous one was too close as well."""
    first, last = min(low.step, high.step), max(low.step, high.step)
    margin = NEAR_END * (last - first)
    if min(last - step, step - first) >= margin:
        return step, False
    if not stuck and first < step < last:
        return step, True
    return (last - margin if abs(step - last) < abs(step - first) else first + margin), False


def cubic_minimum(one: Trial, other: Trial, bounds: tuple[float, float] | None = None) -> float:
    """Return the minimum, within bounds, of the cubic through two losses and slopes; the middle if it has none."""
    lowest, highest = bounds or (min(one.step, other.step), max(one.step, other.step))
    middle = (lowest + highest) / 2
    if not all(map(math.isfinite, (*one, *other))) or one.step == other.step:
        return middle
    first, last = _in_order(one, other)
    d1 = first.slope + last.slope - 3 * (first.loss - last.loss) / (first.step - last.step)
    square = d1 * d1 - first.slope * last.slope
    if not square >= 0:
        return middle
    d2 = math.sqrt(square)
    below = last.slope - first.slope + 2 * d2
    if not below:
        return middle
    at = last.step - (last.step - first.step) * ((last.slope + d2 - d1) / below)
    return min(max(at, lowest), highest)
