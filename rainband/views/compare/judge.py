"""Judgements on runs of several strategies: each gets its medians and ranges, and all get a verdict in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rainband.coordinator.state import Target
from rainband.views.compare.measured import RunMeasures
from rainband.views.formatting import count, duration, short, size

SHARED_SETTINGS = frozenset(
    ("lr", "optimizer", "momentum", "weight_decay", "lr_schedule", "warmup_fraction", "guard", "local_lr")
)  # of any training; the others are the strategy's own
FINISHED = "finished"
MUCH = 1.5  # times as many seeds' spread as the resolution: a difference between seeds, and not of the measurement
FEW_SEEDS = 5
MOST_REASONS = 2
MOST_OF_REASON = 200  # characters


@dataclass(frozen=True)
class Tuning:
    """The learning rates that were tried for a strategy, and what that cost."""

    tried: tuple[float, ...]
    chosen: float
    runs: int
    samples: int
    cpu_s: float


@dataclass(frozen=True)
class Entrant:
    """A strategy with some settings and a number of workers, and its runs: one for each seed."""

    name: str
    runs: tuple[RunMeasures, ...]
    tuning: Tuning | None = None

    @property
    def finished(self) -> tuple[RunMeasures, ...]:
        return tuple(run for run in self.runs if run.state == FINISHED)

    @property
    def hits(self) -> list[RunMeasures]:
        return [run for run in self.finished if run.reached]

    @property
    def times(self) -> list[float]:
        """Return the seconds to the target of the runs that reached it, in order."""
        return sorted(run.reached.seconds for run in self.hits if run.reached)

    @property
    def earliest_s(self) -> float:
        """Return the earliest moment at which the fastest seed may have reached the target, between evaluations."""
        return min((run.reached.seconds - run.reached.within_s for run in self.hits if run.reached), default=0.0)

    @property
    def time(self) -> float | None:
        return median(self.times) if self.times else None

    @property
    def samples_needed(self) -> float | None:
        return median(run.reached.samples for run in self.hits if run.reached) if self.hits else None

    @property
    def updates_needed(self) -> float | None:
        return median(run.reached.updates for run in self.hits if run.reached) if self.hits else None

    @property
    def always_reached(self) -> bool:
        return bool(self.runs) and len(self.hits) == len(self.runs)

    @property
    def finals(self) -> list[float]:
        return sorted(run.final for run in self.finished if run.final is not None)

    @property
    def final(self) -> float | None:
        return median(self.finals) if self.finals else None

    @property
    def spread(self) -> float | None:
        """Return the difference between the best and the worst final value; None: fewer than two runs."""
        return self.finals[-1] - self.finals[0] if len(self.finals) > 1 else None

    @property
    def virtual(self) -> bool:
        return any(run.virtual for run in self.runs)

    @property
    def counts_bytes(self) -> bool:
        """Return True if its bytes are known: those of workers that share batches in one memory are not counted."""
        return bool(self.middle("num_bytes")) or all(run.workers == 1 for run in self.runs)

    @property
    def own_settings(self) -> list[str]:
        return [name for name in (self.runs[0].settings if self.runs else {}) if name not in SHARED_SETTINGS]

    def middle(self, name: str) -> float:
        """Return the median of a number of the finished runs."""
        columns: dict[str, list[float]] = {
            "per_s": [run.per_s for run in self.finished],
            "cpu_s": [run.cpu_s for run in self.finished],
            "num_bytes": [run.num_bytes for run in self.finished],
            "start_s": [run.start_s for run in self.finished],
            "training_s": [run.training_s for run in self.finished],
            "staleness": [run.staleness for run in self.finished],
        }
        numbers = columns[name]
        return median(numbers) if numbers else 0.0


@dataclass(frozen=True)
class Comparison:
    """All contenders, and the target that was fixed before the runs."""

    task: str
    contenders: tuple[Entrant, ...]
    target: Target | None = None
    command: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def metric(self) -> str:
        names = [run.metric for one in self.contenders for run in one.runs if run.metric]
        return self.target.metric if self.target else names[0] if names else ""

    @property
    def more_is_better(self) -> bool:
        return not Target(self.metric, 0.0).is_upper

    @property
    def resolution(self) -> float | None:
        """Return the smallest difference between two measured values: of 360 test samples, one is 1/360 of accuracy."""
        values = {round(point.value, 9) for one in self.contenders for run in one.runs for point in run.curve}
        steps = [after - before for before, after in pairwise(sorted(values)) if after - before > 1e-9]
        return min(steps) if steps else None

    @property
    def mixes_clocks(self) -> bool:
        """Return True if some seconds are virtual and others are not, so that times cannot be compared."""
        return len({run.virtual for one in self.contenders for run in one.runs}) > 1

    def ranked(self) -> list[Entrant]:
        """Return those that reached the target with every seed, the fastest first; the others after them."""
        if self.mixes_clocks:
            return sorted(self.contenders, key=lambda one: not one.always_reached)
        last = float("inf")
        return sorted(self.contenders, key=lambda one: (not one.always_reached, last if one.time is None else one.time))


def seconds_text(seconds: float) -> str:
    """Format seconds with enough digits to compare them: 0.283 s, 41.2 s, 3 min 20 s."""
    return f"{seconds:.3g} s" if 0.001 <= seconds < 100 else duration(seconds)


def overlap(first: Entrant, second: Entrant) -> bool:
    """Return True if the ranges of times overlap, with the time between evaluations: they cannot be told apart."""
    if not first.times or not second.times:
        return False
    return first.times[-1] >= second.earliest_s and second.times[-1] >= first.earliest_s


def verdict(comparison: Comparison) -> list[str]:
    """Return sentences: who reached the target first, why, what else differs, how steady, at what cost."""
    return [
        *_winner(comparison),
        *_misses(comparison),
        *_unlike(comparison),
        *_stability(comparison),
        *_cost(comparison),
        *_caution(comparison),
    ]


def _winner(comparison: Comparison) -> list[str]:
    target = comparison.target
    if target is None:
        return _finals(comparison)
    reached = [one for one in comparison.ranked() if one.always_reached]
    if not reached:
        return [f"None reached {target} with every seed."]
    if comparison.mixes_clocks:
        verb = "have" if len(reached) > 1 else "has"
        return [f"{_and(one.name for one in reached)} {verb} reached {target} with every seed."]
    best = reached[0]
    assert best.time is not None
    tied = [one for one in reached[1:] if overlap(best, one)]
    slower = [one for one in reached[1:] if one not in tied]
    of_seeds = f"the median of {count(len(best.runs), 'seed')}" if len(best.runs) > 1 else "its only run"
    lines = [f"{best.name} reached {target} after {seconds_text(best.time)} in {of_seeds}."]
    if tied:
        lines[0] = (
            f"{_and([best.name, *(one.name for one in tied)])} cannot be told apart: their times to {target} overlap "
            f"(medians {_and(seconds_text(one.time or 0.0) for one in (best, *tied))})."
        )
    if slower and slower[0].time:
        ratio = slower[0].time / best.time if best.time else 0.0
        by = f", {ratio:.1f} times as long" if ratio else ""
        lines.append(f"{slower[0].name} is slower: {seconds_text(slower[0].time)}{by}, and the ranges do not overlap.")
        lines += _why(best, slower[0])
    return lines


def _why(best: Entrant, other: Entrant) -> list[str]:
    """Explain a difference by the identity: time = samples needed / (samples/s)."""
    if not (best.samples_needed and other.samples_needed and best.middle("per_s") and other.middle("per_s")):
        return []
    speed, need = best.middle("per_s") / other.middle("per_s"), best.samples_needed / other.samples_needed
    return [
        f"Why: {best.name} trains on {speed:.2f} times as many samples per second as {other.name}, and needs "
        f"{need:.2f} times as many to reach the target."
    ]


def _finals(comparison: Comparison) -> list[str]:
    known = [one for one in comparison.contenders if one.final is not None]
    if len(known) < 2:
        return []
    sign = -1.0 if comparison.more_is_better else 1.0
    best, second = sorted(known, key=lambda one: sign * (one.final or 0.0))[:2]
    values = f"{short(best.final or 0.0)} and {short(second.final or 0.0)}"
    within = max(best.spread or 0.0, second.spread or 0.0, comparison.resolution or 0.0)
    if abs((best.final or 0.0) - (second.final or 0.0)) <= within:
        return [f"{best.name} and {second.name} cannot be told apart by their final {comparison.metric} ({values})."]
    return [f"{best.name} has the best final {comparison.metric}, before {second.name} ({values})."]


def _misses(comparison: Comparison) -> list[str]:
    lines = []
    for one in comparison.contenders:
        failed = [run for run in one.runs if run.state != FINISHED]
        if failed:
            states = _and(sorted({run.state for run in failed}))
            why = "".join(
                f" {_sentence(reason)}" for reason in sorted({run.reason for run in failed if run.reason})[:2]
            )
            lines.append(f"{one.name}: {len(failed)} of {count(len(one.runs), 'run')} did not finish ({states}).{why}")
        if comparison.target and (missed := len(one.finished) - len(one.hits)):
            lines.append(f"{one.name} did not reach {comparison.target} in {missed} of {count(len(one.runs), 'run')}.")
    return lines


def _unlike(comparison: Comparison) -> list[str]:
    """Warn if more differs than the strategy."""
    by_optimizer: dict[str, list[str]] = {}
    for one in comparison.contenders:
        for optimizer in sorted({run.optimizer for run in one.runs}):
            by_optimizer.setdefault(optimizer, []).append(one.name)
    lines = []
    if len(by_optimizer) > 1:
        groups = "; ".join(f"{optimizer}: {_and(names)}" for optimizer, names in by_optimizer.items())
        tuned = all(one.tuning for one in comparison.contenders)
        advice = "" if tuned else " To compare the strategies alone, give all the same optimizer, or use --tune."
        lines.append(f"Careful: optimizers or learning rates differ, not only strategies. {groups}.{advice}")
    if comparison.mixes_clocks:
        lines.append("Some runs are simulated, and their seconds are virtual, so times are not compared.")
    if len({run.task for one in comparison.contenders for run in one.runs}) > 1:
        lines.append("Careful: the tasks differ.")
    return lines


def _stability(comparison: Comparison) -> list[str]:
    known = [(one.spread, one.name) for one in comparison.contenders if one.spread is not None]
    if not known:
        return []
    grain = comparison.resolution
    widest, name = max(known)
    if grain is not None and widest <= MUCH * grain:
        return [
            f"Over seeds, final values differ by no more than the resolution of {comparison.metric}, {short(grain)}."
        ]
    resolution = f"; the resolution of the measurement is {short(grain)}" if grain is not None else ""
    steadiest, calm = min(known)
    if len(known) == 1:
        return [f"Over seeds, the final {comparison.metric} of {name} differs by {short(widest)}{resolution}."]
    return [
        f"Over seeds, the final {comparison.metric} of {name} differs most, by {short(widest)}, and that of {calm} "
        f"least, by {short(steadiest)}{resolution}."
    ]


def _cost(comparison: Comparison) -> list[str]:
    lines = []
    costs = [(one.middle("cpu_s"), one.name) for one in comparison.contenders if one.middle("cpu_s")]
    if len(costs) > 1:
        (least, cheap), (most, dear) = min(costs), max(costs, key=lambda cost: cost[0])
        lines.append(f"Cost of a run: from {short(least)} CPU seconds ({cheap}) to {short(most)} ({dear}).")
    sizes = [(one.middle("num_bytes"), one.name) for one in comparison.contenders if one.counts_bytes]
    if len(sizes) > 1 and max(sizes)[0]:
        (least, cheap), (most, dear) = min(sizes), max(sizes)
        lines.append(f"Bytes between processes: from {size(least)} ({cheap}) to {size(most)} ({dear}).")
    tunings = [(one.name, one.tuning) for one in comparison.contenders if one.tuning]
    if tunings:
        runs, samples = sum(t.runs for _, t in tunings), sum(t.samples for _, t in tunings)
        chosen = _and(f"{name} lr={t.chosen:g}" for name, t in tunings)
        lines.append(
            f"Tuning took {count(runs, 'run')} and {count(samples, 'sample')} in addition, and chose {chosen}."
        )
    return lines


def _caution(comparison: Comparison) -> list[str]:
    seeds = min((len(one.runs) for one in comparison.contenders), default=0)
    if 0 < seeds < FEW_SEEDS:
        return [f"With {count(seeds, 'seed')}, only large differences can be seen."]
    return []


def _sentence(text: str) -> str:
    most = text if len(text) <= MOST_OF_REASON else f"{text[:MOST_OF_REASON]} ..."
    return most if most.endswith((".", "!", "?")) else f"{most}."


def _and(names: Iterable[str]) -> str:
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def contenders_of(runs: Sequence[RunMeasures]) -> tuple[Entrant, ...]:
    """Group runs that differ only in their seed; name each group by what it does not share with the others."""
    groups: dict[str, list[RunMeasures]] = {}
    for run in runs:
        key = repr((run.strategy, sorted(run.settings.items(), key=str), sorted(run.others.items(), key=str)))
        groups.setdefault(key, []).append(run)
    firsts = [group[0] for group in groups.values()]
    named = [_name(run, firsts) for run in firsts]
    unique = [
        name if named.count(name) == 1 else f"{name} ({run.directory.name})"
        for name, run in zip(named, firsts, strict=True)
    ]
    return tuple(Entrant(name, tuple(group)) for name, group in zip(unique, groups.values(), strict=True))


def _name(run: RunMeasures, others: Sequence[RunMeasures]) -> str:
    alike = [other for other in others if other.strategy == run.strategy]
    differing = [name for name in run.settings if len({repr(other.settings.get(name)) for other in alike}) > 1]
    words = [f"{name}={run.settings[name]}" for name in differing[:3]]
    if len({other.workers for other in others}) > 1:
        words.append(count(run.workers, "worker"))
    return f"{run.strategy} {', '.join(words)}".strip() if words else run.strategy
