"""Rows of results: one for each measured value or ratio, some with a target."""

from __future__ import annotations

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


Effort = Literal["quick", "full"]
