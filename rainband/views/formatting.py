"""Format numbers, durations, counts and tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def whole(number: float) -> str:
    """Format an integer with separators: 28,740."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Format a number with three significant digits: 0.0325, 1.07, 412, 28,740, 1.2e-07."""
    if number != 0 and abs(number) < 1e-4:
        return f"{number:.1e}"
    if abs(number) >= 1000:
        return whole(number)
    return f"{number:.3g}"


def percent(share: float) -> str:
    """Format a fraction, rounded down, so that 100 % means all."""
    return f"{int(share * 100)} %"


def duration(seconds: float) -> str:
    """Format seconds in at most two units: 44 ms, 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if 0 < seconds < 0.095:
        return f"{max(0.001, seconds) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def size(num_bytes: float) -> str:
    """Format bytes in powers of 1000: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def count(number: int, thing: str) -> str:
    """Format a number of things with the plural: 1 batch, 2 batches, 4 workers."""
    plural = thing + ("es" if thing.endswith(("tch", "sh")) else "s")
    return f"{whole(number)} {thing if number == 1 else plural}"


def assignment(name: str, value: object) -> str:
    """Format a setting as it would be typed: overlap=true, local_lr=none, betas=0.9,0.99."""
    if isinstance(value, tuple | list):
        return f"{name}={','.join(map(str, value))}"
    return f"{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` characters, ending in … if it was longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def table(rows: Iterable[Sequence[str]], indent: str = "", gap: str = "  ", width: int = 0) -> list[str]:
    """Align rows in columns; with a width, wrap the last column to fit."""
    rows = [list(row) for row in rows]
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines: list[str] = []
    for row in rows:
        head = indent + "".join(text.ljust(w) + gap for text, w in zip(row, widths, strict=False))
        room = max(20, width - len(head)) if width else 0
        tail = (
            textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) if room else [row[-1]]
        ) or [""]
        lines.append((head + tail[0]).rstrip())
        lines += [" " * len(head) + line for line in tail[1:]]
    return lines
