"""Gantt chart: a row per machine or node, a bar per stretch of its time; needs matplotlib (rainband[plots])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

INK = "#222222"
COLORS = ("#8fb8de", "#f2c879", "#9fd3a8", "#e8a191", "#b9a5d9", "#c4c4c4", "#e5b3c9", "#8ccfcf", "#d3cf8c", "#d9b08c")
MAX_LABELS = 40  # of rows


class Style(NamedTuple):
    """The look of a bar."""

    color: str
    low: float = 0.1  # lower edge, as a fraction of the row
    height: float = 0.8
    edge: str = INK
    line_width: float = 0.4
    alpha: float = 1.0
    hatch: str = ""


class Bar(NamedTuple):
    """A stretch of a row's time."""

    row: int
    from_s: float
    to_s: float
    style: Style
    text: str = ""


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def draw_bars(axes: Any, bars: Sequence[Bar], rows: Sequence[str], scale: float = 1.0, narrow_s: float = 0.0) -> None:
    """Draw the bars and name the rows; the first row is at the top.

    `scale`: units of the time axis per second. A text is omitted in bars shorter than `narrow_s` per character.
    """
    groups: dict[tuple[int, Style], list[tuple[float, float]]] = {}
    for bar in bars:
        groups.setdefault((bar.row, bar.style), []).append((bar.from_s * scale, (bar.to_s - bar.from_s) * scale))
    for (row, style), stretches in groups.items():
        axes.broken_barh(
            stretches,
            (row + style.low, style.height),
            facecolors=style.color,
            edgecolor=style.edge,
            linewidth=style.line_width,
            alpha=style.alpha,
            hatch=style.hatch,
            zorder=2,
        )
    for bar in bars:
        width_s = bar.to_s - bar.from_s
        if bar.text and width_s > narrow_s * max(map(len, bar.text.split("\n"))):
            middle = (bar.from_s + width_s / 2) * scale
            axes.text(middle, bar.row + 0.5, bar.text, ha="center", va="center", fontsize=7, linespacing=0.9, zorder=4)
    named = range(0, len(rows), max(1, math.ceil(len(rows) / MAX_LABELS)))
    axes.set_yticks([row + 0.5 for row in named], [rows[row] for row in named])
    axes.set_ylim(len(rows), 0)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def figure_of(width: float, height: float, ratios: Sequence[float] = (1.0,)) -> tuple[Any, list[Any]]:
    """Return a figure of this size in inches, and axes below each other over one time axis; None: no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None, [None] * len(ratios)
    figure = Figure(figsize=(min(60.0, width), min(120.0, height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=list(ratios))
    return figure, list(axes[:, 0])


def time_unit(total_s: float) -> tuple[float, str]:
    """Return the factor from seconds to a unit that needs few digits, and its name."""
    if total_s < 1e-3:
        return 1e6, "microseconds"
    return (1e3, "milliseconds") if total_s < 10 else (1.0, "seconds")
