"""A model in stages: the predicted training speed next to the measured one."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from rainband.views.formatting import percent, short, size, table
from rainband.views.history import RunSoFar


class StageRow(NamedTuple):
    """The time and traffic of all workers of a stage, per batch."""

    compute_s: float
    waited_s: float
    other_s: float  # reading data, sending, updates
    sent_bytes: float


class MeasuredStages(NamedTuple):
    samples_per_s: float
    busy: float  # fraction of the workers' time in which they computed
    stages: tuple[StageRow, ...]


def measured(so_far: RunSoFar) -> MeasuredStages | None:
    """Return the speed from the workers' reports; None before the end, or if a worker was lost."""
    predicted, last, training_s = so_far.predicted, so_far.last, so_far.training.seconds
    if predicted is None or last is None or not training_s or not last.batches_done:
        return None
    num_workers = [stage.workers for stage in predicted.stages]
    if not last.computed_s or sorted(last.computed_s) != list(
        range(len(last.computed_s) // sum(num_workers) * sum(num_workers))
    ):
        return None
    stage_of = [number for number, workers in enumerate(num_workers) for _ in range(workers)]
    sums = [[0.0, 0.0, 0.0, 0.0] for _ in num_workers]
    for worker, compute_s in last.computed_s.items():
        total, waited_s = sums[stage_of[worker % sum(num_workers)]], last.waited_s.get(worker, 0.0)
        rest_s = max(0.0, training_s - compute_s - waited_s)
        for place, value in enumerate((compute_s, waited_s, rest_s, last.sent_bytes.get(worker, 0))):
            total[place] += value / last.batches_done
    return MeasuredStages(
        samples_per_s=last.samples_done / training_s,
        busy=sum(last.computed_s.values()) / (training_s * len(last.computed_s)),
        stages=tuple(StageRow(*total) for total in sums),
    )


def lines(so_far: RunSoFar) -> list[str]:
    """Return the lines for the end of a run; none if every worker computed the whole model."""
    predicted, seen = so_far.predicted, measured(so_far)
    if predicted is None:
        return []
    said = f"predicted {short(predicted.samples_per_s)} samples/s (busy {percent(predicted.busy)})"
    if seen is None:
        return [said]
    head = f"{said}, measured {short(seen.samples_per_s)} samples/s (busy {percent(seen.busy)})"
    rows: list[tuple[str, ...]] = [("a batch", "computes", "predicted", "waits", "else", "sends", "predicted")]
    for number, (stage, expected) in enumerate(zip(seen.stages, predicted.stages, strict=True)):
        name = f"stage {number}" + (f", {expected.workers} workers" if expected.workers > 1 else "")
        times = [_ms(s) for s in (stage.compute_s, expected.compute_s, stage.waited_s, stage.other_s)]
        rows.append((name, *times, size(stage.sent_bytes), size(expected.sent_bytes)))
    left_out = [f"the prediction leaves out {_listed(predicted.left_out)}"] if predicted.left_out else []
    return [head, *table(rows), *left_out]


def as_facts(so_far: RunSoFar) -> dict[str, Any] | None:
    """Return the numbers as a dictionary; None if every worker computed the whole model."""
    if so_far.predicted is None:
        return None
    seen = measured(so_far)
    fields: dict[str, Any] = msgspec.to_builtins(so_far.predicted)
    of_run = None
    if seen is not None:
        of_run = {**seen._asdict(), "stages": [stage._asdict() for stage in seen.stages]}
    return {"predicted": {k: v for k, v in fields.items() if k not in ("event", "at_s")}, "measured": of_run}


def _ms(seconds: float) -> str:
    return f"{short(seconds * 1e3)} ms"


def _listed(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
