"""The analysis of a task: everything that `rainband analyze` shows, and what `rainband train TASK auto` chooses by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rainband.analysis.greedy import bounds, greedy_time
from rainband.analysis.measure import MeasuredTask, measure_task, with_times
from rainband.analysis.predict import CANDIDATES, AnalyzedCluster, Candidate, StepPrediction, predict_steps
from rainband.analysis.recommend import Recommendation, recommend
from rainband.collectives.updates import UpdateCost, bound_s, update_costs
from rainband.record.calibrate import calibrate, describe
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, load_model, to_toml
from rainband.runtimes.simulation.rounds import costs_of
from rainband.tasks.task import Task

HERE = "here"  # the network of this machine: its processes share its memory and its cores
STEPS = 20  # gradients that a calibration measures
ARITY = 3  # of the tree of servers whose update is priced
FILE = "machine.toml"  # among the runs: this machine, as it was measured
CALIBRATED = RunConfig(
    task="mlp",
    task_settings={"parameters": "0.7M"},
    strategy="downpour",
    strategy_settings={"optimizer": "sgd", "lr": 1e-3},
    num_workers=2,
    num_servers=1,
)


@dataclass(frozen=True)
class Analysis:
    """A task on a cluster, before it is trained."""

    task: str
    setting: AnalyzedCluster
    measured: MeasuredTask
    times: tuple[tuple[int, float, int, float], ...]  # processors, lower bound, greedy schedule, upper bound
    updates: tuple[UpdateCost, ...]
    bound_s: float  # of all-reduces
    predictions: tuple[StepPrediction, ...]
    recommendation: Recommendation

    def record(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        work, setting, chosen = self.measured.work, self.setting, self.recommendation.chosen
        layers = [{**layer._asdict(), "parallelism": layer.parallelism} for layer in work.layers]
        names = ("processors", "lower", "greedy", "upper")
        costs = costs_of(setting.model, setting.workers)
        return {
            "task": self.task,
            "network": self.setting.network,
            "workers": setting.workers,
            "servers": setting.servers,
            "batch_size": work.batch_size,
            "layers": layers,
            "work": work.work,
            "depth": work.depth,
            "parallelism": work.parallelism,
            "parameters": work.parameters,
            "activation_bytes": work.activation_bytes,
            "gradient_s": self.measured.batch.median_s,
            "part_s": self.measured.part.median_s,
            "times": [dict(zip(names, row, strict=True)) for row in self.times],
            "alpha_s": costs.alpha_s,
            "beta_s": costs.beta_s,
            "updates": [row._asdict() for row in self.updates],
            "lower_bound_s": self.bound_s,
            "predictions": [msgspec.to_builtins(one) for one in self.predictions],
            "recommended": chosen.words,
            "reasons": list(self.recommendation.reasons),
        }


def analyze(task: Task, name: str, setting: AnalyzedCluster, candidates: Sequence[Candidate] = CANDIDATES) -> Analysis:
    """Measure the task here, and predict its steps on this cluster."""
    workers, servers, model = setting.workers, setting.servers, setting.model
    measured = measure_task(task, workers, setting.batch_size, setting.threads)
    if setting.drawn_times:
        measured = with_times(measured, model.compute)
    work = measured.work
    processors = sorted({1, 2, workers, 64, 4096, max(1, round(work.parallelism)), max(work.work, 1)})
    times = tuple(
        (
            p,
            bounds(work.work, work.depth, p).lower,
            greedy_time(work.operations, p),
            bounds(work.work, work.depth, p).upper,
        )
        for p in processors
    )
    costs = costs_of(model, workers)
    predictions = predict_steps(task, measured, setting, candidates)
    return Analysis(
        task=name,
        setting=setting,
        measured=measured,
        times=times,
        updates=tuple(update_costs(measured.model_bytes, workers, servers, ARITY, costs)) if workers > 1 else (),
        bound_s=bound_s(measured.model_bytes, workers, costs),
        predictions=tuple(predictions),
        recommendation=recommend(predictions, name, workers),
    )


def cluster(network: str, file: Path, say: Callable[[str], None]) -> ClusterModel:
    """Return the model of a network, or of this machine: measured once with a built-in task, and kept in a file."""
    if network != HERE:
        return load_model(network)
    if not file.is_file():
        say(f"measuring this machine, which takes about half a minute ({file} keeps the result) ...")
        model = calibrate(CALIBRATED, STEPS)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_toml(model, describe(CALIBRATED, model)), encoding="utf-8")
        return model
    say(f"this machine is that of {file}; remove the file to measure it again")
    return load_model(str(file))
