"""Is virtual time true? The same runs really and simulated after calibration: the error of the predicted rate."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from rainband import events
from rainband.bench.rows import Effort, Row, at_most, median
from rainband.sim.model import to_toml
from rainband.worlds import local, sim
from rainband.worlds.calibrate import calibrate
from rainband.worlds.config import RunConfig, SimSettings

World = Callable[[RunConfig, local.View], local.RunResult]
SIZES = ("0.7M", "5.8M", "20M")
STRATEGIES = ("downpour", "sync")
BAR = 0.15
SAMPLES = {"0.7M": 16384, "5.8M": 4096, "20M": 2048}


def run(effort: Effort) -> list[Row]:
    sizes, repeats, crews = (SIZES, 3, (2, 4)) if effort == "full" else (SIZES[:2], 1, (2,))
    return [
        row
        for size in sizes
        for strategy in STRATEGIES
        for num_workers in crews
        for row in _compare(size, strategy, num_workers, repeats)
    ]


def _compare(size: str, strategy: str, num_workers: int, repeats: int) -> list[Row]:
    """Calibrate, run and simulate in turns, so that a slow minute of the machine hits both."""
    rates, waits, predicted_rates, predicted_waits = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            config = _config(size, strategy, num_workers, Path(folder, f"real-{number}"))
            model = Path(folder, f"model-{number}.toml")
            model.write_text(to_toml(calibrate(config, steps=30)), encoding="utf-8")
            rate, wait = _measured(config, local.run)
            rates.append(rate)
            waits.append(wait)
            virtual = msgspec.structs.replace(
                _config(size, strategy, num_workers, Path(folder, f"sim-{number}")),
                sim=SimSettings(model=str(model), time_only=True),
            )
            rate, wait = _measured(virtual, sim.run)
            predicted_rates.append(rate)
            predicted_waits.append(wait)
    name = f"{strategy}, {num_workers} workers, {size}"
    error = abs(median(predicted_rates) / median(rates) - 1)
    return [
        Row(f"{name}: really", median(rates), "samples/s"),
        Row(f"{name}: predicted", median(predicted_rates), "samples/s"),
        at_most(f"{name}: error of the rate", error, BAR, "the real run", unit=""),
        Row(f"{name}: waiting, really", median(waits), "of the time"),
        Row(f"{name}: waiting, predicted", median(predicted_waits), "of the time"),
    ]


def _config(size: str, strategy: str, num_workers: int, directory: Path) -> RunConfig:
    directory.mkdir()
    return RunConfig(
        task="mlp",
        task_settings={"parameters": size, "samples": SAMPLES[size]},
        strategy=strategy,
        strategy_settings={"optimizer": "sgd", "lr": 1e-3},
        num_workers=num_workers,
        num_servers=1,
        failure_timeout_s=1.0,
        directory=str(directory),
    )


def _measured(config: RunConfig, world: World) -> tuple[float, float]:
    """Samples per second between the first and the last report, and the part of the time that workers waited."""
    seen: list[events.Progress] = []

    def view(event: events.AnyEvent) -> None:
        if isinstance(event, events.Progress) and event.samples_done:
            seen.append(event)

    result = world(config, view)
    if result.outcome != "finished" or len(seen) < 2:
        raise RuntimeError(f"the run {result.outcome} {result.reason} with {len(seen)} reports: nothing to measure.")
    first, last = seen[0], seen[-1]
    seconds = last.at_s - first.at_s
    waited = [last.waited_s[worker] - first.waited_s.get(worker, 0.0) for worker in last.waited_s]
    return (last.samples_done - first.samples_done) / seconds, sum(waited) / len(waited) / seconds
