"""A comparison as a table in the terminal, and as a record for programs."""

from __future__ import annotations

from typing import Any

from rainband.views.compare.judge import Comparison, Entrant, seconds_text, verdict
from rainband.views.formatting import count, short, size, table, whole


def lines_of(comparison: Comparison, width: int = 0) -> list[str]:
    """Return the table with the four judgements, and the verdict."""
    target = comparison.target
    head = ["", *([f"time to {target}", "samples", "updates"] if target else []), f"final {comparison.metric}"]
    head += ["spread", "own settings", "CPU", "bytes", "start"]
    rows = [tuple(head), *(tuple(row_of(one, comparison)) for one in comparison.ranked())]
    return [*table(rows), "", *(f"- {sentence}" for sentence in verdict(comparison))]


def row_of(one: Entrant, comparison: Comparison) -> list[str]:
    """Return the row of a contender as texts."""
    row = [one.name]
    if comparison.target:
        seeds = "" if one.always_reached else f" ({len(one.hits)} of {len(one.runs)})"
        row += [
            time_of(one) + seeds,
            "-" if one.samples_needed is None else whole(one.samples_needed),
            "-" if one.updates_needed is None else whole(one.updates_needed),
        ]
    row += [
        "-" if one.final is None else f"{one.final:.4g}",
        "-" if one.spread is None else short(one.spread),
        str(len(one.own_settings)) + (f", {count(len(one.tuning.tried), 'lr')} tried" if one.tuning else ""),
        seconds_text(one.middle("cpu_s")) if one.middle("cpu_s") else "-",
        size(one.middle("num_bytes")) if one.counts_bytes else "-",
        "-" if one.virtual else seconds_text(one.middle("start_s")),
    ]
    return row


def time_of(one: Entrant) -> str:
    """Return the median time to the target, with the range over seeds."""
    if one.time is None:
        return "not reached"
    within = max(run.reached.within_s for run in one.hits if run.reached)
    if len(one.times) > 1:
        return f"{seconds_text(one.time)} ({seconds_text(one.times[0])} to {seconds_text(one.times[-1])})"
    return f"{seconds_text(one.time)} (-{seconds_text(within)})"


def as_record(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for programs."""
    target = comparison.target
    return {
        "task": comparison.task,
        "target": {"metric": target.metric, "value": target.value} if target else None,
        "resolution": comparison.resolution,
        "verdict": verdict(comparison),
        "contenders": [
            {
                "name": one.name,
                "seconds": one.times,
                "samples": one.samples_needed,
                "updates": one.updates_needed,
                "finals": one.finals,
                "own_settings": one.own_settings,
                "cpu_s": one.middle("cpu_s"),
                "bytes": one.middle("num_bytes"),
                "start_s": one.middle("start_s"),
                "samples_per_s": one.middle("per_s"),
                "tuning": vars(one.tuning) if one.tuning else None,
                "runs": [str(run.directory) for run in one.runs],
            }
            for one in comparison.ranked()
        ],
    }
