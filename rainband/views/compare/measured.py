"""The facts of one run in a comparison: its curve of a metric, when it reached the target, and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rainband.coordinator.state import Target
from rainband.protocol import events
from rainband.views.dashboard.fold import Folded, main_metric
from rainband.views.formatting import short
from rainband.views.history import PastRun, read_run


def parse_target(text: str) -> Target:
    """Read accuracy=0.95: the value to reach, fixed before the runs, so that it favors none of them."""
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise ValueError(f"--target {text}: give a metric and a number, such as accuracy=0.95 or loss=0.1.")
    return Target(name, value)


class MetricPoint(NamedTuple):
    """A measurement of the metric, after this training time."""

    seconds: float
    samples: int
    updates: float
    value: float


class FirstReached(NamedTuple):
    """The first evaluation that reached the target; `within_s`: since the one before, so that it may be earlier."""

    seconds: float
    samples: int
    updates: float
    within_s: float


@dataclass(frozen=True)
class RunMeasures:
    """The facts of one run."""

    directory: Path
    task: str
    strategy: str
    settings: dict[str, object]
    workers: int
    seed: int
    state: str
    metric: str
    curve: list[MetricPoint]
    reached: FirstReached | None
    virtual: bool
    training_s: float = 0.0
    start_s: float = 0.0  # until the first step
    samples: int = 0
    staleness: float = 0.0
    cpu_s: float = 0.0
    num_bytes: int = 0
    metrics: tuple[str, ...] = ()  # the names of all that it has measured
    reason: str = ""  # why it failed
    others: dict[str, object] = field(default_factory=dict)  # options of the run besides the strategy's settings

    @property
    def final(self) -> float | None:
        return self.curve[-1].value if self.curve else None

    @property
    def per_s(self) -> float:
        return self.samples / self.training_s if self.training_s else 0.0

    @property
    def optimizer(self) -> str:
        """Return the optimizer and its learning rate, which strategies set by default in different ways."""
        name, lr = self.settings.get("optimizer", "its own optimizer"), self.settings.get("lr")
        return f"{name} with lr={short(float(str(lr)))}" if isinstance(lr, int | float) else str(name)


def facts_of(directory: Path, target: Target | None) -> RunMeasures:
    """Read a run, complete or not."""
    run = read_run(directory)
    so_far, config = run.so_far, run.config
    started, ended = so_far.started, so_far.ended
    metric = target.metric if target else main_metric(_metrics_of(run))
    curve = _curve(run, metric)
    last = so_far.last
    nodes = [event for event in run.events if isinstance(event, events.NodesMeasured)]
    sent = sum(nodes[-1].sent_bytes) if nodes else 0
    return RunMeasures(
        directory=directory,
        task=started.task if started else "",
        strategy=started.strategy if started else "",
        settings=dict(started.settings) if started else {},
        workers=started.num_workers if started else 0,
        seed=int(config.get("seed", 0)),
        state=run.state,
        metric=metric,
        curve=curve,
        reached=_reached(curve, target),
        virtual=so_far.is_virtual,
        training_s=so_far.training.seconds,
        start_s=so_far.training.began_s or 0.0,
        samples=so_far.samples_done,
        staleness=last.staleness_mean if last else 0.0,
        cpu_s=ended.cpu_s if ended else 0.0,
        num_bytes=(last.pushed_bytes + last.pulled_bytes if last else 0) + sent,
        metrics=tuple(_metrics_of(run)),
        reason=_reason(run),
        others={
            name: value for name, value in config.items() if name not in ("seed", "directory", "strategy_settings")
        },
    )


def _reason(run: PastRun) -> str:
    """Return why a run failed, in one line: what the user's code raised, or what the run said."""
    so_far = run.so_far
    if so_far.ended is None or so_far.ended.outcome != "failed":
        return ""
    text = so_far.error.error if so_far.error else so_far.ended.reason
    return " ".join(text.split())


def _metrics_of(run: PastRun) -> list[str]:
    if run.so_far.ended:
        return list(run.so_far.ended.metrics)
    return list(next((p.metrics for p in reversed(run.so_far.progress) if p.metrics), {}))


def _curve(run: PastRun, metric: str) -> list[MetricPoint]:
    """Return every evaluation; a Progress event repeats the metrics until they are measured again."""
    folded, curve = Folded(), list[MetricPoint]()
    before: dict[str, float] = {}
    began_s = run.so_far.training.began_s or 0.0
    for event in run.events:
        folded.absorb(event)
        same_moment = bool(curve) and event.at_s - began_s == curve[-1].seconds
        if same_moment and isinstance(event, events.NodesMeasured) and folded.so_far.last:
            curve[-1] = curve[-1]._replace(updates=folded.updates_of(folded.so_far.last))
        if not isinstance(event, events.Progress) or not event.metrics or event.metrics == before:
            continue
        before = event.metrics
        value = event.metrics.get(metric)
        if value is not None and math.isfinite(value):
            updates = folded.updates_of(event)
            curve.append(MetricPoint(max(0.0, event.at_s - began_s), event.samples_done, updates, value))
    ended, last = run.so_far.ended, run.so_far.last
    value = ended.metrics.get(metric) if ended else None
    if ended and last and value is not None and math.isfinite(value):
        seconds = run.so_far.training.seconds or max(0.0, ended.seconds - began_s)
        curve.append(MetricPoint(seconds, ended.samples, folded.updates_of(last), value))
    return curve


def _reached(curve: list[MetricPoint], target: Target | None) -> FirstReached | None:
    if target is None:
        return None
    before_s = 0.0
    for seconds, samples, updates, value in curve:
        if target.is_reached({target.metric: value}):
            return FirstReached(seconds, samples, updates, seconds - before_s)
        before_s = seconds
    return None
