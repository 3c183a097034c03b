"""Runs that the coordinator leads, in virtual time; and what one process computes, to compare them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.coordinator.coordinator import RunSettings
from rainband.full_batch.line_search import Trial, armijo, strong_wolfe
from rainband.model.flat_parameters import Flat
from rainband.observer import Observer
from rainband.protocol import events
from rainband.protocol.messages import COORDINATOR, Message, Peer
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.faults import parse
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.runtimes.simulation.run import scenario_of
from rainband.server.server import Server
from rainband.strategies.sandblaster import Sandblaster
from rainband.tasks.task import TensorData

TIMEOUT_S = 1.0
EXACT = {"gradient_tolerance": 0.0, "loss_tolerance": 0.0}
MODEL = ClusterModel(
    NetworkModel(latency_s=0.001, bytes_per_s=1e8, jitter_s=0.002),
    ComputeModel(kind="exponential", step_s=0.02),
    NodeModel(message_s=0.0001),
)


def with_compute(**settings: Any) -> ClusterModel:
    return ClusterModel(MODEL.network, ComputeModel(**settings), MODEL.nodes)


# ---- tasks in float64 ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logistic:
    """Two classes that overlap, in a few dimensions; the last batch is short."""

    batch_size: int = 4
    epochs: int = 1
    samples: int = 58
    dimension: int = 20

    def model(self) -> nn.Module:
        model = nn.Linear(self.dimension, 1).double()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    def data(self) -> TensorData:
        random = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, self.dimension, generator=random, dtype=torch.float64)
        truth = torch.randn(self.dimension, generator=random, dtype=torch.float64)
        y = (x @ truth + 2 * torch.randn(self.samples, generator=random, dtype=torch.float64) > 0).double()
        return TensorData(x, y)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class SmallNet(Logistic):
    """A sine, fitted by a small net."""

    samples: int = 50

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def data(self) -> TensorData:
        x = torch.linspace(-3, 3, self.samples, dtype=torch.float64)[:, None]
        return TensorData(x, torch.sin(x))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])


class Valley(nn.Module):
    """A point in the plane that Rosenbrock's valley is in, far from its end."""

    def __init__(self, pairs: int, scales: tuple[float, float]) -> None:
        super().__init__()
        self.scales = torch.tensor(scales, dtype=torch.float64)
        self.w = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(pairs, 1) / self.scales)

    def forward(self, which: Tensor) -> Tensor:
        x, y = (self.w[which] * self.scales).unbind(1)
        return 100 * (y - x**2) ** 2 + (1 - x) ** 2


@dataclass(frozen=True)
class Rosenbrock(Logistic):
    """Each sample is one pair of coordinates; all end at (1, 1)."""

    samples: int = 9
    scales: tuple[float, float] = (1.0, 1.0)

    def model(self) -> nn.Module:
        return Valley(self.samples, self.scales)

    def data(self) -> TensorData:
        return TensorData(torch.arange(self.samples))

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        values: Tensor = model(batch[0])
        return values.mean()


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """The results of a run."""

    iterated: list[events.IterationDone] = field(default_factory=list)
    iterates: list[Tensor] = field(default_factory=list)  # the parameters after each iteration
    cluster: SimulatedCluster = field(init=False)
    vectors: int = 0  # the most that a block had, its parameters included

    @property
    def end(self) -> str:
        return self.iterated[-1].end


def parameters(cluster: SimulatedCluster) -> Tensor:
    """All parameters, in the order of the flat vector, without what lies between them."""
    pieces = []
    for _, block in sorted((b.index, b) for node in cluster.servers.values() for b in node.server.blocks.values()):
        pieces += [block.values[segment.start : segment.stop] for segment in block.spec.segments]
    return torch.cat(pieces).clone()


def led(
    strategy: Any,
    task: Any,
    num_workers: int = 2,
    num_servers: int = 2,
    model: ClusterModel = MODEL,
    faults: str = "",
    seed: int = 0,
    run: bool = True,
    traffic: Observer | None = None,
) -> Ran:
    """Run it to its end in virtual time."""
    flat = Flat(task.model())
    scenario = scenario_of(strategy, task, flat, task.data(), num_workers)
    settings = RunSettings(num_workers=num_workers, num_servers=num_servers, failure_timeout_s=TIMEOUT_S)
    shuffle = Random(seed) if seed else None

    def show(event: events.AnyEvent) -> None:
        if isinstance(event, events.IterationDone):
            ran.iterated.append(event)
            ran.iterates.append(parameters(ran.cluster))

    def observe(peer: Peer) -> Observer | None:
        return VectorCounter(ran) if peer.role == "server" else traffic if peer == COORDINATOR else None

    notes = Notes(show=show, observe=observe)
    ran = Ran()
    ran.cluster = SimulatedCluster(scenario, settings, model, notes, TIMEOUT_S / 5, shuffle, seed)
    FaultInjector(ran.cluster, parse(faults), seed)
    ran.cluster.start()
    if run:
        ran.cluster.run(until_s=600.0)
    return ran


class VectorCounter(Observer):
    """Counts the vectors that a server's blocks have after each command."""

    def __init__(self, ran: Ran) -> None:
        self.ran = ran
        self.server: Server | None = None

    def assigned(self, server: Server) -> None:
        self.server = server

    def received(self, message: Message) -> None:
        if self.server is not None:
            sizes = [len(block.parameters.vectors.named) for block in self.server.blocks.values()]
            self.ran.vectors = max([self.ran.vectors, *sizes])


# ---- one process -----------------------------------------------------------------------------------------------------

Objective = Callable[[Tensor], tuple[float, Tensor]]


def objective(task: Any, weight_decay: float = 0.0) -> tuple[Objective, Tensor]:
    """The loss over all samples and its gradient, as functions of one vector; and the vector to start from."""
    module, data = task.model(), task.data()
    batch = data.batch(range(len(data)))
    params = list(module.parameters())

    def loss_and_gradient(w: Tensor) -> tuple[float, Tensor]:
        nn.utils.vector_to_parameters(w, params)
        loss = task.loss(module, batch) + 0.5 * weight_decay * sum((p**2).sum() for p in params)
        gradient = torch.autograd.grad(loss, params)
        return float(loss.detach()), torch.cat([g.reshape(-1) for g in gradient])

    return loss_and_gradient, nn.utils.parameters_to_vector(params).detach().clone()


def plain_lbfgs(strategy: Sandblaster, f: Objective, w: Tensor) -> list[Tensor]:
    """L-BFGS as in a textbook, in one process: the parameters after each iteration, the first ones first."""
    (loss, g), pairs, iterates = f(w), list[tuple[Tensor, Tensor]](), [w]
    for _ in range(strategy.iterations):
        d, alphas = -g, []
        for s, y in reversed(pairs):
            alphas.append(s.dot(d) / y.dot(s))
            d = d - alphas[-1] * y
        if pairs:
            d = d * (pairs[-1][0].dot(pairs[-1][1]) / pairs[-1][1].dot(pairs[-1][1]))
        for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
            d = d + (alpha - y.dot(d) / y.dot(s)) * s
        step, loss, after = plain_search(strategy, f, w, d, loss, g, 1.0 if pairs else min(1.0, 1 / float(g.norm())))
        pair = step * d, after - g
        w, g = w + step * d, after
        pairs = [*pairs, pair][-strategy.history :] if pair[0].dot(pair[1]) > 0 else pairs
        iterates.append(w)
    return iterates


def plain_search(
    strategy: Sandblaster, f: Objective, w: Tensor, d: Tensor, loss: float, g: Tensor, first: float
) -> tuple[float, float, Tensor]:
    start = Trial(0.0, loss, float(g.dot(d)))
    if strategy.line_search == "armijo":
        search = armijo(start, first, strategy.c1)
    else:
        search = strong_wolfe(start, first, strategy.c1, strategy.c2, float(d.norm()))
    step = next(search)
    while True:
        loss, after = f(w + step * d)
        try:
            step = search.send(Trial(step, loss, float(after.dot(d))))
        except StopIteration:
            return step, loss, after
