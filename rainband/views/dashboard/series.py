"""Series of constant size, whatever the length of the run: points of curves, and columns of workers over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAX_COLUMNS = 96  # of a strip over time; when there are more, neighbors are joined
MAX_POINTS = 600  # of a curve
MAX_ENTRIES = 3072  # rows times columns that a page gets
FILLED = 0.85  # of these should have a gradient
MIN_COLUMNS = 24  # fewer would hide when something began


class Point(NamedTuple):
    """A point of the curves; each field is a column of the page's data."""

    at_s: float
    samples: int
    updates: float
    loss: float | None
    metric: float | None
    staleness_mean: float
    staleness_max: int
    per_s: float


class Curve:
    """Points in order. When there are too many, of each four the lowest and the highest loss stay, and both ends."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.thinned = 0  # times that points were left out: what was sent before is then out of date

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            inner = self.points[1:-1]
            fours = [inner[k : k + 4] for k in range(0, len(inner), 4)]
            kept = [point for four in fours for point in _extremes(four)]
            self.points = [self.points[0], *kept, self.points[-1]]
            self.thinned += 1


def _extremes(points: list[Point]) -> list[Point]:
    """Return the points with the lowest and the highest loss, and those at which the metric was measured first."""
    known = [(point.loss, k) for k, point in enumerate(points) if point.loss is not None]
    chosen = {min(known)[1], max(known)[1]} if known else {0, len(points) - 1}
    return [points[k] for k in sorted(chosen)]


class Shares(NamedTuple):
    """The work of one worker in an interval, as sums."""

    missed: int = 0  # updates, by its gradients
    gradients: int = 0
    waited_s: float = 0.0
    samples: int = 0

    def plus(self, other: Shares) -> Shares:
        return Shares(
            self.missed + other.missed,
            self.gradients + other.gradients,
            self.waited_s + other.waited_s,
            self.samples + other.samples,
        )

    def since(self, before: Shares) -> Shares:
        return Shares(
            self.missed - before.missed,
            self.gradients - before.gradients,
            self.waited_s - before.waited_s,
            self.samples - before.samples,
        )


class Column(NamedTuple):
    """An interval, and the work of each worker in it."""

    begin_s: float
    end_s: float
    shares: Mapping[int, Shares]

    def joined(self, other: Column) -> Column:
        both = dict(self.shares)
        for worker, shares in other.shares.items():
            both[worker] = both[worker].plus(shares) if worker in both else shares
        return Column(self.begin_s, other.end_s, both)


class Strips:
    """Columns in order. When there are too many, neighbors are joined, and so is what comes later."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.per_column = 1  # intervals
        self.in_last = 0  # intervals

    def add(self, column: Column) -> None:
        if self.columns and self.in_last < self.per_column:
            self.columns[-1] = self.columns[-1].joined(column)
            self.in_last += 1
        else:
            self.columns.append(column)
            self.in_last = 1
        if len(self.columns) > MAX_COLUMNS:
            if len(self.columns) % 2 == 0:
                self.in_last += self.per_column
            self.columns = in_pairs(self.columns)
            self.per_column *= 2


def in_pairs(columns: list[Column]) -> list[Column]:
    """Join the first column with the second, the third with the fourth, and so on."""
    pairs = [first.joined(second) for first, second in zip(columns[::2], columns[1::2], strict=False)]
    return pairs + columns[2 * len(pairs) :]


def readable(columns: list[Column], num_rows: int) -> tuple[list[Column], int]:
    """Join columns until a page can draw them, and most have a gradient of each worker; return how often."""
    joins = 0
    while len(columns) * num_rows > MAX_ENTRIES or (len(columns) >= 2 * MIN_COLUMNS and _is_sparse(columns)):
        columns, joins = in_pairs(columns), joins + 1
    return columns, joins


def _is_sparse(columns: list[Column]) -> bool:
    entries = [shares for column in columns for shares in column.shares.values()]
    filled = sum(1 for shares in entries if shares.gradients)
    return 0 < filled < FILLED * len(entries)
