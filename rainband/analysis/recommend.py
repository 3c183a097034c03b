"""Recommend a strategy from predicted rates, in words.

The strategy with the most faithful updates is recommended (first those of one process, then those of a larger batch,
then stale gradients), unless another kind is clearly faster: at least 1.5 times, with ranges that do not overlap.
Strategies in which each worker trains a model of its own are shown, but not recommended: how often models must be
averaged depends on the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rainband.analysis.predict import KINDS, MODEL_ERROR, Kind, StepPrediction
from rainband.options import DEFAULT_STRATEGY
from rainband.views.formatting import percent, short

CLEARLY = 1.5  # times as many samples per second
ABOUT = 1.1  # times as many are no reason to prefer staler gradients
NONE_FASTER = "no strategy whose workers train one model together is clearly faster."
CHOSEN: tuple[Kind, ...] = ("exact", "larger batch", "stale")


@dataclass(frozen=True)
class Recommendation:
    """The strategy to use, and the sentences that say why."""

    chosen: StepPrediction
    reasons: tuple[str, ...]


def recommend(predictions: Sequence[StepPrediction], task: str, workers: int) -> Recommendation:
    """Return the recommendation for these workers."""
    best = [_best([one for one in predictions if one.kind == kind]) for kind in CHOSEN]
    found = [one for one in best if one is not None]
    chosen = found[0]
    for one in found[1:]:
        if _clearly_faster(one, chosen):
            chosen = one
    single = next((one for one in predictions if one.one_process), None)
    return Recommendation(
        chosen,
        (
            _what(chosen, single),
            *_own_models(chosen, predictions),
            *_ties(chosen, predictions),
            *_default(chosen, predictions, single),
            *_faster(chosen, found, task, workers),
            *_limits(chosen, single, workers),
            f"Ranges are the quartiles of the measured gradients and the simulator's error, {MODEL_ERROR:.0%}; other "
            "programs and reading data are not in them.",
        ),
    )


def _best(predictions: Sequence[StepPrediction]) -> StepPrediction | None:
    """Return the least stale of those that are about as fast as the fastest; of equals the one that comes first."""
    most = max((one.samples_per_s for one in predictions), default=0.0)
    near = [one for one in predictions if one.samples_per_s * ABOUT >= most]
    return min(near, key=lambda one: (round(one.staleness, 1), -one.samples_per_s), default=None)


def _what(chosen: StepPrediction, single: StepPrediction | None) -> str:
    rate = f"{short(chosen.samples_per_s)} samples/s are predicted ({range_text(chosen)})"
    if single is None or chosen is single:
        text = f"Use {chosen.words}: {rate}."
        return text if single is None else f"{text[:-1]}; {NONE_FASTER}"
    times = chosen.samples_per_s / single.samples_per_s
    return f"Use {chosen.words}: {rate}, {times:.2g} times one process. Its updates are {KINDS[chosen.kind]}."


def _ties(chosen: StepPrediction, predictions: Sequence[StepPrediction]) -> list[str]:
    alike = [one for one in predictions if one is not chosen and one.kind == chosen.kind]
    ties = [one.words for one in alike if one.overlaps(chosen)]
    if not ties:
        return []
    rates = _and([short(one.samples_per_s) for one in alike if one.overlaps(chosen)])
    return [f"{_and(ties)} ({rates} samples/s) cannot be told apart from it by this prediction: the ranges overlap."]


def _own_models(chosen: StepPrediction, predictions: Sequence[StepPrediction]) -> list[str]:
    """Say why a clearly faster one that averages models is not recommended."""
    own = [one for one in predictions if one.kind == "own models" and _clearly_faster(one, chosen)]
    if not own:
        return []
    best = max(own, key=lambda one: one.samples_per_s)
    times = best.samples_per_s / chosen.samples_per_s
    return [
        f"{best.words} would train on {times:.2g} times as many samples per second, "
        "but its workers train models of their own, and how often these must be averaged depends on the task: such "
        "strategies are never recommended."
    ]


def _default(chosen: StepPrediction, predictions: Sequence[StepPrediction], single: StepPrediction | None) -> list[str]:
    """Warn if the strategy that is used unless another is named would be slower than one process."""
    default = next((one for one in predictions if one.words == DEFAULT_STRATEGY), None)
    if default is None or single is None or default is chosen or not _clearly_faster(single, default):
        return []
    times = single.samples_per_s / default.samples_per_s
    return [f"{DEFAULT_STRATEGY}, the default, would be {times:.2g} times slower than one process here."]


def _clearly_faster(one: StepPrediction, other: StepPrediction) -> bool:
    return one.samples_per_s >= CLEARLY * other.samples_per_s and not one.overlaps(other)


def _faster(chosen: StepPrediction, found: Sequence[StepPrediction], task: str, workers: int) -> list[str]:
    """Return what a strategy of another kind would gain, or what the chosen one may cost."""
    compare = "rainband compare {} {} --workers {} --target METRIC=VALUE measures that."
    if chosen.kind == "exact":
        other = max(found, key=lambda one: one.samples_per_s)
        if other is chosen:
            return []
        times = other.samples_per_s / chosen.samples_per_s
        return [
            f"{other.words} would train on {times:.2g} times as many samples per second, {_risk(other)}. "
            "It may need more samples: " + compare.format(task, f"{chosen.words} {other.words}", workers)
        ]
    exact = found[0]
    return [
        f"Its updates are not those of one process ({_risk(chosen).removeprefix('with ')}), so it may need more "
        "samples, which is not predicted: " + compare.format(task, f"{exact.words} {chosen.words}", workers)
    ]


def _risk(one: StepPrediction) -> str:
    if one.kind == "stale":
        return f"with gradients that miss {one.staleness:.1f} updates on average"
    return "with a batch as large as those of all workers together"


def _limits(chosen: StepPrediction, single: StepPrediction | None, workers: int) -> list[str]:
    if chosen.one_process or workers == 1:
        return []
    lines = []
    if single is not None:
        each = chosen.samples_per_s / single.samples_per_s / workers
        lines.append(f"Each of the {workers} workers adds {percent(each)} of the rate of one process.")
    if chosen.compute_share < 0.9:
        lines.append(
            f"They compute during {percent(chosen.compute_share)} of a step, and communicate and wait in the rest."
        )
    return lines


def range_text(one: StepPrediction) -> str:
    return f"{short(one.slowest)} to {short(one.fastest)}"


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
