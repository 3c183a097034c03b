"""What a benchmark says: one row per claim, a ratio measured in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One measured value; where there is a bar, whether it was met."""

    name: str
    value: float
    unit: str
    against: str = ""
    bar: float | None = None
    met: bool | None = None


def at_most(name: str, value: float, bar: float, against: str, unit: str = "x") -> Row:
    return Row(name, value, unit, against, bar, value <= bar)


def at_least(name: str, value: float, bar: float, against: str, unit: str = "x") -> Row:
    return Row(name, value, unit, against, bar, value >= bar)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


Effort = Literal["quick", "full"]
