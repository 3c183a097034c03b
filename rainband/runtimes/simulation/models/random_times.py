"""Random times from additions, multiplications and divisions only: the same bits on every machine.

The exponential and the logarithm of the C library may differ in the last bit between machines; a schedule would then
differ too.
"""

from __future__ import annotations

from math import frexp
from random import Random

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


def exp(x: float) -> float:
    """e to the power x: seven terms of the series for x / 64, squared six times. Relative error below 1e-12."""
    y = x / 64
    power = 1 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    power *= power
    power *= power
    power *= power
    power *= power
    power *= power
    return power * power


def log(x: float) -> float:
    """The natural logarithm: the exponent apart, and a series for the rest. Error about 1e-15."""
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
    """A log-normal number with mean 1 (nearly); `spread` is that of its logarithm.

    The normal one in it is nearly so: the sum of twelve uniform ones, less 6, so never beyond 6.
    """
    r = random.random
    drawn = r() + r() + r() + r() + r() + r() + r() + r() + r() + r() + r() + r() - 6.0
    return exp(spread * drawn - spread * spread / 2)


def exponential(random: Random) -> float:
    """An exponential number with mean 1."""
    return -log(1.0 - random.random())
