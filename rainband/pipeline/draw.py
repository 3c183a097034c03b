"""Plans and schedules as pictures; needs matplotlib (rainband[plots])."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rainband.pipeline.check import Facts
from rainband.pipeline.plan import Plan
from rainband.pipeline.profile import Profile
from rainband.pipeline.table import Table

COLOURS = ("#2f6f9f", "#e3b23c", "#4c9f70", "#b5482a", "#6a4c93", "#8a8a8a", "#c06c84", "#355c7d")


def draw_plan(plan: Plan, profile: Profile, path: Path) -> bool:
    """Units coloured by stage, lines where values go, thick and with bytes where they cross; False: no matplotlib."""
    figure, axes = _figure(width=10, height=1.5 + 0.35 * _depth(profile))
    if figure is None:
        return False
    stage, place = plan.stage_of(), _positions(profile)
    for value in profile.values:
        for reader in value.readers:
            crosses = stage[reader] != stage[value.maker]
            xs, ys = zip(place[value.maker], place[reader], strict=True)
            axes.plot(xs, ys, color="#333333" if crosses else "#bbbbbb", linewidth=1.8 if crosses else 0.8, zorder=1)
            if crosses:
                middle = (sum(xs) / 2, sum(ys) / 2)
                axes.annotate(f"{value.num_bytes / 1000:,.1f} kB", middle, fontsize=7, ha="left", va="center")
    for unit in profile.units:
        x, y = place[unit.name]
        colour = COLOURS[stage[unit.name] % len(COLOURS)]
        axes.scatter([x], [y], s=140, color=colour, zorder=2)
        axes.annotate(
            f"{unit.name}  {unit.what}", (x, y), xytext=(9, 0), textcoords="offset points", fontsize=7, va="center"
        )
    _legend(axes, [f"stage {n}: machine {', '.join(map(str, s.machines))}" for n, s in enumerate(plan.stages)])
    axes.margins(0.15)
    axes.axis("off")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
    return True


def draw_schedule(table: Table, facts: Facts, path: Path) -> bool:
    """A bar for each action: one row per machine, forwards light, backwards full; False: no matplotlib."""
    figure, axes = _figure(width=12, height=1.2 + 0.4 * len(table.rows))
    if figure is None:
        return False
    for span in facts.spans:
        if span.action.kind == "U":
            continue
        colour = COLOURS[span.action.micro % len(COLOURS)]
        bar = [(span.from_s, span.to_s - span.from_s)]
        light = 0.55 if span.action.kind == "F" else 1.0
        axes.broken_barh(
            bar, (span.machine + 0.1, 0.8), facecolors=colour, alpha=light, edgecolor="white", linewidth=0.5
        )
        if len(facts.spans) <= 400:
            centre = (span.from_s + span.to_s) / 2
            axes.text(centre, span.machine + 0.5, str(span.action.micro), ha="center", va="center", fontsize=7)
    axes.set_yticks([n + 0.5 for n in range(len(table.rows))], [f"machine {n}" for n in range(len(table.rows))])
    axes.set_ylim(len(table.rows), 0)
    axes.set_xlabel(f"seconds; {table.name}, idle {facts.bubble:.1%}")
    figure.savefig(path, dpi=120)
    return True


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, None
    figure = Figure(figsize=(width, min(60.0, height)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _legend(axes: Any, names: list[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(names)]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=min(4, len(patches)), frameon=False)


def _levels(profile: Profile) -> dict[str, int]:
    """How many units must compute before each."""
    level = dict.fromkeys(profile.names, 0)
    for name in profile.names:
        before = [value.maker for value in profile.values if name in value.readers]
        level[name] = max((level[maker] + 1 for maker in before), default=0)
    return level


def _depth(profile: Profile) -> int:
    return max(_levels(profile).values()) + 1


def _positions(profile: Profile) -> dict[str, tuple[float, float]]:
    """One row for each level; units of a level beside each other."""
    levels = _levels(profile)
    rows: dict[int, list[str]] = {}
    for name in profile.names:
        rows.setdefault(levels[name], []).append(name)
    return {
        name: (column - (len(row) - 1) / 2, float(level))
        for level, row in rows.items()
        for column, name in enumerate(row)
    }
