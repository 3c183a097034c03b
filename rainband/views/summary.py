"""What a run came to, for people: its end, its results, its books, its staleness, where the model lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rainband.protocol.events import Progress, RunEnded
from rainband.views import event_text as sentences
from rainband.views import predicted_stages as predicted
from rainband.views.formatting import count, duration, short, size, table, whole
from rainband.views.history import RunSoFar
from rainband.views.warnings import warnings

WIDTH = 100  # of the longest line, where a reason has to be wrapped


def summary(so_far: RunSoFar, directory: Path) -> list[str]:
    """The lines printed at the end of `train` and by `runs show`; none of a run that has no end."""
    ended = so_far.ended
    if ended is None:
        return []
    model = directory / "model.safetensors"
    why_was_told = so_far.error is not None
    rows = [
        ("why", "" if why_was_told or ended.outcome == "finished" else ended.reason),
        ("result", results(ended.metrics)),
        *(
            ("batches" if n == 0 else "", line)
            for n, line in enumerate(accounting(ended.accounting, bool(so_far.losses)))
        ),
        ("staleness", staleness(ended.staleness, sentences.bound(so_far))),
        ("traffic", traffic(so_far.last)),
        *(("pipeline" if n == 0 else "", line) for n, line in enumerate(predicted.lines(so_far))),
        ("model", str(model)) if model.is_file() else ("run", f"{directory} (no model was saved)"),
    ]
    lines = table([row for row in rows if row[1]], indent="  ", width=WIDTH)
    return [headline(ended, so_far.training.seconds, so_far.is_virtual), *lines, *warnings(so_far)]


def headline(ended: RunEnded, training_s: float, is_virtual: bool = False) -> str:
    """How long it took, and how fast it was while it trained."""
    kept: Mapping[str, Any] = ended.accounting
    steps = kept.get("untracked_pushes", 0)
    done = count(steps, "step") if steps and not ended.samples else count(ended.samples, "sample")
    after = f"{ended.outcome} after {duration(ended.seconds)}{' of virtual time' if is_virtual else ''}: {done}"
    number, unit = (ended.samples, "samples") if ended.samples else (steps, "steps")
    if not number or not training_s:
        return after
    return f"{after}, {short(number / training_s)} {unit}/s in {duration(training_s)} of training"


def results(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'not finite' if v is None else _figure(v)}" for name, v in metrics.items())


def accounting(kept: Mapping[str, Any], someone_was_lost: bool = True) -> list[str]:
    """Every batch was applied, or skipped with a reason; nothing was lost, nothing came twice."""
    if not kept:
        return []
    lines = [
        f"{whole(kept['applied'])} of {whole(kept['batches'])} applied, {whole(kept['lost'])} lost, "
        f"{whole(kept['applied_twice'])} applied twice"
    ]
    if kept.get("lock_free"):
        lines = _unlocked(kept)
    if not kept["batches"] and kept.get("untracked_pushes"):  # a loader of the user's own
        lines = []
    if untracked_pushes := kept.get("untracked_pushes"):
        partially_applied = (
            f", {whole(kept['partially_applied'])} of them on some blocks only" if kept.get("partially_applied") else ""
        )
        lines.append(
            f"{count(untracked_pushes, 'step')} without a batch of the run, counted by their senders{partially_applied}"
        )
    if not_processed := kept.get("not_processed"):
        lines.append(f"{whole(not_processed)} not done: the run ended before their turn")
    if skipped := kept.get("skipped"):
        lines.append(f"{whole(sum(skipped.values()))} skipped: {_by_reason(skipped)}")
    # Loops that end early give portions back, which is no news.
    if someone_was_lost and (again := kept.get("reassigned")):
        lines.append(f"{count(again, 'portion')} leased again, after a worker was lost or late")
    if refused := kept.get("refused"):
        lines.append(f"{count(sum(refused.values()), 'push')} refused: {_by_reason(refused)}")
    return lines


def _unlocked(kept: Mapping[str, Any]) -> list[str]:
    """Of steps that workers add to one memory themselves."""
    done = f"{whole(kept['applied'])} of {count(kept['batches'], 'batch')} added to one memory"
    partially_applied = (
        f", {whole(kept['partially_applied'])} cut short by the loss of a worker"
        if kept.get("partially_applied")
        else ""
    )
    return [
        f"{done}, {whole(kept['applied_twice'])} twice{partially_applied}",
        "if additions have overwritten each other is not known: there are no locks",
    ]


def staleness(measured: Mapping[str, Any], bound: str = "") -> str:
    if not measured.get("histogram"):
        return ""
    return f"mean {short(measured['mean'])}, max {measured['max']} updates{bound}"


def traffic(last: Progress | None) -> str:
    """What went through the servers; nothing where there are none."""
    if last is None or not last.pushed_bytes:
        return ""
    return f"{size(last.pushed_bytes)} of gradients to the servers, {size(last.pulled_bytes)} of parameters from them"


def _by_reason(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{whole(n)} {reason}" for reason, n in sorted(numbers.items(), key=lambda x: -x[1]))


def _figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
