"""The schedule of a model in stages: some batches as they were, and below them as they were predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from rainband.model_parallel.drawing.picture import COLOURS, INK, figure_of, time_unit
from rainband.model_parallel.schedules.forecast import NEVER_FLUSHED, Forecast, ForecastSpan
from rainband.record.spans import Span
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.stage_forecast import forecast_of
from rainband.views.history import PastRun

ACTIONS = 16  # of the first worker: so many are shown, or a whole batch
WAIT = "wait"
WAITING = "#f4e6bd"
MOST_ROWS = 16
NARROW = 180  # a bar that is a smaller part of the picture than this has no number in it


@dataclass(frozen=True)
class Excerpt:
    """Some batches of the first copy of the model, from the moment on when the first of them begins."""

    begin_s: float
    seen: list[ForecastSpan]  # label "wait": it waited
    predicted: list[ForecastSpan]
    size: int  # workers of a copy
    copies: int
    batches: int


def excerpt(run: PastRun, spans: Sequence[Span]) -> Excerpt | None:
    """Batches that took as long as most did; None where no model was in stages, or nothing was predicted for it."""
    forecast = _forecast(run)
    if forecast is None:
        return None
    size = sum(share.workers for share in forecast.shares)
    mine = _own(spans, size)
    first_stage = forecast.shares[0].workers
    if forecast.schedule == NEVER_FLUSHED:
        begins = _of_batches(mine, first_stage)
    else:
        begins = list(enumerate(_begins([d for d in mine if d.place == 0 and d.label != WAIT])))
    if len(begins) < 2:
        return None
    wanted = min(len(begins) - 1, max(1, ACTIONS // (2 * forecast.microbatches)))
    at = _typical([begins[n + wanted][1] - begins[n][1] for n in range(len(begins) - wanted)])
    (first, begin_s), (_, end_s) = begins[at], begins[at + wanted]
    return Excerpt(
        begin_s=begin_s,
        seen=[_moved(d, -begin_s) for d in mine if begin_s <= d.from_s < end_s],
        predicted=_with_waits(forecast.doings(wanted, first)),
        size=size,
        copies=run.config["num_workers"] // size,
        batches=wanted,
    )


def _forecast(run: PastRun) -> Forecast | None:
    if run.so_far.predicted is None:
        return None
    try:
        config = msgspec.convert(run.config, RunConfig)
        model = _simulated(run.directory) if run.so_far.is_virtual else None
    except (OSError, msgspec.MsgspecError):  # it was killed, or is of another version
        return None
    return forecast_of(config, run.so_far.predicted.schedule, model)


def _simulated(directory: Path) -> ClusterModel:
    return msgspec.convert(msgspec.json.decode((directory / "simulation.json").read_bytes())["model"], ClusterModel)


def _own(spans: Sequence[Span], size: int) -> list[ForecastSpan]:
    """What the workers of the first copy did, in the order of time."""
    places = {f"worker {place}": place for place in range(size)}
    own = [
        ForecastSpan(places[span.node], span.label or WAIT, span.from_s, span.to_s)
        for span in spans
        if span.node in places and (span.label or span.what == WAIT)
    ]
    return sorted(own, key=lambda doing: (doing.from_s, doing.to_s))


def _begins(first: Sequence[ForecastSpan]) -> list[float]:
    """A batch begins with the forward of its first microbatch, after the last backward of the one before it."""
    before = ["B", *(doing.label for doing in first)]
    return [d.from_s for d, last in zip(first, before, strict=False) if d.label == "F0" and last.startswith("B")]


def _typical(lengths_s: Sequence[float]) -> int:
    """Where it took as long as mostly; of several such places the one next to the middle."""
    usual_s = median(lengths_s)
    return min(
        range(len(lengths_s)),
        key=lambda n: (round(abs(lengths_s[n] / usual_s - 1), 6), abs(n - len(lengths_s) // 2)),
    )


def _of_batches(mine: Sequence[ForecastSpan], first_stage: int) -> list[tuple[int, float]]:
    """(number, when its forward begins) of each batch of a pipeline that is never flushed."""
    return [(int(d.label[1:]), d.from_s) for d in mine if d.place < first_stage and d.label.startswith("F")]


def _moved(doing: ForecastSpan, by_s: float) -> ForecastSpan:
    return doing._replace(from_s=doing.from_s + by_s, to_s=doing.to_s + by_s)


def _with_waits(doings: Sequence[ForecastSpan]) -> list[ForecastSpan]:
    """Predicted workers wait when they do nothing else."""
    found = list(doings)
    end_s = max(doing.to_s for doing in doings)
    for place in {doing.place for doing in doings}:
        own = sorted((d for d in doings if d.place == place), key=lambda d: d.from_s)
        edges = [ForecastSpan(place, "", 0.0, 0.0), *own, ForecastSpan(place, "", end_s, end_s)]
        found += [ForecastSpan(place, WAIT, a.to_s, b.from_s) for a, b in pairwise(edges) if b.from_s > a.to_s]
    return found


def predicted_spans(seen: Excerpt) -> list[Span]:
    """As spans of nodes of their own, for the trace."""
    return [
        Span(f"worker {d.place}, predicted", "compute", seen.begin_s + d.from_s, seen.begin_s + d.to_s, d.label)
        for d in seen.predicted
        if d.label != WAIT
    ]


# ---- the picture ---------------------------------------------------------------------------------------------------


def draw_schedules(seen: Excerpt, path: Path, title: str) -> bool:
    """As it was above, as predicted below, over one axis; False: no matplotlib."""
    rows = min(seen.size, MOST_ROWS)
    figure, (above, below) = figure_of(13, 2.2 + 0.9 * rows, 2)
    if figure is None:
        return False
    length_s = max(doing.to_s for doing in (*seen.seen, *seen.predicted))
    scale, unit = time_unit(length_s)
    copies = f", the first of {seen.copies} copies of the model" if seen.copies > 1 else ""
    batches = f"{seen.batches} batch{'es' * (seen.batches > 1)} from {seen.begin_s:.3f} s on"
    figure.suptitle(f"{title}: {batches}{copies}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, doings, what in ((above, seen.seen, "as it was"), (below, seen.predicted, "as predicted")):
        end_s = max(doing.to_s for doing in doings)
        busy_s = sum(d.to_s - d.from_s for d in doings if d.label != WAIT)
        axes.set_title(f"{what}: busy {100 * busy_s / (end_s * seen.size):.0f} %", fontsize=9, loc="left")
        for doing in doings:
            if doing.place < rows:
                _draw(axes, doing, scale, length_s)
        axes.set_yticks([n + 0.5 for n in range(rows)], [f"worker {n}" for n in range(rows)])
        axes.set_ylim(rows, 0)
        axes.set_xlim(0, length_s * scale)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    below.set_xlabel(unit)
    _legend(above)
    figure.savefig(path, dpi=130)
    return True


def _draw(axes: Any, doing: ForecastSpan, scale: float, length_s: float) -> None:
    begin, width = doing.from_s * scale, (doing.to_s - doing.from_s) * scale
    if doing.label == WAIT:
        axes.broken_barh([(begin, width)], (doing.place + 0.3, 0.4), facecolors=WAITING, linewidth=0)
        return
    microbatch = int(doing.label[1:])
    forward = doing.label.startswith("F")
    axes.broken_barh(
        [(begin, width)],
        (doing.place + 0.1, 0.8),
        facecolors=COLOURS[microbatch % len(COLOURS)],
        edgecolor=INK,
        linewidth=0.4,
        alpha=0.5 if forward else 1.0,
        hatch="" if forward else "///",
    )
    if width > length_s * scale / NARROW * len(doing.label):
        axes.text(begin + width / 2, doing.place + 0.5, doing.label, ha="center", va="center", fontsize=7, zorder=4)


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(fc=COLOURS[0], ec=INK, lw=0.4, alpha=0.5, label="F: forward of a microbatch"),
        Patch(fc=COLOURS[0], ec=INK, lw=0.4, hatch="///", label="B: backward"),
        Patch(fc=WAITING, label="waiting"),
        Patch(fc="white", ec="#bbbbbb", lw=0.4, label="else: reading, sending, updating"),
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8)
