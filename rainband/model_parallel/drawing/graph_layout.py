"""Where units stand in a picture: one row for each level, and columns such that lines are short and seldom cross."""

from __future__ import annotations

from typing import NamedTuple

from rainband.model_parallel.placement.profile import Profile

SWEEPS = 4  # down and up again


class Spot(NamedTuple):
    column: float
    row: float


def spots(profile: Profile) -> dict[str, Spot]:
    """Each level is ordered by where its neighbours are, a few times from above and below (Sugiyama et al. 1981)."""
    above: dict[str, list[str]] = {name: [] for name in profile.names}
    below: dict[str, list[str]] = {name: [] for name in profile.names}
    for value in profile.values:
        for reader in value.readers:
            above[reader].append(value.maker)
            below[value.maker].append(reader)
    rows = _rows(profile, above)
    place = {name: float(number) for row in rows for number, name in enumerate(row)}
    for _ in range(SWEEPS):
        for order, near in ((rows, above), (rows[::-1], below)):
            for row in order:
                row.sort(key=lambda name: _mean([place[other] for other in near[name]], place[name]))
                place.update({name: float(number) for number, name in enumerate(row)})
    widest = max(map(len, rows))
    return {
        name: Spot(number + (widest - len(row)) / 2, float(level))
        for level, row in enumerate(rows)
        for number, name in enumerate(row)
    }


def _rows(profile: Profile, above: dict[str, list[str]]) -> list[list[str]]:
    """A unit stands below everything that it reads."""
    level: dict[str, int] = {}
    rows: list[list[str]] = []
    for name in profile.names:
        level[name] = max((level[maker] + 1 for maker in above[name]), default=0)
        while len(rows) <= level[name]:
            rows.append([])
        rows[level[name]].append(name)
    return rows


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
