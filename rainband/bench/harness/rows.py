"""Rows of results: one for each measured value or ratio, some with a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One measured value, and whether it met its target."""

    name: str
    value: float
    unit: str
    against: str = ""
    target: float | None = None
    met: bool | None = None


def at_most(name: str, value: float, target: float, against: str, unit: str = "x") -> Row:
    return Row(name, value, unit, against, target, value <= target)


def at_least(name: str, value: float, target: float, against: str, unit: str = "x") -> Row:
    return Row(name, value, unit, against, target, value >= target)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


Effort = Literal["quick", "full"]
