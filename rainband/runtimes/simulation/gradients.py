"""The computing of simulated workers: with one module for all of them, or none in timing-only runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

from torch import nn

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.loss_parts import LossParts
from rainband.model.unchanged import same_modes
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.ports import Port
from rainband.runtimes.hogwild.pairs import PairParameters, PairWorker, take_mean
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.hogwild.worker import MemoryClient, MemoryWorker
from rainband.runtimes.simulation.shared_module import EmptyFlat, SharedModule, WrittenGradient
from rainband.runtimes.simulation.worker import SimulatedCompute
from rainband.strategy import Batch, BatchPart
from rainband.tasks.task import Data, Task
from rainband.worker.client import Client
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import Buffers, ModuleModel, pull_final


class GradientCompute(ModuleModel, SimulatedCompute):
    """Computes gradients at the worker's own parameters."""

    writes_once = True  # gradients are written once, for all blocks, where they are sent from

    def __init__(self, shared_module: SharedModule, task: Task, data: Data, num_workers: int) -> None:
        self.shared_module = shared_module
        self.memory = shared_module.memory()
        super().__init__(num_workers, task, data, self.memory.flat)

    def own_module(self) -> None:
        """Return None, because the workers share one module."""

    def worker(self, index: int, client: Client) -> ModuleWorker:
        worker = super().worker(index, client)
        worker.sampler = self.shared_module.sampler(worker.plan)
        worker.microbatches = self.shared_module.microbatches
        return worker

    def attach(self) -> None:
        self.shared_module.attach(self.memory)

    def gradient(self, worker: ModuleWorker, batch: Batch | BatchPart) -> Gradient:
        gradient = worker.compute(batch)
        if isinstance(batch, BatchPart) or not self.writes_once or not gradient.weight:
            return gradient
        return WrittenGradient(gradient, self.memory.flat, self.shared_module.wholes)

    def evaluate(self, worker: ModuleWorker) -> dict[str, float]:
        """Evaluate with the module of all workers, and restore its modes."""
        with same_modes(worker.module):
            return super().evaluate(worker)


class NoGradient(Gradient):
    """A gradient that was not computed: only its batches count."""

    is_finite = True


class TimedWorker(ModuleWorker):
    """A worker without a model."""

    @cached_property
    def loss_parts(self) -> LossParts:
        """Return nothing found: no loss is computed."""
        return LossParts()

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule, counts: bool = True) -> NoOptimizer:  # type: ignore[override]
        return NoOptimizer(self)


class NoOptimizer:
    """Stands in for a worker's optimizer."""

    def __init__(self, worker: ModuleWorker) -> None:
        self.worker = worker

    def step(self, gradient: Gradient) -> None:
        """Change nothing: only count the batch."""
        if self.worker.model_rounds is not None:
            self.worker.model_rounds.processed(gradient)


class TimingOnly(SimulatedCompute):
    """Computes nothing, for runs that simulate only timing."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.flat = cast(Flat, EmptyFlat())
        self.module = nn.Module()

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell)

    def worker(self, index: int, client: Client) -> ModuleWorker:
        nothing = cast(Any, None)
        return TimedWorker(index, self.num_workers, nothing, nothing, self.module, client)

    def gradient(self, worker: ModuleWorker, batch: Batch | BatchPart) -> Gradient:
        if isinstance(batch, BatchPart):
            samples, batch = len(batch.positions), batch.batch
        else:
            samples = worker.plan.samples_in(batch.portion, batch.k)
        worker.client.stats.steps += 1
        worker.client.stats.samples += samples
        return NoGradient([], (batch,), samples, 0.0)

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: object) -> dict[str, float]:
        await pull_final(worker.client)
        return {}


# size: it inherits the state of a worker, and adds what it has read
class ReadingWorker(MemoryWorker):
    """A hogwild worker that reads all parameters when it begins to compute, and adds its whole step at the end.

    So gradients are as stale as in a real run, but no addition is lost or torn, as happens in real memory.
    """

    def gradient(self, batch: Batch | BatchPart) -> Compute:
        copy_memory(self.client)
        return super().gradient(batch)


class HogwildCompute(GradientCompute):
    """Computes gradients at the worker's copy of the memory."""

    def __init__(
        self, shared_module: SharedModule, task: Task, data: Data, num_workers: int, hogwild_server: HogwildServer
    ) -> None:
        super().__init__(shared_module, task, data, num_workers)
        self.hogwild_server = hogwild_server

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        assert self.hogwild_server.memory is not None, "it is made before a worker is welcomed"
        return MemoryClient(me, welcome, self.memory.flat, self.hogwild_server.memory, tell)

    def worker(self, index: int, client: Client) -> ModuleWorker:
        worker = ReadingWorker(index, self.num_workers, self.task, self.data, self.memory.module, client)
        worker.sampler = self.shared_module.sampler(worker.plan)
        return worker

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        assert isinstance(worker.client, MemoryClient)
        copy_memory(worker.client)
        return await super().conclude(worker, conclude, buffers)


class PairCompute(HogwildCompute):
    """Computes gradients at a copy of the worker's own model, which is one of several in the memory."""

    def worker(self, index: int, client: Client) -> ModuleWorker:
        assert isinstance(client, MemoryClient)
        worker = PairWorker(index, self.num_workers, self.task, self.data, self.memory.module, client)
        worker.params = PairParameters(index, client, locks=None)
        worker.sampler = self.shared_module.sampler(worker.plan)
        return worker

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        assert isinstance(worker.client, MemoryClient)
        take_mean(worker.client)
        return await GradientCompute.conclude(self, worker, conclude, buffers)


def copy_memory(client: MemoryClient) -> None:
    """Copy the memory into the worker's own parameters."""
    for own, vector in zip(client.flat.vectors, client.memory.vectors, strict=True):
        own.copy_(vector)
