"""Simulated runs that write checkpoints, and runs that continue from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.tasks.linear import Linear
from rainband.tasks.task import Task

TASK = Linear(dimension=128, samples=64, batch_size=2, epochs=3)  # 96 batches; each counts exactly, in any order
MODEL = ClusterModel(
    NetworkModel(latency_s=0.01, bytes_per_s=1e9), ComputeModel(kind="lognormal", step_s=1.0), NodeModel()
)


class CheckpointRun:
    """A finished simulated run."""

    def __init__(self, directory: Path, result: sim.SimulatedResult, seen: list[events.AnyEvent]) -> None:
        self.directory = directory
        self.result = result
        self.seen = seen

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return load_file(self.directory / "model.safetensors")

    @property
    def checkpoints(self) -> list[str]:
        return sorted(str(path) for path in (self.directory / "checkpoints").glob("step-*"))


def train(
    directory: Path,
    strategy: str,
    settings: dict[str, Any] | None = None,
    task: Task = TASK,
    workers: int = 3,
    servers: int = 2,
    model: ClusterModel = MODEL,
    stop_at_s: float | None = None,
    **more: Any,
) -> CheckpointRun:
    """Run to the end, or stop it after the first event from `stop_at_s` on, as Ctrl-C does."""
    directory.mkdir(parents=True)
    config = RunConfig(
        task="given",
        strategy=strategy,
        strategy_settings=settings or {},
        num_workers=workers,
        num_servers=servers,
        runtime="sim",
        eval_every_s=0.0,
        directory=str(directory),
        **more,
    )
    seen: list[events.AnyEvent] = []

    def view(event: events.AnyEvent) -> None:
        is_first = (
            stop_at_s is not None and all(earlier.at_s < stop_at_s for earlier in seen) and event.at_s >= stop_at_s
        )
        seen.append(event)
        if is_first:
            raise KeyboardInterrupt

    result = sim.run(config, view, model=model, task=task)
    return CheckpointRun(directory, result, seen)
