"""Runs that claims measure: simulated ones with true gradients, and real processes."""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from rainband.fit import fit
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, compute_model
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.run import SimulatedResult
from rainband.tasks.load import load_task
from reproduce.claim import Values

TASKS: dict[str, dict[str, Any]] = {
    "digits": {},
    "mlp": {"parameters": "0.1M", "samples": 16384},
    "reproduce.tiny_lm:TinyLm": {},
}


@dataclass(frozen=True)
class Done:
    """The result of one simulated run, with its losses as (virtual seconds, loss)."""

    result: SimulatedResult
    losses: list[tuple[float, float]]
    waited_s: float  # of all workers together
    staleness: list[tuple[float, float]]  # fraction of the data done, mean over all updates so far
    samples: list[tuple[float, int]]  # virtual seconds, samples done so far
    fewer_bytes: float = 1.0  # how many times fewer bytes were pushed than without a codec

    @property
    def accuracy(self) -> float:
        """Return the accuracy in percent; that of a model that is not finite is 10 %, as by guessing."""
        value = self.result.metrics.get("accuracy", 0.0)
        return 100 * value if value == value else 10.0

    @property
    def error(self) -> float:
        return 100 - self.accuracy

    @property
    def idle(self) -> float:
        """Return the fraction of the workers' time spent waiting, in percent."""
        return 100 * self.waited_s / (self.result.workers * self.result.seconds)

    def seconds_to(self, loss: float) -> float:
        """Return the virtual seconds until the reported training loss fell below `loss`, between two reports."""
        before_s, before = 0.0, math.inf
        for at_s, value in self.losses:
            if value < loss:
                part = (before - loss) / (before - value) if before < math.inf else 1.0
                return before_s + part * (at_s - before_s)
            before_s, before = at_s, value
        return math.inf

    def samples_to(self, loss: float) -> float:
        """Return the number of samples until the training loss first fell below `loss`."""
        reached_s = self.seconds_to(loss)
        at_s, done = zip(*self.samples, strict=True) if self.samples else ((), ())
        return float(np.interp(reached_s, at_s, done)) if reached_s < math.inf else math.inf


def simulated(task: str, strategy: str, workers: int, seed: int, *, loss: float = 0.0, **how: Any) -> Values:
    """Simulate training; return its error, idle time and seconds, and the seconds and samples until a loss."""
    done = simulate(task, strategy, workers, seed, **how)
    return {
        "error": done.error,
        "idle": done.idle,
        "seconds": done.result.seconds,
        "seconds_to": done.seconds_to(loss),
        "samples_to": done.samples_to(loss),
    }


def simulate(
    task: str,
    strategy: str,
    workers: int,
    seed: int = 0,
    *,
    compute: dict[str, Any] | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    network: dict[str, float] | None = None,
    codec: str = "",
    parts: str = "speed",
    **settings: Any,
) -> Done:
    """Simulate training; with `steps`, simulate the timing of messages only, without gradients."""
    seen: list[events.AnyEvent] = []
    has_servers = load_strategy(strategy, settings).requires.servers
    model = ClusterModel(NetworkModel(**network), compute_model(compute or {})) if network else None  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task=task,
            task_settings=TASKS[task],
            strategy=strategy,
            strategy_settings=settings,
            num_workers=workers,
            num_servers=int(has_servers),
            runtime="sim",
            seed=seed,
            batch_size=batch_size,
            epochs=epochs,
            directory=folder,
            failure_timeout_s=1000.0,
            codec=codec,
            parts=parts,
            sim=SimSettings(compute=compute or {}, time_only=steps is not None, steps=steps),
        )
        result = sim.run(config, seen.append, model=model)
    progress = [event for event in seen if isinstance(event, events.Progress)]
    losses = [(event.at_s, event.loss) for event in progress if event.loss is not None]
    staleness = [(event.batches_done / event.batches, event.staleness_mean) for event in progress]
    samples = [(event.at_s, event.samples_done) for event in progress]
    pushed, saved = (progress[-1].pushed_bytes, progress[-1].saved_bytes) if progress else (0, 0)
    fewer_bytes = (pushed + saved) / pushed if pushed else 1.0
    waited_s = sum(progress[-1].waited_s.values()) if progress else 0.0
    return Done(result, losses, waited_s, staleness, samples, fewer_bytes)


def train(
    task: str,
    strategy: str,
    workers: int,
    seed: int,
    *,
    epochs: int,
    batch_size: int,
    codec: str = "",
    servers: int | None = None,
    **settings: Any,
) -> Values:
    """Train in real processes; return the error in percent and what the run counted of bytes."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that diverged has its error
        result = fit(
            load_task(task, TASKS[task]),
            load_strategy(strategy, settings),
            workers,
            servers,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            codec=codec or None,
            threads=1,
            checkpoint_every=0,
            runs=folder,
        )
    if result.outcome != "finished":
        raise KeyboardInterrupt  # a run that a signal has stopped early is no point
    last = result.history[-1]
    accuracy = 100 * result.metrics["accuracy"]
    return {
        "error": 100 - accuracy if accuracy == accuracy else 90.0,
        "loss": result.metrics["loss"],
        "sent_mb": sum(last.sent_bytes.values()) / 1e6,
        "pushed_mb": last.pushed_bytes / 1e6,
        "fewer_bytes": (last.pushed_bytes + last.saved_bytes) / max(1, last.pushed_bytes),
    }
