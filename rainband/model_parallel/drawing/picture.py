"""Placements and schedules as pictures; needs matplotlib (rainband[plots])."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from rainband.model_parallel.drawing.gantt import INK, Bar, Style, color_of, draw_bars, figure_of, time_unit
from rainband.model_parallel.placement.placement import Placement
from rainband.model_parallel.placement.predict import crossings
from rainband.model_parallel.placement.profile import Profile, Unit
from rainband.model_parallel.schedules.check import ActionSpan, ScheduleFacts
from rainband.model_parallel.schedules.table import Table

ROW_INCHES, COLUMN_INCHES, MIN_INCHES = 0.62, 2.3, 6.0
BOX = (0.86, 0.56)  # width and height of a unit, as a fraction of its grid square
MAX_MARKED = 400  # actions; in a schedule with more, bars have no numbers
UPDATE = Style("black", low=0.04, height=0.92, edge="black", line_width=1.1)
FAINT = "#b0b0b0"


def draw_plan(plan: Placement, profile: Profile, path: Path) -> bool:
    """Draw units colored by machine, and values as lines, dark if they cross; return False without matplotlib."""
    where = spots(profile)
    columns = 1 + max(spot.column for spot in where.values())
    rows = 1 + max(spot.row for spot in where.values())
    figure, (axes,) = figure_of(max(MIN_INCHES, COLUMN_INCHES * (columns + 0.4)), ROW_INCHES * rows + 1.5)
    if figure is None:
        return False
    _draw_values(axes, plan, profile, where)
    groups = list(dict.fromkeys(stage.machines for stage in plan.stages))
    for stage in plan.stages:
        for unit in stage.units:
            _draw_unit(axes, profile.by_name[unit], where[unit], color_of(groups.index(stage.machines)))
    span = max(columns + 0.4, MIN_INCHES / COLUMN_INCHES)  # so that boxes of a chain are as wide as others
    axes.set_xlim((columns - 1 - span) / 2, (columns - 1 + span) / 2)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.axis("off")
    axes.set_title(_title(plan, profile), fontsize=10, loc="left")
    _legend(axes, [_machines(machines) for machines in groups])
    figure.savefig(path, dpi=130)
    return True


def _draw_unit(axes: Any, unit: Unit, spot: Spot, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    width, height = BOX
    corner = (spot.column - width / 2, spot.row - height / 2)
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec=INK, lw=0.6, zorder=3
        )
    )
    name = _short(unit.name, 26)
    what = f"{_short(unit.what, 24)}  {unit.seconds * 1e3:.2f} ms"
    axes.text(spot.column, spot.row - 0.11, name, ha="center", va="center", fontsize=7, zorder=4, color=INK)
    axes.text(spot.column, spot.row + 0.13, what, ha="center", va="center", fontsize=6, zorder=4, color="#444444")


def _draw_values(axes: Any, plan: Placement, profile: Profile, where: dict[str, Spot]) -> None:
    """Draw a line for each reader; a crossing value has its bytes beside it, once per reading stage."""
    stage = plan.stage_of()
    labelled = set()
    machines_of = {unit: s.machines for s in plan.stages for unit in s.units}
    for value in profile.values:
        for reader in value.readers:
            crosses = machines_of[reader] != machines_of[value.maker]
            bend = _draw_line(axes, where[value.maker], where[reader], crosses)
            if crosses and (value.name, stage[reader]) not in labelled:
                labelled.add((value.name, stage[reader]))
                box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.9}
                text = bytes_text(value.num_bytes)
                axes.text(*bend, text, fontsize=6.5, ha="center", va="center", zorder=5, bbox=box)


def _draw_line(axes: Any, maker: Spot, reader: Spot, crosses: bool) -> tuple[float, float]:
    """Draw a line from the bottom of one box to the top of another; return its middle, for a label."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    begin = (maker.column, maker.row + BOX[1] / 2)
    end = (reader.column, reader.row - BOX[1] / 2)
    if reader.row - maker.row <= 1:
        points = [begin, (begin[0], begin[1] + 0.2), (end[0], end[1] - 0.2), end]
        codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
    else:  # it passes other rows, through the gaps between rows and columns
        side, down, up = max(maker.column, reader.column) + 0.5, begin[1] + 0.4, end[1] - 0.4
        points = [begin, (side, begin[1] + 0.05), (side, begin[1] + 0.2), (side, down)]
        points += [(side, up), (side, end[1] - 0.2), (side, end[1] - 0.05), end]
        codes = [Curve.MOVETO, *([Curve.CURVE4] * 3), Curve.LINETO, *([Curve.CURVE4] * 3)]
        middle = (side, (begin[1] + end[1]) / 2)
    color, width = (INK, 1.6) if crosses else (FAINT, 0.9)
    axes.add_patch(PathPatch(Curve(points, codes), fc="none", ec=color, lw=width, zorder=2 if crosses else 1))
    return middle


def _title(plan: Placement, profile: Profile) -> str:
    crossing = sum(count for _, _, count in crossings(plan, profile))
    crossed = f"{plan.kind}, {bytes_text(crossing)} cross for each batch of {profile.batch_size}"
    text = f"{plan.model or 'model'}: {crossed if crossing else 'on one machine'}"
    if plan.predicted is not None and plan.predicted.batch_s:
        text += f"\npredicted: {plan.predicted.alone_s / plan.predicted.batch_s:.2f} times as fast as one machine"
    return text


def draw_schedule(table: Table, facts: ScheduleFacts, path: Path) -> bool:
    """Draw a bar for each action, one row per machine; return False if matplotlib is missing."""
    figure, (axes,) = figure_of(width=12, height=1.5 + 0.45 * len(table.rows))
    if figure is None:
        return False
    scale, unit = time_unit(facts.total_s)
    narrow_s = facts.total_s / 160 if len(facts.spans) <= MAX_MARKED else math.inf
    bars = [_bar(span, table) for span in facts.spans]
    draw_bars(axes, bars, [f"machine {number}" for number in range(len(table.rows))], scale, narrow_s)
    axes.set_xlim(0, facts.total_s * scale)
    axes.set_xlabel(unit)
    axes.set_title(
        f"{table.name}: {table.num_stages} stage{'s' * (table.num_stages > 1)}, {table.num_microbatches} microbatches, "
        f"idle {facts.bubble:.1%}. "
        "Forwards light, backwards dark, updates as black lines; numbers are microbatches"
        + (", letters the stages of a machine" if table.num_stages > len(table.rows) else ""),
        fontsize=9,
        loc="left",
    )
    figure.savefig(path, dpi=130)
    return True


def _bar(span: ActionSpan, table: Table) -> Bar:
    action = span.action
    if action.kind == "U":
        return Bar(span.machine, span.to_s, span.to_s, UPDATE)
    style = Style(color_of(action.microbatch), alpha=0.55 if action.kind == "F" else 1.0)
    text = str(action.microbatch)
    if table.num_stages > len(table.rows):  # a microbatch passes a machine more than once
        text += f"\n{'abcdefgh'[action.stage // len(table.rows) % 8]}"
    return Bar(span.machine, span.from_s, span.to_s, style, text)


def bytes_text(count: int) -> str:
    """Return a size in a unit that needs few digits: 512 B, 1.5 kB, 20 MB."""
    size, names = float(count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(names) > 1:
        size /= 1000
        names.pop(0)
    return f"{size:.0f} {names[0]}" if size >= 100 or names[0] == "B" else f"{size:.1f} {names[0]}"


def _machines(machines: tuple[int, ...]) -> str:
    """Return machines as text: machine 3; machines 0-14; machines 0, 2, 4."""
    if len(machines) == 1:
        return f"machine {machines[0]}"
    if list(machines) == list(range(machines[0], machines[-1] + 1)):
        return f"machines {machines[0]}-{machines[-1]}"
    return f"machines {', '.join(map(str, machines))}"


def _short(text: str, most: int) -> str:
    """Shorten a long name to its end, which distinguishes it better than its beginning."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _legend(axes: Any, names: list[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(fc=color_of(n), ec=INK, lw=0.6, label=name) for n, name in enumerate(names)]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=min(4, len(patches)), frameon=False, fontsize=8
    )


SWEEPS = 4  # down and up again


class Spot(NamedTuple):
    column: float
    row: float


def spots(profile: Profile) -> dict[str, Spot]:
    """Return positions in a grid: levels as rows, ordered so that few lines cross (Sugiyama et al. 1981)."""
    above: dict[str, list[str]] = {name: [] for name in profile.names}
    below: dict[str, list[str]] = {name: [] for name in profile.names}
    for value in profile.values:
        for reader in value.readers:
            above[reader].append(value.maker)
            below[value.maker].append(reader)
    rows = _rows(profile, above)
    position = {name: float(number) for row in rows for number, name in enumerate(row)}
    for _ in range(SWEEPS):
        for order, near in ((rows, above), (rows[::-1], below)):
            for row in order:
                row.sort(key=lambda name: _mean([position[other] for other in near[name]], position[name]))
                position.update({name: float(number) for number, name in enumerate(row)})
    widest = max(map(len, rows))
    return {
        name: Spot(number + (widest - len(row)) / 2, float(level))
        for level, row in enumerate(rows)
        for number, name in enumerate(row)
    }


def _rows(profile: Profile, above: dict[str, list[str]]) -> list[list[str]]:
    """Return the rows: each unit is below everything that it reads."""
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
