"""The schedule of a model in stages: some batches as measured, and below them as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from rainband.model_parallel.drawing.gantt import INK, Bar, Style, color_of, draw_bars, figure_of, time_unit
from rainband.model_parallel.schedules.forecast import NEVER_FLUSHED, Forecast, ForecastSpan
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.stage_forecast import forecast_of
from rainband.views.history import PastRun
from rainband.views.spans import Span

ACTIONS = 16  # of the first worker in the picture, or a whole batch
WAIT = "wait"
WAITING = Style("#f4e6bd", low=0.3, height=0.4, line_width=0.0)
MAX_ROWS = 16
NARROW = 180  # characters that fit into the width of the picture


@dataclass(frozen=True)
class Excerpt:
    """Some batches of the first replica of the model. Times count from the start of the first of them."""

    begin_s: float
    measured: list[ForecastSpan]  # also waits, with the label "wait"
    predicted: list[ForecastSpan]
    size: int  # workers of a replica
    replicas: int
    batches: int


def excerpt(run: PastRun, spans: Sequence[Span]) -> Excerpt | None:
    """Return batches of typical length; None if the model was not in stages, or nothing was predicted."""
    forecast = _forecast(run)
    if forecast is None:
        return None
    size = sum(share.workers for share in forecast.shares)
    mine = _own(spans, size)
    first_stage = forecast.shares[0].workers
    if forecast.schedule in NEVER_FLUSHED:
        begins = _of_batches(mine, first_stage)
    else:
        begins = list(enumerate(_begins([span for span in mine if span.rank == 0 and span.label != WAIT])))
    if len(begins) < 2:
        return None
    wanted = min(len(begins) - 1, max(1, ACTIONS // (2 * forecast.microbatches)))
    at = _typical([begins[n + wanted][1] - begins[n][1] for n in range(len(begins) - wanted)])
    (first, begin_s), (_, end_s) = begins[at], begins[at + wanted]
    return Excerpt(
        begin_s=begin_s,
        measured=[_shifted(span, -begin_s) for span in mine if begin_s <= span.from_s < end_s],
        predicted=_with_waits(forecast.spans(wanted, first)),
        size=size,
        replicas=run.config["num_workers"] // size,
        batches=wanted,
    )


def _forecast(run: PastRun) -> Forecast | None:
    if run.so_far.predicted is None:
        return None
    try:
        config = msgspec.convert(run.config, RunConfig)
        model = _simulated(run.directory) if run.so_far.is_virtual else None
    except (OSError, msgspec.MsgspecError):  # the run was killed, or written by another version
        return None
    return forecast_of(config, run.so_far.predicted.schedule, model)


def _simulated(directory: Path) -> ClusterModel:
    return msgspec.convert(msgspec.json.decode((directory / "simulation.json").read_bytes())["model"], ClusterModel)


def _own(spans: Sequence[Span], size: int) -> list[ForecastSpan]:
    """Return what the workers of the first replica computed and waited for, in order of time."""
    ranks = {f"worker {rank}": rank for rank in range(size)}
    own = [
        ForecastSpan(ranks[span.node], span.label or WAIT, span.from_s, span.to_s)
        for span in spans
        if span.node in ranks and (span.label or span.what == WAIT)
    ]
    return sorted(own, key=lambda span: (span.from_s, span.to_s))


def _begins(first: Sequence[ForecastSpan]) -> list[float]:
    """Return when batches begin: with the forward of microbatch 0 after the last backward of the batch before."""
    before = ["B", *(span.label for span in first)]
    return [s.from_s for s, last in zip(first, before, strict=False) if s.label == "F0" and last.startswith("B")]


def _typical(lengths_s: Sequence[float]) -> int:
    """Return the index of the length closest to the median; of several, the one next to the middle."""
    usual_s, middle = median(lengths_s), len(lengths_s) // 2
    return min(range(len(lengths_s)), key=lambda n: (round(abs(lengths_s[n] / usual_s - 1), 6), abs(n - middle)))


def _of_batches(mine: Sequence[ForecastSpan], first_stage: int) -> list[tuple[int, float]]:
    """Return (number, start of its forward) of each batch of a pipeline that is never flushed."""
    return [(int(s.label[1:]), s.from_s) for s in mine if s.rank < first_stage and s.label.startswith("F")]


def _shifted(span: ForecastSpan, by_s: float) -> ForecastSpan:
    return span._replace(from_s=span.from_s + by_s, to_s=span.to_s + by_s)


def _with_waits(spans: Sequence[ForecastSpan]) -> list[ForecastSpan]:
    """Add the waits of predicted workers: the time in which they do nothing else."""
    found = list(spans)
    end_s = max(span.to_s for span in spans)
    for rank in {span.rank for span in spans}:
        own = sorted((span for span in spans if span.rank == rank), key=lambda span: span.from_s)
        edges = [ForecastSpan(rank, "", 0.0, 0.0), *own, ForecastSpan(rank, "", end_s, end_s)]
        found += [ForecastSpan(rank, WAIT, a.to_s, b.from_s) for a, b in pairwise(edges) if b.from_s > a.to_s]
    return found


def predicted_spans(seen: Excerpt) -> list[Span]:
    """Return the prediction as spans of additional nodes, for the trace."""
    shifted = [_shifted(span, seen.begin_s) for span in seen.predicted if span.label != WAIT]
    return [Span(f"worker {s.rank}, predicted", "compute", s.from_s, s.to_s, s.label) for s in shifted]


def draw_schedules(seen: Excerpt, path: Path, title: str) -> bool:
    """Draw the measured batches above the predicted ones, over one time axis; return False if matplotlib is missing."""
    rows = min(seen.size, MAX_ROWS)
    figure, (above, below) = figure_of(13, 2.2 + 0.9 * rows, (1.0, 1.0))
    if figure is None:
        return False
    length_s = max(span.to_s for span in (*seen.measured, *seen.predicted))
    scale, unit = time_unit(length_s)
    replicas = f", the first of {seen.replicas} replicas of the model" if seen.replicas > 1 else ""
    batches = f"{seen.batches} batch{'es' * (seen.batches > 1)} from {seen.begin_s:.3f} s on"
    figure.suptitle(f"{title}: {batches}{replicas}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, spans, what in ((above, seen.measured, "measured"), (below, seen.predicted, "predicted")):
        end_s = max(span.to_s for span in spans)
        busy_s = sum(span.to_s - span.from_s for span in spans if span.label != WAIT)
        axes.set_title(f"{what}: busy {100 * busy_s / (end_s * seen.size):.0f} %", fontsize=9, loc="left")
        bars = [_bar(span) for span in spans if span.rank < rows]
        draw_bars(axes, bars, [f"worker {n}" for n in range(rows)], scale, length_s / NARROW)
        axes.set_xlim(0, length_s * scale)
    below.set_xlabel(unit)
    _legend(above)
    figure.savefig(path, dpi=130)
    return True


def _bar(span: ForecastSpan) -> Bar:
    if span.label == WAIT:
        return Bar(span.rank, span.from_s, span.to_s, WAITING)
    forward = span.label.startswith("F")
    style = Style(color_of(int(span.label[1:])), alpha=0.5 if forward else 1.0, hatch="" if forward else "///")
    return Bar(span.rank, span.from_s, span.to_s, style, span.label)


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(fc=color_of(0), ec=INK, lw=0.4, alpha=0.5, label="F: forward of a microbatch"),
        Patch(fc=color_of(0), ec=INK, lw=0.4, hatch="///", label="B: backward"),
        Patch(fc=WAITING.color, label="waiting"),
        Patch(fc="white", ec="#bbbbbb", lw=0.4, label="other: reading, sending, updating"),
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8)
