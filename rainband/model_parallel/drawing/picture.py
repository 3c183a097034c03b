"""Plans and schedules as pictures; needs matplotlib (rainband[plots])."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rainband.model_parallel.drawing.graph_layout import Spot, spots
from rainband.model_parallel.placement.placement import Placement
from rainband.model_parallel.placement.predict import crossings
from rainband.model_parallel.placement.profile import Profile, Unit
from rainband.model_parallel.schedules.check import ActionSpan, ScheduleFacts
from rainband.model_parallel.schedules.table import Table

COLOURS = ("#8fb8de", "#f2c879", "#9fd3a8", "#e8a191", "#b9a5d9", "#c4c4c4", "#e5b3c9", "#8ccfcf", "#d3cf8c", "#d9b08c")
ROW_INCHES, COLUMN_INCHES, MIN_INCHES = 0.62, 2.3, 6.0
BOX = (0.86, 0.56)  # of a unit, as a part of its place
MOST_MARKED = 400  # actions that have their number written in them
INK, FAINT = "#222222", "#b0b0b0"


def draw_plan(plan: Placement, profile: Profile, path: Path) -> bool:
    """Units coloured by machine, lines where values go, dark and with bytes where they cross; False: no matplotlib."""
    where = spots(profile)
    columns = 1 + max(spot.column for spot in where.values())
    rows = 1 + max(spot.row for spot in where.values())
    figure, axes = _figure(max(MIN_INCHES, COLUMN_INCHES * (columns + 0.4)), ROW_INCHES * rows + 1.5)
    if figure is None:
        return False
    _draw_values(axes, plan, profile, where)
    homes = list(dict.fromkeys(stage.machines for stage in plan.stages))
    for stage in plan.stages:
        for unit in stage.units:
            _draw_unit(axes, profile.by_name[unit], where[unit], COLOURS[homes.index(stage.machines) % len(COLOURS)])
    span = max(columns + 0.4, MIN_INCHES / COLUMN_INCHES)  # also a chain has boxes of the same width
    axes.set_xlim((columns - 1 - span) / 2, (columns - 1 + span) / 2)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.axis("off")
    axes.set_title(_title(plan, profile), fontsize=10, loc="left")
    _legend(axes, [_machines(machines) for machines in homes])
    figure.savefig(path, dpi=130)
    return True


def _draw_unit(axes: Any, unit: Unit, spot: Spot, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    width, height = BOX
    corner = (spot.column - width / 2, spot.row - height / 2)
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=colour, ec=INK, lw=0.6, zorder=3
        )
    )
    name = _short(unit.name, 26)
    what = f"{_short(unit.what, 24)}  {unit.seconds * 1e3:.2f} ms"
    axes.text(spot.column, spot.row - 0.11, name, ha="center", va="center", fontsize=7, zorder=4, color=INK)
    axes.text(spot.column, spot.row + 0.13, what, ha="center", va="center", fontsize=6, zorder=4, color="#444444")


def _draw_values(axes: Any, plan: Placement, profile: Profile, where: dict[str, Spot]) -> None:
    """A line for each reader; what crosses has its bytes beside the line, once for each stage that reads it."""
    stage = plan.stage_of()
    labelled = set()
    home = {unit: s.machines for s in plan.stages for unit in s.units}
    for value in profile.values:
        for reader in value.readers:
            crosses = home[reader] != home[value.maker]
            bend = _draw_line(axes, where[value.maker], where[reader], crosses)
            if crosses and (value.name, stage[reader]) not in labelled:
                labelled.add((value.name, stage[reader]))
                box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.9}
                text = bytes_text(value.num_bytes)
                axes.text(*bend, text, fontsize=6.5, ha="center", va="center", zorder=5, bbox=box)


def _draw_line(axes: Any, maker: Spot, reader: Spot, crosses: bool) -> tuple[float, float]:
    """From the bottom of one to the top of the other, round what is between; returns the middle, for a label."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    begin = (maker.column, maker.row + BOX[1] / 2)
    end = (reader.column, reader.row - BOX[1] / 2)
    if reader.row - maker.row <= 1:
        points = [begin, (begin[0], begin[1] + 0.2), (end[0], end[1] - 0.2), end]
        codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
    else:  # it passes other rows: beside them, through the gaps between rows and columns
        side, down, up = max(maker.column, reader.column) + 0.5, begin[1] + 0.4, end[1] - 0.4
        points = [begin, (side, begin[1] + 0.05), (side, begin[1] + 0.2), (side, down)]
        points += [(side, up), (side, end[1] - 0.2), (side, end[1] - 0.05), end]
        codes = [Curve.MOVETO, *([Curve.CURVE4] * 3), Curve.LINETO, *([Curve.CURVE4] * 3)]
        middle = (side, (begin[1] + end[1]) / 2)
    colour, width = (INK, 1.6) if crosses else (FAINT, 0.9)
    axes.add_patch(PathPatch(Curve(points, codes), fc="none", ec=colour, lw=width, zorder=2 if crosses else 1))
    return middle


def _title(plan: Placement, profile: Profile) -> str:
    crossing = sum(count for _, _, count in crossings(plan, profile))
    crossed = f"{plan.kind}, {bytes_text(crossing)} cross for each batch of {profile.batch_size}"
    text = f"{plan.model or 'model'}: {crossed if crossing else 'in one piece'}"
    if plan.predicted is not None and plan.predicted.batch_s:
        text += f"\npredicted: {plan.predicted.alone_s / plan.predicted.batch_s:.2f} times as fast as one machine"
    return text


def draw_schedule(table: Table, facts: ScheduleFacts, path: Path) -> bool:
    """A bar for each action, one row per machine, forwards light and backwards full; False: no matplotlib."""
    figure, axes = _figure(width=12, height=1.5 + 0.45 * len(table.rows))
    if figure is None:
        return False
    scale, unit = time_unit(facts.total_s)
    narrow = facts.total_s * scale / 160  # bars in which a digit does not fit
    for span in facts.spans:
        _draw_action(axes, span, table, scale, narrow if len(facts.spans) <= MOST_MARKED else float("inf"))
    axes.set_yticks([n + 0.5 for n in range(len(table.rows))], [f"machine {n}" for n in range(len(table.rows))])
    axes.set_ylim(len(table.rows), 0)
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
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=130)
    return True


def _draw_action(axes: Any, span: ActionSpan, table: Table, scale: float, narrow: float) -> None:
    begin, end, action = span.from_s * scale, span.to_s * scale, span.action
    if action.kind == "U":
        axes.plot([end, end], [span.machine + 0.04, span.machine + 0.96], color="black", linewidth=1.1, zorder=3)
        return
    colour = COLOURS[action.microbatch % len(COLOURS)]
    style = {"alpha": 0.55} if action.kind == "F" else {"alpha": 1.0}
    axes.broken_barh(
        [(begin, end - begin)], (span.machine + 0.1, 0.8), facecolors=colour, edgecolor=INK, linewidth=0.4, **style
    )
    if end - begin > narrow * len(str(action.microbatch)):
        several = table.num_stages > len(table.rows)  # then a microbatch passes a machine more than once
        text = (
            f"{action.microbatch}\n{'abcdefgh'[action.stage // len(table.rows) % 8]}"
            if several
            else str(action.microbatch)
        )
        axes.text((begin + end) / 2, span.machine + 0.5, text, ha="center", va="center", fontsize=7, linespacing=0.9)


def bytes_text(count: int) -> str:
    """In a unit that needs few digits: 512 B, 1.5 kB, 20 MB."""
    size, names = float(count), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(names) > 1:
        size /= 1000
        names.pop(0)
    return f"{size:.0f} {names[0]}" if size >= 100 or names[0] == "B" else f"{size:.1f} {names[0]}"


def time_unit(total_s: float) -> tuple[float, str]:
    """By what to multiply seconds, and what they are then."""
    if total_s < 1e-3:
        return 1e6, "microseconds"
    return (1e3, "milliseconds") if total_s < 10 else (1.0, "seconds")


def _machines(machines: tuple[int, ...]) -> str:
    """machine 3; machines 0-14; machines 0, 2, 4."""
    if len(machines) == 1:
        return f"machine {machines[0]}"
    if list(machines) == list(range(machines[0], machines[-1] + 1)):
        return f"machines {machines[0]}-{machines[-1]}"
    return f"machines {', '.join(map(str, machines))}"


def _short(text: str, most: int) -> str:
    """The end of a long name says more than its beginning."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure, (axes,) = figure_of(width, height, 1)
    return figure, axes


def figure_of(width: float, height: float, rows: int) -> tuple[Any, list[Any]]:
    """A figure of so many inches, and its axes below each other, over one axis of time; None: no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, [None] * rows
    figure = Figure(figsize=(min(60.0, width), min(120.0, height)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def _legend(axes: Any, names: list[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(fc=COLOURS[n % len(COLOURS)], ec=INK, lw=0.6, label=name) for n, name in enumerate(names)]
    axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=min(4, len(patches)), frameon=False, fontsize=8
    )
