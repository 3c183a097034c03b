"""Asynchrony acts as momentum: g workers with exponential computing times add 1 - 1/g (Hadjis et al. 2016, Omnivore).

On a quadratic without noise, the mean over many runs of asynchronous SGD follows SGD with momentum:

    E x_{t+1} - E x_t  =  m (E x_t - E x_{t-1})  -  (1 - m) a h E x_t              with  m = 1 - 1/g

Here both factors, m and 1 - m, are fitted by least squares to simulated runs, independently of each other. Noise in the
mean of few runs biases the fit towards less momentum, hence many runs with long steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rainband.coordinator.coordinator import RunSettings
from rainband.model.flat_parameters import Flat
from rainband.observer import Observer
from rainband.protocol.messages import Push
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.run import scenario_of
from rainband.server.block import Block
from rainband.strategies.soft_sync import SoftSync
from rainband.tasks.quadratic import Quadratic
from reproduce.runs import arguments, draw, report

GROUPS = (2, 4, 8)  # not 1: its path is a plain decay, which any momentum fits
UPDATES, RUNS_PER_SEED, RATE = 30, 200, 0.2
# A few more updates than are used, because at the end some workers have no work.
TASK = Quadratic(dimension=1, samples=UPDATES + 3 * max(GROUPS), batch_size=1, noise=0.0, condition=1.0, epochs=1)
MODEL = ClusterModel(
    NetworkModel(latency_s=0.0, bytes_per_s=float("inf")),
    ComputeModel(kind="exponential", step_s=1.0),
    NodeModel(message_s=0.0),
)


def trajectory(groups: int, seed: int) -> NDArray[np.float64]:
    """Return the distance from the minimum after each update of one run."""
    flat, data = Flat(TASK.model()), TASK.data()
    scenario = scenario_of(SoftSync(n=groups, scaling="none", lr=RATE, guard=False), TASK, flat, data, groups)
    path: list[float] = []
    observer = PathRecorder(path)
    notes = Notes(observe=lambda peer: observer)
    runtime = SimulatedCluster(scenario, RunSettings(num_workers=groups, num_servers=1), MODEL, notes, seed=seed)
    runtime.start()
    runtime.run()
    target = float(data.batch(np.arange(1))[0][0])
    return np.array(path[:UPDATES]) - target


class PathRecorder(Observer):
    """Records the parameter before each update."""

    def __init__(self, path: list[float]) -> None:
        self.path = path

    def applying(self, block: Block, gradient: Tensor | None, pushes: Sequence[Push]) -> None:
        self.path.append(float(block.values[0]))


def fitted(groups: int, seed: int) -> tuple[float, float]:
    """Return the fitted momentum and factor of the learning rate, which should be 1 - momentum."""
    mean = np.mean([trajectory(groups, seed * RUNS_PER_SEED + run) for run in range(RUNS_PER_SEED)], axis=0)
    change = np.diff(mean)
    before = np.stack([change[:-1], -RATE * mean[1:-1]], axis=1)
    (momentum, share), *_ = np.linalg.lstsq(before, change[1:], rcond=None)
    return float(momentum), float(share)


def main() -> None:
    asked = arguments("asynchrony_is_momentum", __doc__)
    points, exact = [], []
    for groups in GROUPS:
        found = np.array([fitted(groups, seed) for seed in range(asked.seeds)])
        (momentum, share), (spread, spread_of_share) = found.mean(axis=0), found.std(axis=0)
        points.append((groups, momentum, spread))
        exact.append((groups, 1 - 1 / groups, 0.0))
        print(
            f"g={groups}:  momentum {momentum:.3f} ± {spread:.3f} (1 - 1/g = {1 - 1 / groups:.3f}),  "
            f"rate times {share:.3f} ± {spread_of_share:.3f} (1/g = {1 / groups:.3f})",
            flush=True,
        )
    off = max(abs(p[1] - e[1]) / e[1] for p, e in zip(points, exact, strict=True))
    report(
        "asynchrony of g groups is a momentum of 1 - 1/g",
        f"fitted within {100 * off:.0f} % of it for g = 2 to 8",
        off < 0.1,
    )
    draw(asked.figure, "momentum of asynchrony", "g workers", "momentum", {"fitted": points, "1 - 1/g": exact})


if __name__ == "__main__":
    main()
