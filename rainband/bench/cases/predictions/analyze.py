"""Predictions of `rainband analyze --network here` against real runs of other tasks, sizes and numbers of workers.

The machine is measured once, with `mlp` of 0.7M parameters and two workers, as `analyze` and `auto` do. The gradients
of each task are then measured, and its strategies simulated; a real run follows at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from rainband.analysis.analysis import CALIBRATED, STEPS
from rainband.analysis.auto import options_for
from rainband.analysis.measure import measure_task
from rainband.analysis.predict import CANDIDATES, MODEL_ERROR, AnalyzedCluster, StepPrediction, predict_steps
from rainband.bench.cases.sim import measured
from rainband.bench.harness.rows import Effort, Row, at_most
from rainband.options import RunOptions
from rainband.plugins import load_strategy
from rainband.record.calibrate import calibrate
from rainband.runtimes.config import RunConfig
from rainband.runtimes.configure import configure
from rainband.runtimes.processes import launcher
from rainband.runtimes.simulation.models.cluster_model import ClusterModel
from rainband.settings import as_plain, parse_pairs
from rainband.tasks.load import load_task

REPEATS = 3  # real runs, of which the median counts


class PredictedRun(NamedTuple):
    """A task of another size, and a number of workers, than those that were calibrated."""

    task: str
    settings: dict[str, Any]
    workers: int
    epochs: int


CASES = (
    PredictedRun("mlp", {"parameters": "0.1M", "samples": 16384}, 2, 6),
    PredictedRun("mlp", {"parameters": "5.8M", "samples": 4096}, 2, 2),
    PredictedRun("mlp", {"parameters": "5.8M", "samples": 4096}, 4, 2),
    PredictedRun("digits", {}, 3, 40),
)
STRATEGIES = ("single", "sync", "sync batch_per_worker=true", "downpour")


def run(effort: Effort) -> Iterator[Row]:
    model = calibrate(CALIBRATED, STEPS)
    cases = CASES if effort == "full" else CASES[:2]
    errors = []
    for case in cases:
        for row, error in _compare(case, model, REPEATS if effort == "full" else 1):
            errors.append(error)
            yield row
    yield at_most("error of the rate, median", median(errors), MODEL_ERROR, "real runs", unit="")
    yield Row("error of the rate, largest", max(errors), "")


def _compare(case: PredictedRun, model: ClusterModel, repeats: int) -> Iterator[tuple[Row, float]]:
    task = load_task(case.task, case.settings)
    setting = AnalyzedCluster(case.workers, 1, model)
    chosen = [one for one in CANDIDATES if one.words in STRATEGIES]
    for prediction in predict_steps(task, measure_task(task, case.workers), setting, chosen):
        rate = median(_real_rate(case, prediction) for _ in range(repeats))
        error = abs(prediction.samples_per_s / rate - 1)
        size = case.settings.get("parameters", "")
        name = f"{case.task} {size}".strip() + f", {case.workers} workers, {prediction.words}"
        text = f"{rate:,.0f} measured, {prediction.samples_per_s:,.0f} predicted"
        yield Row(f"{name}: {text}: error", error, ""), error


def _real_rate(case: PredictedRun, prediction: StepPrediction) -> float:
    """Return the samples per second of a real run."""
    name, *pairs = prediction.words.split()
    strategy = load_strategy(name, parse_pairs(pairs))
    base = RunConfig(
        task=case.task,
        task_settings=case.settings,
        strategy=name,
        strategy_settings=as_plain(strategy),
        num_workers=case.workers,
        num_servers=1,
    )
    options: RunOptions = {"workers": case.workers, "servers": 1, "epochs": case.epochs, "failure_timeout_s": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run").mkdir()
        config = configure(base, strategy, options_for(prediction.words, options))
        return measured(msgspec.structs.replace(config, directory=str(Path(folder, "run"))), launcher.run).rate
