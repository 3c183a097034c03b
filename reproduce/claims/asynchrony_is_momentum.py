"""Asynchrony acts as momentum: g workers with exponential computing times add 1 - 1/g (Hadjis et al. 2016, Omnivore).

On a quadratic without noise, the mean over many runs of asynchronous SGD follows SGD with momentum:

    E x_{t+1} - E x_t  =  m (E x_t - E x_{t-1})  -  (1 - m) a h E x_t              with  m = 1 - 1/g

Here both factors, m and 1 - m, are fitted by least squares to simulated runs, independently of each other. Noise in the
mean of few runs biases the fit towards less momentum, hence many runs with long steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from reproduce.claim import Check, Claim, Method, Results, Values

GROUPS = (2, 4, 8)  # not 1: its path is a plain decay, which any momentum fits
UPDATES, RATE = 30, 0.2
# A few more updates than are used, because at the end some workers have no work.
TASK = Quadratic(dimension=1, samples=UPDATES + 3 * max(GROUPS), batch_size=1, noise=0.0, condition=1.0, epochs=1)


def model(kind: str) -> ClusterModel:
    network = NetworkModel(latency_s=0.0, bytes_per_s=float("inf"))
    return ClusterModel(network, ComputeModel(kind=kind, step_s=1.0), NodeModel(message_s=0.0))


def trajectory(groups: int, seed: int, kind: str) -> NDArray[np.float64]:
    """Return the distance from the minimum after each update of one run."""
    flat, data = Flat(TASK.model()), TASK.data()
    scenario = scenario_of(SoftSync(n=groups, scaling="none", lr=RATE, guard=False), TASK, flat, data, groups)
    path: list[float] = []
    observer = PathRecorder(path)
    notes = Notes(observe=lambda peer: observer)
    runtime = SimulatedCluster(scenario, RunSettings(num_workers=groups, num_servers=1), model(kind), notes, seed=seed)
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


def point(seed: int, x: float, runs: int, kind: str) -> Values:
    """Return the fitted momentum and factor of the learning rate, which should be 1 - momentum, and how far off."""
    groups = int(x)
    mean = np.mean([trajectory(groups, seed * runs + run, kind) for run in range(runs)], axis=0)
    change = np.diff(mean)
    before = np.stack([change[:-1], -RATE * mean[1:-1]], axis=1)
    (momentum, share), *_ = np.linalg.lstsq(before, change[1:], rcond=None)
    exact = 1 - 1 / groups
    off = {"momentum_off": 100 * abs(momentum / exact - 1), "share_off": 100 * abs(share * groups - 1)}
    return {"momentum": momentum, "share": share, **off}


def worst(measure: str, method: str = "exponential times") -> Any:
    def over_groups(r: Results) -> Any:
        return np.max([r(method, measure, groups) for groups in GROUPS], axis=0)

    return over_groups


CLAIM = Claim(
    paper="Hadjis et al. 2016, Omnivore",
    text="asynchrony of g workers acts as a momentum of 1 - 1/g",
    methods=(Method("exponential times", {"kind": "exponential"}), Method("equal times", {"kind": "constant"})),
    settings={"runs": 200},
    tasks={"": {}},
    point=point,
    x=GROUPS,
    x_label="g workers",
    shown={"momentum": "fitted momentum", "share": "fitted factor of the rate"},
    checks=(
        Check("the momentum, at the worst of g = 2, 4, 8", worst("momentum_off"), below=10.0, unit="% off 1 - 1/g"),
        Check("the factor of the rate", worst("share_off"), below=10.0, unit="% off 1/g"),
        Check(
            "with equal times, for which it is not claimed, the momentum",
            worst("momentum_off", "equal times"),
            above=10.0,
            unit="% off",
            control=True,
        ),
    ),
)
