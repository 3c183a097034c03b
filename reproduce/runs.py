"""Tools of all reproductions: simulated runs with real gradients, means over seeds, figures and reports."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rainband.fit import fit
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, compute_model
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.run import SimulatedResult
from rainband.tasks.load import load_task

FIGURES = Path(__file__).parent / "figures"
TASKS: dict[str, dict[str, Any]] = {"digits": {}, "mlp": {"parameters": "0.1M", "samples": 16384}}


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

    def seconds_to(self, loss: float) -> float | None:
        """Return the virtual seconds until the reported training loss first fell below `loss`."""
        return next((at_s for at_s, value in self.losses if value < loss), None)

    def samples_to(self, loss: float) -> int | None:
        """Return the number of samples until the training loss first fell below `loss`."""
        reached_s = self.seconds_to(loss)
        return None if reached_s is None else max(done for at_s, done in self.samples if at_s <= reached_s)


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
) -> dict[str, float]:
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
    last = result.history[-1]
    accuracy = 100 * result.metrics["accuracy"]
    return {
        "error": 100 - accuracy if accuracy == accuracy else 90.0,
        "pushed_mb": last.pushed_bytes / 1e6,
        "fewer_bytes": (last.pushed_bytes + last.saved_bytes) / max(1, last.pushed_bytes),
    }


def over_seeds(seeds: Iterable[int], one: Callable[[int], float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of one number over seeds."""
    return mean_and_spread([one(seed) for seed in seeds])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some runs, and half the width of its 95 % confidence interval (Student's t)."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26, 12: 2.20, 16: 2.13}
    nearest = max(number for number in t if number <= len(values))
    return statistics.fmean(values), t[nearest] * statistics.stdev(values) / math.sqrt(len(values))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation; infinity and 0 if some value was never reached."""
    mean = statistics.fmean(values)
    return mean, statistics.pstdev(values) if math.isfinite(mean) else 0.0


def report(claim: str, found: str, holds: bool) -> None:
    """Print the result next to the claim."""
    print(f"claim   {claim}\nfound   {found}\n{'holds' if holds else 'MISSED'}\n")


def arguments(name: str, about: str | None, seeds: int = 3) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m reproduce.{name}", description=(about or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=seeds, help=f"runs of each kind (default {seeds})")
    parser.add_argument("--figure", type=Path, default=FIGURES / f"{name}.png", help="where to draw")
    return parser.parse_args()


def draw(
    path: Path, title: str, x: str, y: str, lines: dict[str, Sequence[tuple[float, float, float]]], **how: Any
) -> None:
    """Draw one line per name, with points (x, mean, spread)."""
    draw_panels(path, title, x, {y: lines}, **how)


def draw_panels(
    path: Path, title: str, x: str, panels: dict[str, dict[str, Sequence[tuple[float, float, float]]]], **how: Any
) -> None:
    """Draw panels side by side, one for each quantity y, with the same x."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(2 + 4 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axes, (y, lines) in zip(all_axes[0], panels.items(), strict=True):
        for name, points in lines.items():
            xs, means, spreads = zip(*points, strict=True)
            axes.errorbar(xs, means, yerr=spreads, label=name, marker="o", capsize=3)
        axes.set(title=title, xlabel=x, ylabel=y, **how)
        if how.get("xscale") == "log":  # label the measured values, not powers of ten
            tried = sorted({point[0] for points in lines.values() for point in points})
            axes.set_xticks(tried, [f"{value:g}" for value in tried])
            axes.set_xticks([], minor=True)
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure  {path}")
