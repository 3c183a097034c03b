"""The time that a gradient takes: constant, log-normal, exponential or measured; with slow workers and stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from random import Random
from typing import Literal


@dataclass(frozen=True)
class ComputeModel:
    """The distribution of the time of one step."""

    kind: Literal["constant", "lognormal", "exponential", "trace"] = "lognormal"
    step_s: float = 0.01  # mean time of a step on an ordinary machine
    spread: float = 0.1  # standard deviation of the logarithm, for lognormal
    trace_s: tuple[float, ...] = ()  # measured steps, for trace: each worker starts at another one
    slow_workers: tuple[int, ...] = ()  # workers on slow machines
    slow_factor: float = 4.0  # by which their steps take longer
    straggler_chance: float = 0.0  # probability that a step takes longer
    straggler_factor: float = 10.0
    measure_s: float = 0.0  # time of an evaluation

    def __post_init__(self) -> None:
        for name in ("step_s", "spread", "measure_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: choose 0 or more.")
        if self.kind == "trace" and not self.trace_s:
            raise ValueError("kind=trace: requires measured steps, such as trace_s=0.010,0.012.")
        if not 0 <= self.straggler_chance <= 1:
            raise ValueError(f"straggler_chance={self.straggler_chance}: choose from 0 to 1.")

    @property
    def mean_s(self) -> float:
        """Return the mean time of a step on an ordinary machine."""
        mean = sum(self.trace_s) / len(self.trace_s) if self.kind == "trace" else self.step_s
        return mean * (1 + self.straggler_chance * (self.straggler_factor - 1))


class ComputePace:
    """The times of one worker's steps; they depend only on the seed and the worker."""

    def __init__(self, model: ComputeModel, seed: int, worker: int) -> None:
        self.model = model
        self.random = Random(f"compute {seed} {worker}")
        self.factor = model.slow_factor if worker in model.slow_workers else 1.0
        self.next_step = self.random.randrange(len(model.trace_s)) if model.kind == "trace" else 0

    def next_s(self) -> float:
        model = self.model
        time_s = self.factor * self._ordinary_s()
        if model.straggler_chance and self.random.random() < model.straggler_chance:
            return time_s * model.straggler_factor
        return time_s

    def _ordinary_s(self) -> float:
        model = self.model
        match model.kind:
            case "constant":
                return model.step_s
            case "lognormal":
                return model.step_s * lognormal(self.random, model.spread)
            case "exponential":
                return model.step_s * exponential(self.random)
            case "trace":
                self.next_step = (self.next_step + 1) % len(model.trace_s)
                return model.trace_s[self.next_step]


# Random times, from additions, multiplications and divisions only: the exponential and the logarithm of the C library
# may differ in the last bit between machines, and a schedule would then differ too.

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


def exp(x: float) -> float:
    """Return e**x: seven terms of the series for x / 64, squared six times. Relative error below 1e-12."""
    y = x / 64
    power = 1 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    power *= power
    power *= power
    power *= power
    power *= power
    power *= power
    return power * power


def log(x: float) -> float:
    """Return the natural logarithm: the exponent, and a series for the mantissa. Error about 1e-15."""
    mantissa, exponent = frexp(x)
    if mantissa < SQRT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    ratio = (mantissa - 1) / (mantissa + 1)  # log m = 2 (r + r^3/3 + r^5/5 + ...), |r| < 0.172
    square, power, total = ratio * ratio, ratio, 0.0
    for k in range(1, 20, 2):
        total += power / k
        power *= square
    return 2 * total + exponent * LN2


def lognormal(random: Random, spread: float) -> float:
    """Draw a log-normal number with mean 1, nearly; `spread` is the standard deviation of its logarithm.

    The normal number is approximated by the sum of twelve uniform ones, less 6.
    """
    r = random.random
    drawn = r() + r() + r() + r() + r() + r() + r() + r() + r() + r() + r() + r() - 6.0
    return exp(spread * drawn - spread * spread / 2)


def exponential(random: Random) -> float:
    """Draw an exponential number with mean 1."""
    return -log(1.0 - random.random())
