"""Predict the time of a step with each strategy: the simulator, with the measured time of a gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from rainband.analysis.measure import GradientTimes, MeasuredTask
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.configure import configure
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.run import run
from rainband.settings import parse_pairs
from rainband.tasks.task import Task

if TYPE_CHECKING:
    from torch import nn

    from rainband.strategy import Strategy
    from rainband.tasks.task import Data

Kind = Literal["exact", "larger batch", "stale", "own models"]

# What a strategy's updates are, compared with those of one process. The most faithful come first.
KINDS: dict[Kind, str] = {
    "exact": "those of one process",
    "larger batch": "those of one process with a larger batch",
    "stale": "of stale gradients",
    "own models": "each worker's own; models are averaged",
}


class Candidate(NamedTuple):
    """A strategy with settings, as they are typed, and what its updates are."""

    words: str
    kind: Kind


CANDIDATES = (
    Candidate("single", "exact"),
    Candidate("sync", "exact"),
    Candidate("all_reduce", "exact"),
    Candidate("sync batch_per_worker=true", "larger batch"),
    Candidate("soft_sync", "stale"),
    Candidate("stale_sync", "stale"),
    Candidate("downpour", "stale"),
    Candidate("averaging", "own models"),
    Candidate("elastic", "own models"),
    Candidate("gossip", "own models"),
)
WORK_ITEMS = 768  # that a simulation has at most, so that one of many workers does not take long
STEPS = (4, 32)  # per worker
# An assumption: twice the largest error of rates with the task and the number of workers that were calibrated
# (docs/results/benchmarks.md). `rainband bench analyze` measures it with others.
MODEL_ERROR = 0.25
SIMULATED_AT_MOST = 512  # workers


@dataclass(frozen=True)
class StepPrediction:
    """The predicted speed of a strategy. A step is a batch of each worker; one of all workers, if they share it."""

    words: str
    kind: Kind
    step_s: float
    samples_per_s: float
    slowest: float  # samples per second, with the uncertainty
    fastest: float
    staleness: float
    compute_share: float  # of a step
    one_process: bool = False

    def overlaps(self, other: StepPrediction) -> bool:
        """Return True if the ranges overlap: the two cannot be told apart."""
        return self.fastest >= other.slowest and other.fastest >= self.slowest


@dataclass(frozen=True)
class AnalyzedCluster:
    """The cluster for which steps are predicted."""

    workers: int
    servers: int
    model: ClusterModel
    batch_size: int | None = None  # none: the task's own
    threads: int = 1  # of each worker
    network: str = ""  # the model's name
    drawn_times: bool = False  # gradients take as long as the model says, not as was measured


def predict_steps(
    task: Task, measured: MeasuredTask, setting: AnalyzedCluster, candidates: Sequence[Candidate] = CANDIDATES
) -> list[StepPrediction]:
    """Return a prediction for each strategy that can have this number of workers, in the order of the candidates."""
    once = _BuiltOnce(task)
    predictions = [predict_one(one, once, measured, setting) for one in candidates]
    return [one for one in predictions if one is not None]


def predict_one(one: Candidate, task: Task, measured: MeasuredTask, setting: AnalyzedCluster) -> StepPrediction | None:
    """Return the prediction for one strategy; None if it cannot have this number of workers."""
    name, *pairs = one.words.split()
    strategy = load_strategy(name, parse_pairs(pairs))
    requires = strategy.requires
    own_s = measured.model_bytes / setting.model.nodes.apply_bytes_per_s if requires.optimizer == "workers" else 0.0
    low_s, high_s = measured.batch.quartiles
    if requires.max_replicas == 1 or setting.workers == 1:
        if requires.max_replicas != 1:
            return None  # with one worker, all are the same but for their messages
        step_s = measured.batch.median_s + own_s
        steps_s = (low_s + own_s, step_s, high_s + own_s)
        return replace(_prediction(one, measured.batch.samples, steps_s, 0.0, step_s), one_process=True)
    times = _parts_as_shares(measured, setting.workers) if requires.split_batches else measured.batch
    per_step = measured.batch.samples * (1 if requires.split_batches else setting.workers)
    steps = []
    stale = 0.0
    for factor in (low_s / measured.batch.median_s, 1.0, high_s / measured.batch.median_s):
        seconds, stale = _step_s(strategy, one.words, task, times, factor, own_s, setting)
        steps.append(seconds)
    alone_s = (measured.part if requires.split_batches else measured.batch).median_s + own_s
    return _prediction(one, per_step, tuple(sorted(steps)), stale, alone_s)


def _prediction(
    one: Candidate, samples: int, steps: Sequence[float], staleness: float, compute_s: float
) -> StepPrediction:
    low_s, step_s, high_s = steps
    return StepPrediction(
        words=one.words,
        kind=one.kind,
        step_s=step_s,
        samples_per_s=samples / step_s,
        slowest=samples / high_s / (1 + MODEL_ERROR),
        fastest=samples / low_s * (1 + MODEL_ERROR),
        staleness=staleness,
        compute_share=min(1.0, compute_s / step_s),
    )


def _parts_as_shares(measured: MeasuredTask, workers: int) -> GradientTimes:
    """Return times of a whole batch of which a worker's share takes as long as was measured.

    The simulator counts a part as its share of the batch, but small parts take longer than that.
    """
    whole = measured.batch.samples / measured.part.samples
    factor = measured.part.median_s * whole / measured.batch.median_s
    return replace(measured.batch, seconds=tuple(seconds * factor for seconds in measured.batch.seconds))


def _step_s(
    strategy: Strategy,
    words: str,
    task: Task,
    times: GradientTimes,
    factor: float,
    own_s: float,
    setting: AnalyzedCluster,
) -> tuple[float, float]:
    """Return the seconds of a step, without the first steps, and the mean staleness."""
    compute = ComputeModel(kind="trace", trace_s=tuple(factor * seconds + own_s for seconds in times.seconds))
    model = replace(setting.model, compute=compute)
    few, most = STEPS
    many = max(2 * few, min(most, WORK_ITEMS // setting.workers))
    results = [_simulated(strategy, words, task, number, model, setting) for number in (few, many)]
    seconds = (results[1].training_s - results[0].training_s) / (many - few)
    return max(seconds, results[1].training_s / many / 10), float(results[1].staleness["mean"])


def _simulated(
    strategy: Strategy, words: str, task: Task, steps: int, model: ClusterModel, setting: AnalyzedCluster
) -> Any:
    name = words.split()[0]
    base = RunConfig(
        task="task", strategy=name, strategy_settings={}, num_workers=setting.workers, num_servers=setting.servers
    )
    options: dict[str, Any] = {"workers": setting.workers, "runtime": "sim", "time_only": True, "steps": steps}
    if strategy.requires.servers:
        options["servers"] = setting.servers
    if setting.batch_size:
        options["batch_size"] = setting.batch_size
    with tempfile.TemporaryDirectory(prefix="rainband-analysis-") as folder:
        config = configure(base, strategy, options)  # type: ignore[arg-type]
        config = msgspec.structs.replace(config, directory=folder)
        result = run(config, _no_view, model=model, task=task, strategy=strategy)
    if result.outcome != "finished":
        raise ValueError(f"the simulation of {words} {result.outcome}: {result.reason}")
    return result


def _no_view(event: events.AnyEvent) -> None:
    """Show no event."""


class _BuiltOnce:
    """A task whose model is built once: a simulation of time only needs its shapes."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.batch_size, self.epochs = task.batch_size, task.epochs
        self._model: nn.Module | None = None
        self.groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None

    def model(self) -> nn.Module:
        if self._model is None:
            self._model = self.task.model()
        return self._model

    def data(self) -> Data:
        return self.task.data()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.task.loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}
