"""The summary of a run that has ended: outcome, results, batch accounting, staleness, path of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rainband.coordinator.state import Target
from rainband.protocol.events import Progress, RunEnded
from rainband.views import predicted_stages as predicted
from rainband.views.event_text import bound
from rainband.views.forecast import forecast_line
from rainband.views.formatting import count, duration, short, size, table, whole
from rainband.views.history import RunSoFar
from rainband.views.warnings import warnings

WIDTH = 100  # longer lines are wrapped

# Why servers refused pushes, as the reports name it -> as people read it.
REFUSALS = {
    "overlaps": "partly accepted before",
    "revoked": "from revoked leases",
    "late": "after their round",
    "bad": "malformed",
    "early": "before their round",
    "wrong_server": "sent to another server",
}


def summary(so_far: RunSoFar, directory: Path) -> list[str]:
    """Return the lines that `train` and `runs show` print; none for a run that has not ended."""
    ended = so_far.ended
    if ended is None:
        return []
    model = directory / "model.safetensors"
    rows = [
        ("reason", "" if so_far.error or ended.outcome == "finished" else ended.reason),
        ("target", target(so_far)),
        ("result", results(ended.metrics)),
        *_rows(*_accounts(so_far, ended.accounting)),
        ("staleness", staleness(ended.staleness, bound(so_far))),
        ("traffic", traffic(so_far.last)),
        ("models", models(so_far.last)),
        *_rows("pipeline", predicted.lines(so_far)),
        ("auto", forecast_line(directory, ended.samples / so_far.training.seconds if so_far.training.seconds else 0.0)),
        ("model", str(model)) if model.is_file() else ("run", f"{directory} (it contains no model)"),
    ]
    if ended.checkpoint and ended.outcome != "finished":
        rows.append(("continue", f"rainband resume {directory}"))
    lines = table([row for row in rows if row[1]], indent="  ", width=WIDTH)
    return [
        headline(ended, so_far.training.seconds, so_far.is_virtual, so_far.restored_samples),
        *lines,
        *warnings(so_far),
    ]


def target(so_far: RunSoFar) -> str:
    """Return the time to the target, or that it was not reached; empty if there is none."""
    typed = so_far.started.target if so_far.started is not None else ""
    if not typed:
        return ""
    if so_far.target is None:
        metric, measured = typed.partition("=")[0], so_far.ended.metrics if so_far.ended is not None else {}
        unknown = f": no {metric} was measured, only {' and '.join(measured)}" if measured else ""
        late = ", except by the evaluation at the end: a smaller --eval-every finds out sooner"
        known = Target(metric, float(typed.partition("=")[2]))
        reached_late = known.is_reached({name: value for name, value in measured.items() if value is not None})
        return f"{typed} was not reached" + (unknown if metric not in measured else late * reached_late)
    reached = so_far.target
    after_s = reached.at_s - (so_far.training.began_s or 0.0)
    value = f"{reached.metric} {short(reached.value)} (target {typed.partition('=')[2]})"
    return f"{value} after {duration(after_s)} of training and {count(reached.samples, 'sample')}"


def _rows(title: str, lines: list[str]) -> list[tuple[str, str]]:
    return [("" if n else title, line) for n, line in enumerate(lines)]


def headline(ended: RunEnded, training_s: float, is_virtual: bool = False, restored: int = 0) -> str:
    """Return the outcome with duration and throughput; the throughput is that of the training time alone.

    `restored`: samples of a checkpoint, which took no time.
    """
    counts: Mapping[str, Any] = ended.accounting
    steps = counts.get("untracked_pushes", 0)
    done = count(steps, "step") if steps and not ended.samples else count(ended.samples, "sample")
    if ended.samples and (skipped := sum(counts.get("skipped", {}).values())):
        done += f" (with those of {count(skipped, 'skipped batch')})"
    after = f"{ended.outcome} after {duration(ended.seconds)}{' of simulated time' if is_virtual else ''}: {done}"
    number, unit = (ended.samples, "samples") if ended.samples else (steps, "steps")
    if not number or not training_s:
        return after
    return f"{after}, {short(max(0, number - restored) / training_s)} {unit}/s in {duration(training_s)} of training"


def results(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'not finite' if v is None else _figure(v)}" for name, v in metrics.items())


def accounting(counts: Mapping[str, Any], has_lost_nodes: bool = True) -> list[str]:
    """Return the batch accounting in words: applied, skipped, lost, applied twice, not processed."""
    if not counts:
        return []
    in_place = counts.get("lock_free") or counts.get("in_pairs")
    lines = _in_place(counts) if in_place else [_tracked(counts)]
    untracked, partially = counts.get("untracked_pushes"), counts.get("partially_applied")
    if untracked and not counts["batches"]:  # a custom training loop with its own data loader
        lines = []
    if untracked:
        partly = f", {whole(partially)} of them partially applied" if partially else ""
        lines.append(f"{count(untracked, 'step')} without batch IDs, counted by their senders{partly}")
    if not_processed := counts.get("not_processed"):
        lines.append(f"{whole(not_processed)} not processed before the run ended")
    if skipped := counts.get("skipped"):
        lines.append(f"{whole(sum(skipped.values()))} skipped: {_by_reason(skipped)}")
    # Custom training loops return leases when they end early: that is not worth a line.
    if has_lost_nodes and (reassigned := counts.get("reassigned")):
        lines.append(f"{count(reassigned, 'lease')} reassigned, because a worker was lost or inactive")
    lines += lost_residuals(counts)
    if refused := counts.get("refused"):
        lines.append(f"{count(sum(refused.values()), 'push')} refused: {_by_reason(refused, REFUSALS)}")
    return lines


def lost_residuals(counts: Mapping[str, Any]) -> list[str]:
    """Return a line about what codecs had not sent when their workers ended; none if all was sent."""
    if not (residuals := counts.get("lost_residuals")):
        return []
    norm = short(math.sqrt(sum(residual**2 for residual in residuals)))
    return [f"what the codecs of {count(len(residuals), 'worker')} had not sent is lost: norm {norm}"]


def _accounts(so_far: RunSoFar, counts: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the unit that was counted, batches or samples, and the counts."""
    if samples := counts.get("samples"):
        lines = shared(samples, so_far.started.num_workers if so_far.started else 1)
        return "samples", lines + lost_residuals(counts)
    return "batches", accounting(counts, bool(so_far.num_lost))


def shared(samples: Mapping[str, Any], num_workers: int) -> list[str]:
    """Return the sample accounting of a loop whose workers shared each batch."""
    skipped, rounds = samples["skipped"], count(samples["rounds"], "batch")
    done = samples["applied"] + sum(skipped.values()) + samples["not_seen"]
    if not done:  # the loop has its own data loader
        return [f"{rounds}; samples are not counted, because the loop has its own data loader"]
    of_all = f" of {whole(samples['total'])}" if samples["total"] else ""
    lines = [f"{whole(samples['applied'])}{of_all} applied in {rounds}, which the workers shared"]
    if skipped:
        lines.append(f"{whole(sum(skipped.values()))} skipped: {_by_reason(skipped)}")
    if carried := samples["carried_over"]:
        lines.append(
            f"{whole(carried)} moved to a later batch: a worker was lost or inactive, or had left out its part of the "
            "batch before, on which others stepped"
        )
    if samples["not_seen"]:
        lines.append(f"{whole(samples['not_seen'])} of a lost worker not seen, because their pass ended")
    if samples["total"] > done:
        lines.append(f"{whole(samples['total'] - done)} not processed before the run ended")
    if drifted := samples["drifted"]:
        lines.append(f"{count(drifted, 'time')} a worker's parameters differed, and were replaced")
    if (returned := samples["transfers"] - drifted - num_workers + 1) > 0:
        lines.append(f"{count(returned, 'time')} a worker that returned or had left out a step received the state")
    return lines


def _tracked(counts: Mapping[str, Any]) -> str:
    applied = f"{whole(counts['applied'])} of {whole(counts['batches'])} applied"
    return f"{applied}, {whole(counts['lost'])} lost, {whole(counts['applied_twice'])} applied twice"


def _in_place(counts: Mapping[str, Any]) -> list[str]:
    """Return the counts of runs whose workers update parameters in memory that they share."""
    applied = f"{whole(counts['applied'])} of {whole(counts['batches'])} applied"
    partially = counts.get("partially_applied")
    partly = f", {whole(partially)} partially applied, because their worker was lost" if partially else ""
    lines = [f"{applied}, {whole(counts['applied_twice'])} applied twice{partly}"]
    if counts.get("lock_free"):
        lines.append("hogwild takes no locks, so updates that overwrote each other cannot be counted")
    return lines


def staleness(measured: Mapping[str, Any], bound: str = "") -> str:
    if not measured.get("histogram"):
        return ""
    return f"mean {short(measured['mean'])}, max {measured['max']} updates{bound}"


def traffic(last: Progress | None) -> str:
    """Return the bytes sent to the servers and received from them, or, with a codec, to other workers."""
    if last is None or not last.pushed_bytes:
        sent = sum(last.sent_bytes.values()) if last is not None else 0
        if last is None or not sent or not last.saved_bytes or last.disagreement is not None:
            return ""
        plain = sent + last.saved_bytes
        return f"{size(sent)} exchanged for {size(plain)} of values ({short(plain / sent)} times less)"
    pulled = f"{size(last.pulled_bytes)} of parameters pulled"
    if not last.saved_bytes:
        return f"{size(last.pushed_bytes)} of gradients pushed, {pulled}"
    plain = last.pushed_bytes + last.saved_bytes
    return (
        f"{size(last.pushed_bytes)} pushed for {size(plain)} of gradients ({short(plain / last.pushed_bytes)} times "
        f"less), {pulled}"
    )


def models(last: Progress | None) -> str:
    """Return what workers with models of their own have exchanged, and how far the models were apart."""
    if last is None or last.disagreement is None:
        return ""
    sent = sum(last.sent_bytes.values())
    fewer = f" ({short(last.saved_bytes / sent + 1)} times less)" if sent and last.saved_bytes else ""
    return f"{size(sent)} exchanged{fewer}; disagreement {short(last.disagreement)}, their distance from the mean"


def _by_reason(counts: Mapping[str, int], names: Mapping[str, str] | None = None) -> str:
    by_count = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{whole(number)} {(names or {}).get(reason, reason)}" for reason, number in by_count)


def _figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
