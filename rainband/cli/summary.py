"""What a run came to, for people: its end, its results, its books, its staleness, where the model lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rainband.cli.words import count, duration, short, table, whole
from rainband.events import RunEnded

WIDTH = 100  # of the longest line, where a reason has to be wrapped


def summary(ended: RunEnded, directory: Path, why_was_told: bool = False) -> list[str]:
    """The lines printed at the end of `train` and by `runs show`."""
    model = directory / "model.safetensors"
    rows = [
        ("why", "" if why_was_told or ended.outcome == "finished" else ended.reason),
        ("result", results(ended.metrics)),
        *(("books" if n == 0 else "", line) for n, line in enumerate(books(ended.books))),
        ("staleness", staleness(ended.staleness)),
        ("model", str(model)) if model.is_file() else ("run", f"{directory} (no model was saved)"),
    ]
    return [headline(ended), *table([row for row in rows if row[1]], indent="  ", width=WIDTH)]


def headline(ended: RunEnded) -> str:
    rate = f", {short(ended.samples / ended.seconds)} samples/s" if ended.seconds and ended.samples else ""
    return f"{ended.outcome} after {duration(ended.seconds)}: {count(ended.samples, 'sample')}{rate}"


def results(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'not finite' if v is None else _figure(v)}" for name, v in metrics.items())


def books(kept: Mapping[str, Any]) -> list[str]:
    """Every batch was applied, or skipped with a reason; nothing was lost, nothing came twice."""
    if not kept:
        return []
    lines = [
        f"{whole(kept['applied'])} of {count(kept['batches'], 'batch')} applied to every block, "
        f"{whole(kept['lost'])} lost, {whole(kept['twice'])} twice"
    ]
    if not kept["batches"] and kept.get("extras"):  # a loader of the user's own
        lines = []
    if extras := kept.get("extras"):
        torn = f", {whole(kept['torn'])} of them on some blocks only" if kept.get("torn") else ""
        lines.append(f"{count(extras, 'step')} without a batch of the run, counted by their senders{torn}")
    if not_done := kept.get("not_done"):
        lines.append(f"{whole(not_done)} not done: the run ended before their turn")
    if skipped := kept.get("skipped"):
        lines.append(f"{whole(sum(skipped.values()))} skipped: {_by_reason(skipped)}")
    if again := kept.get("leased_again"):
        lines.append(f"{count(again, 'portion')} leased again, after a worker was lost or late")
    if refused := kept.get("refused"):
        lines.append(f"{count(sum(refused.values()), 'push')} refused: {_by_reason(refused)}")
    return lines


def staleness(measured: Mapping[str, Any]) -> str:
    if not measured.get("histogram"):
        return ""
    return f"{short(measured['mean'])} updates in the mean, {measured['max']} at most"


def _by_reason(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{whole(n)} {reason}" for reason, n in sorted(numbers.items(), key=lambda x: -x[1]))


def _figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
