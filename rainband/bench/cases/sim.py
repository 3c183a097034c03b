"""Accuracy and speed of the simulation.

Accuracy: the error of the predicted throughput and waiting time, against the same runs in real processes, after
calibration. Speed: gradients per second of 30 simulated workers, and the seconds that 10,000 take.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.protocol import events
from rainband.record.calibrate import calibrate
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.run import View
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, to_toml
from rainband.tasks.load import load_task

Runtime = Callable[[RunConfig, View], local.RunResult]
SIZES = ("0.7M", "5.8M", "20M")
STRATEGIES = ("downpour", "sync")
MAX_ERROR = 0.15
SAMPLES = {"0.7M": 16384, "5.8M": 4096, "20M": 2048}
EPOCHS = {"0.7M": 4, "5.8M": 3, "20M": 2}  # some seconds, because the first second is not typical
STEPS = {"0.7M": 300, "5.8M": 60, "20M": 20}  # of a calibration: some seconds
NUM_SIMULATED = 30


class Setup(NamedTuple):
    """A run to calibrate with, or to predict."""

    size: str
    strategy: str
    num_workers: int

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.num_workers} workers, {self.size}"


TRANSFERS = (  # calibrated with the first, predicted is the second
    (Setup("0.7M", "downpour", 2), Setup("0.7M", "downpour", 4)),
    (Setup("0.7M", "sync", 2), Setup("0.7M", "sync", 4)),
    (Setup("0.7M", "downpour", 2), Setup("5.8M", "downpour", 2)),
    (Setup("5.8M", "downpour", 2), Setup("0.7M", "downpour", 2)),
    (Setup("0.7M", "downpour", 2), Setup("0.7M", "sync", 2)),
    (Setup("0.7M", "sync", 2), Setup("0.7M", "downpour", 2)),
)


def run(effort: Effort) -> Iterator[Row]:
    sizes, repeats, workers = (SIZES, 3, (2, 4)) if effort == "full" else (SIZES[:2], 1, (2,))
    for size, strategy, num_workers in itertools.product(sizes, STRATEGIES, workers):
        yield from _compare(size, strategy, num_workers, repeats)
    for transfer in TRANSFERS:
        yield from _transferred(transfer, repeats)
    yield from _throughput(repeats)
    if effort == "full":
        yield _scale()


def _compare(size: str, strategy: str, num_workers: int, repeats: int) -> list[Row]:
    """Calibrate and run in turns, so that a slow minute hits both; predict from the calibrations before and after."""
    real, predicted = [], []
    with tempfile.TemporaryDirectory() as folder:
        config = _config(size, strategy, num_workers, Path(folder, "calibrating"))
        before = calibrate(config, steps=STEPS[size])
        for number in range(repeats):
            real.append(measured(_config(size, strategy, num_workers, Path(folder, f"real-{number}")), local.run))
            after = calibrate(config, steps=STEPS[size])
            file = Path(folder, f"model-{number}.toml")
            file.write_text(to_toml(_between(before, after)), encoding="utf-8")
            before = after
            virtual = msgspec.structs.replace(
                _config(size, strategy, num_workers, Path(folder, f"sim-{number}")),
                sim=SimSettings(model=str(file), time_only=True),
            )
            predicted.append(measured(virtual, sim.run))
    name = f"{strategy}, {num_workers} workers, {size}"
    of_rate = median([abs(p.rate / r.rate - 1) for p, r in zip(predicted, real, strict=True)])
    of_wait = median([abs(p.waited - r.waited) for p, r in zip(predicted, real, strict=True)])
    return [
        Row(f"{name}: measured", median([r.rate for r in real]), "samples/s"),
        Row(f"{name}: predicted", median([p.rate for p in predicted]), "samples/s"),
        at_most(f"{name}: relative error of the throughput", of_rate, MAX_ERROR, "the real run", unit=""),
        Row(f"{name}: fraction of time spent waiting, measured", median([r.waited for r in real]), ""),
        Row(f"{name}: fraction of time spent waiting, predicted", median([p.waited for p in predicted]), ""),
        at_most(f"{name}: error of that fraction", of_wait, MAX_ERROR, "the real run", unit=""),
    ]


def _transferred(transfer: tuple[Setup, Setup], repeats: int) -> list[Row]:
    """Predict a run from the calibration of another one; the time of a gradient grows with the parameters."""
    calibrated, other = transfer
    errors: list[tuple[float, float]] = []
    grows = _parameters(other.size) / _parameters(calibrated.size)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            model = calibrate(_config(*calibrated, Path(folder, f"calibrating-{number}")), steps=STEPS[calibrated.size])
            trace_s = tuple(seconds * grows for seconds in model.compute.trace_s)
            compute = replace(model.compute, step_s=model.compute.step_s * grows, trace_s=trace_s)
            file = Path(folder, f"model-{number}.toml")
            file.write_text(to_toml(replace(model, compute=compute)), encoding="utf-8")
            real = measured(_config(*other, Path(folder, f"real-{number}")), local.run)
            virtual = msgspec.structs.replace(
                _config(*other, Path(folder, f"sim-{number}")), sim=SimSettings(model=str(file), time_only=True)
            )
            predicted = measured(virtual, sim.run)
            errors.append((predicted.rate / real.rate - 1, predicted.waited - real.waited))
    of_rate, of_wait = (median(values) for values in zip(*errors, strict=True))
    return [
        Row(f"{other.name}: error of the throughput", of_rate, "", f"calibrated with {calibrated.name}"),
        Row(f"{other.name}: error of the fraction of time spent waiting", of_wait, "", "the same"),
    ]


def _parameters(size: str) -> int:
    return sum(parameter.numel() for parameter in load_task("mlp", {"parameters": size}).model().parameters())


def _between(before: ClusterModel, after: ClusterModel) -> ClusterModel:
    """Return the mean of two calibrations."""
    compute = replace(
        before.compute,
        trace_s=before.compute.trace_s + after.compute.trace_s,
        step_s=(before.compute.step_s + after.compute.step_s) / 2,
    )
    speeds = (
        *("apply_bytes_per_s", "gather_bytes_per_s", "read_bytes_per_s", "push_bytes_per_s", "pull_bytes_per_s"),
        *("message_s", "worker_message_s", "crowding", "wake_s", "moves"),
    )
    means = {name: (getattr(before.nodes, name) + getattr(after.nodes, name)) / 2 for name in speeds}
    return ClusterModel(before.network, compute, replace(before.nodes, **means))


def _config(size: str, strategy: str, num_workers: int, directory: Path) -> RunConfig:
    directory.mkdir()
    return RunConfig(
        task="mlp",
        task_settings={"parameters": size, "samples": SAMPLES[size]},
        strategy=strategy,
        epochs=EPOCHS[size],
        strategy_settings={"optimizer": "sgd", "lr": 1e-3} | ({"batch_per_worker": True} if strategy == "sync" else {}),
        num_workers=num_workers,
        num_servers=1,
        failure_timeout_s=1.0,
        directory=str(directory),
    )


class SimMeasurement(NamedTuple):
    rate: float  # samples per second, between the first and the last report
    waited: float  # the fraction of that time


def measured(config: RunConfig, runtime: Runtime) -> SimMeasurement:
    reports: list[events.Progress] = []

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress) and event.samples_done:
            reports.append(event)

    result = runtime(config, view)
    if result.outcome != "finished" or len(reports) < 2:
        raise RuntimeError(
            f"the run {result.outcome} with {len(reports)} progress reports, too few to measure. {result.reason}"
        )
    first, last = reports[0], reports[-1]
    seconds = last.at_s - first.at_s
    waited = [last.waited_s[worker] - first.waited_s.get(worker, 0.0) for worker in last.waited_s]
    return SimMeasurement((last.samples_done - first.samples_done) / seconds, sum(waited) / len(waited) / seconds)


def _throughput(repeats: int) -> list[Row]:
    """Compare the gradients per second of CPU time of 30 simulated workers and of one plain process, in turns.

    The plain process either computes gradients only, or trains, as the simulated servers do.
    """
    against: dict[str, list[float]] = {"one plain process, gradients only": [], "one plain process that trains": []}
    for _ in range(3 * repeats):
        simulated = _simulated()
        for name, ratios in against.items():
            ratios.append(simulated / _plain(trains="trains" in name))
    what = f"{NUM_SIMULATED} simulated workers on digits: gradients per second"
    alone, trains = against.items()
    return [Row(what, median(alone[1]), "x", alone[0]), at_least(what, median(trains[1]), 0.8, trains[0])]


def _plain(trains: bool) -> float:
    task = load_task("digits", {})
    data, module = task.data(), task.model()
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.02)  # as on the simulated servers
    batches = [torch.arange(at, at + task.batch_size) for at in range(0, len(data) - task.batch_size, task.batch_size)]
    with sim.one_thread():
        began = time.process_time()
        for _ in range(task.epochs):
            for batch in batches:
                optimizer.zero_grad()
                task.loss(module, data.batch(batch.numpy())).backward()  # type: ignore[no-untyped-call]
                if trains:
                    optimizer.step()
        return task.epochs * len(batches) / (time.process_time() - began)


def _simulated() -> float:
    moments: dict[str, float] = {}

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.PhaseChanged):
            moments[event.phase] = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        workers = NUM_SIMULATED
        config = RunConfig(task="digits", strategy="downpour", num_workers=workers, num_servers=2, directory=folder)
        result = sim.run(config, view)
    return float(result.accounting["applied"]) / (moments["concluding"] - moments["running"])


def _scale() -> Row:
    """Simulate 10,000 workers and 100 servers for 20 steps on one core."""
    settings = SimSettings(time_only=True, steps=20)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sim.run(
            RunConfig(
                task="digits", strategy="downpour", num_workers=10_000, num_servers=100, directory=folder, sim=settings
            ),
            lambda event: None,
        )
    return at_most("10,000 workers, 100 servers, 20 steps, time only", time.perf_counter() - began, 30.0, "", unit="s")
