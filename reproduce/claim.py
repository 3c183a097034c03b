"""Claims: methods, one measured point, and checks whose verdicts follow from 95 % intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Settings = Mapping[str, Any]
Values = dict[str, float]  # measure -> what one run gave
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Method:
    """One way to train: a line of the figure.

    The grid lists further settings; the best of them over the tuning seeds is used. All methods of a claim that have a
    grid have one of the same size.
    """

    name: str
    settings: Settings = field(default_factory=dict)
    grid: Sequence[Settings] = ({},)
    x: Sequence[float] = ()  # if not those of the claim
    tuned_at: float | None = None  # choose there, for all x; None: at each x


@dataclass(frozen=True)
class Interval:
    """The mean of some runs, and half the width of its 95 % confidence interval (Student's t)."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Interval:
        found = np.asarray(values, dtype=float)
        if found.size == 0 or np.isnan(found).any():
            return cls(math.nan, math.inf)
        if np.isclose(found, found[0], rtol=1e-9, atol=0.0).all():  # also if all are infinite
            return cls(float(found[0]), 0.0)
        if np.isinf(found).any():
            return cls(math.nan, math.inf)
        from scipy import stats

        t = stats.t.ppf(0.975, found.size - 1)
        return cls(float(found.mean()), float(t * found.std(ddof=1) / math.sqrt(found.size)))

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "–"
        if not self.half:
            return f"{self.mean:.4g}"
        digits = min(12, max(0, 1 - math.floor(math.log10(self.half))))
        return f"{self.mean:,.{digits}f} ± {self.half:,.{digits}f}"


class Results:
    """Measurements of one task: arrays with a number for each seed, the same seeds in all of them."""

    def __init__(self, values: Mapping[tuple[str, float], Sequence[Values]]) -> None:
        self._values = values

    def __call__(self, method: str, measure: str, x: float | None = None) -> NDArray[np.float64]:
        """Return the numbers of a method; `x` may be omitted if it was measured at one only."""
        known = [at for name, at in self._values if name == method]
        if x is None:
            (x,) = known
        return np.array([values[measure] for values in self._values[method, x]], dtype=float)

    def x_of(self, method: str) -> list[float]:
        return [at for name, at in self._values if name == method]


@dataclass(frozen=True)
class Check:
    """A statement about one number per seed: its 95 % interval must lie above a bound, or below it.

    It holds if the whole interval does, does not hold if the whole interval lies on the other side of the bound, and
    is undecided otherwise. A control is a check whose failure would refute the claim although all others hold.
    """

    text: str
    of: Callable[[Results], Sequence[float] | NDArray[np.float64]]
    above: float | None = None
    below: float | None = None
    unit: str = ""
    control: bool = False

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError(f"{self.text}: give a bound, either above= or below=.")

    def interval(self, results: Results) -> Interval:
        return Interval.of(self.of(results))

    def verdict(self, found: Interval) -> str:
        sign, bound = (1, self.above) if self.above is not None else (-1, self.below)
        assert bound is not None
        if sign * found.mean - found.half > sign * bound:
            return HOLDS
        return FAILS if sign * found.mean + found.half <= sign * bound else UNDECIDED


def difference(
    method: str, than: str, x: float | None = None, measure: str = "error"
) -> Callable[[Results], NDArray[np.float64]]:
    """Return by how much a method has more than another, seed by seed."""
    return lambda r: r(method, measure, x) - r(than, measure, x)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the experiment that decides on it."""

    paper: str  # Dean et al. 2012, figure 4
    text: str
    methods: Sequence[Method]
    point: Callable[..., Values]  # point(seed, x, task=, **settings); of a module, so that other processes find it
    checks: Sequence[Check]
    part: str = "Data parallelism"  # the section of the page
    how: str = "simulation"  # or processes, or computation
    settings: Settings = field(default_factory=dict)  # of all methods
    tasks: Mapping[str, Settings] = field(default_factory=lambda: {"digits": {}})  # name -> its settings; "": no task
    x: Sequence[float] = (0.0,)
    x_label: str = ""
    log_x: bool = False
    shown: Mapping[str, str] = field(default_factory=dict)  # measure -> label of its panel
    tuned_by: str = ""  # the measure that the best of a grid has least of
    tuning_seeds: Sequence[int] = (1, 2)
    repeated: bool = True  # False: no randomness, one run is enough
    why: str = ""  # two sentences, if it does not hold or is undecided

    def __post_init__(self) -> None:
        sizes = {len(method.grid) for method in self.methods} - {1}
        if len(sizes) > 1:
            raise ValueError(f"grids of {sorted(sizes)} settings: all methods must be tuned with the same effort.")
        if sizes and not self.tuned_by:
            raise ValueError("tuned_by: name the measure by which the best of a grid is chosen.")
        if not any(check.control for check in self.checks):
            raise ValueError("checks: one must be a control, which could refute the claim.")
        if len({method.name for method in self.methods}) < len(self.methods):
            raise ValueError("methods: each must have a name of its own.")

    def x_of(self, method: Method) -> Sequence[float]:
        return method.x or self.x


def verdict_of(verdicts: Sequence[str]) -> str:
    """Return the verdict of several checks together: one that does not hold refutes, all must hold."""
    if FAILS in verdicts:
        return FAILS
    return HOLDS if verdicts and set(verdicts) == {HOLDS} else UNDECIDED
