"""Training on a Ray cluster of one node, which is this machine, against the processes runtime."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rainband.bench.cases.sim import SimMeasurement, measured
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as processes
from rainband.runtimes.ray import launcher as on_ray
from rainband.runtimes.ray.cluster import LOCAL, connected
from rainband.runtimes.run import RunResult, View

SIZE, WORKERS, CPUS = "0.7M", 2, 4.0
SAMPLES, EPOCHS = 16384, 8  # some seconds


def rows(effort: Effort) -> Iterator[Row]:
    """Measure both in turns, so that a slow minute hits both."""
    if importlib.util.find_spec("ray") is None:
        print("the rows of Ray are left out: it is not installed", file=sys.stderr)
        return
    first, on_cluster, here = [], [], []
    with tempfile.TemporaryDirectory() as root, connected(LOCAL, CPUS):
        for number in range(3 if effort == "full" else 1):
            here.append(measured(_config(Path(root, f"here-{number}")), processes.run).rate)
            first_s, found = _on_ray(_config(Path(root, f"ray-{number}")))
            first.append(first_s)
            on_cluster.append(found.rate)
    yield at_most("a run on a running Ray cluster to its first step", median(first), 10.0, "", "s")
    name = f"downpour on Ray, one node, {WORKERS} workers, {SIZE}"
    yield Row(name, median(on_cluster), "samples/s")
    yield at_least(name, median(on_cluster) / median(here), 0.95, "the processes runtime")


def _on_ray(config: RunConfig) -> tuple[float, SimMeasurement]:
    """Return the seconds to the first step, and the rate."""
    began, first = time.perf_counter(), []

    def run(config: RunConfig, view: View) -> RunResult:
        def both(event: events.AnyEvent) -> None:
            if isinstance(event, events.FirstStep):
                first.append(time.perf_counter() - began)
            view(event)

        return on_ray.run(config, both)

    found = measured(config, run)
    return first[0], found


def _config(directory: Path) -> RunConfig:
    directory.mkdir()
    return RunConfig(
        task="mlp",
        task_settings={"parameters": SIZE, "samples": SAMPLES},
        strategy="downpour",
        epochs=EPOCHS,
        strategy_settings={"optimizer": "sgd", "lr": 1e-3},
        num_workers=WORKERS,
        num_servers=1,
        failure_timeout_s=1.0,  # progress is reported five times as often
        eval_every_s=0.0,
        directory=str(directory),
    )
