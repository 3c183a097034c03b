"""Charts made of characters: bars, histograms, curves, spark lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rainband.views.formatting import short, whole


@dataclass(frozen=True)
class Ink:
    """The characters to draw with."""

    eighths: str  # a bar's last character, from nearly nothing to full
    levels: str  # of a spark line, from low to high
    track: str  # the empty part of a progress bar
    dot: str
    wall: str
    floor: str
    corner: str


BLOCKS = Ink(eighths="▏▎▍▌▋▊▉█", levels="▁▂▃▄▅▆▇█", track="░", dot="•", wall="│", floor="─", corner="└")
ASCII = Ink(eighths="#", levels="_.-=*#", track=".", dot="*", wall="|", floor="-", corner="+")


def ink_for(encoding: str | None) -> Ink:
    """Return block characters if the encoding has them, otherwise ASCII."""
    try:
        "".join(vars(BLOCKS).values()).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def bar(share: float, width: int, ink: Ink = BLOCKS) -> str:
    """Draw a bar over a fraction of `width` characters; any share above 0 is visible."""
    steps = len(ink.eighths)
    parts = round(min(1.0, max(0.0, share)) * width * steps)
    if share > 0:
        parts = max(1, parts)
    full, rest = divmod(parts, steps)
    return ink.eighths[-1] * full + (ink.eighths[rest - 1] if rest else "")


def progress_bar(share: float, width: int, ink: Ink = BLOCKS) -> str:
    """Draw a bar of `width` characters, full only at share 1."""
    done = min(width, int(min(1.0, max(0.0, share)) * width))
    return ink.eighths[-1] * done + ink.track * (width - done)


def spark(values: Sequence[float], width: int, ink: Ink = BLOCKS) -> str:
    """Plot values as a curve that is one line high."""
    if not values or width < 1:
        return ""
    columns = _columns(values, width)
    low, high = min(columns), max(columns)
    top = len(ink.levels) - 1
    return "".join(ink.levels[round((v - low) / (high - low) * top) if high > low else 0] for v in columns)


def histogram(counts: Mapping[int, int], width: int, ink: Ink = BLOCKS, max_rows: int = 16) -> list[str]:
    """Draw one bar for each value, or for each range of values where there are many."""
    if not counts:
        return []
    last = max(counts)
    step = -(-(last + 1) // max_rows)
    rows = [
        (low, low + step - 1, sum(n for value, n in counts.items() if low <= value < low + step))
        for low in range(0, last + 1, step)
    ]
    names = [f"{low}" if step == 1 else f"{low}-{high}" for low, high, _ in rows]
    numbers = [whole(n) for _, _, n in rows]
    left, right = max(map(len, names)), max(map(len, numbers))
    room = max(4, width - left - right - 3)
    highest = max(n for _, _, n in rows)
    return [
        f"{name:>{left}} {ink.wall}{bar(n / highest, room, ink):<{room}} {number:>{right}}".rstrip()
        for name, number, (_, _, n) in zip(names, numbers, rows, strict=True)
    ]


def curve(points: Sequence[tuple[float, float]], width: int, height: int = 10, ink: Ink = BLOCKS) -> list[str]:
    """Plot points (x, y), with x from left to right."""
    if len(points) < 2:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = {0: short(high), height - 1: short(low)}
    left = max(map(len, labels.values()))
    room = max(10, width - left - 2)
    (first, _), (last, _) = points[0], points[-1]
    texts: dict[tuple[int, int], str] = {}
    for x, y in points:
        column = round((x - first) / (last - first) * (room - 1)) if last > first else 0
        row = round((high - y) / (high - low) * (height - 1)) if high > low else 0
        texts[row, column] = ink.dot
    lines = [
        f"{labels.get(row, ''):>{left}} {ink.wall}" + "".join(texts.get((row, c), " ") for c in range(room))
        for row in range(height)
    ]
    begin, end = (whole(x) if last >= 10 else short(x) for x in (first, last))
    ends = f"{begin}{end:>{max(1, room - len(begin))}}"
    return [
        *(line.rstrip() for line in lines),
        " " * (left + 1) + ink.corner + ink.floor * room,
        " " * (left + 2) + ends,
    ]


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Reduce values to at most `width` means of neighbors."""
    number = min(width, len(values))
    edges = [len(values) * k // number for k in range(number + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
