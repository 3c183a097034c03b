"""Hogwild in the simulation: workers share one memory, and a worker reads it when its step begins.

A worker reads all parameters at the moment it begins to compute, and adds its whole step at the moment it has computed.
So gradients are as stale as in a real run, but no addition is lost or torn, as happens in real memory.
"""

from __future__ import annotations

from collections.abc import Callable

from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.ports import Port
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.hogwild.worker import MemoryClient, MemoryWorker
from rainband.runtimes.simulation.gradients import GradientCompute
from rainband.runtimes.simulation.shared_module import SharedModule
from rainband.strategy import Batch
from rainband.tasks.task import Data, Task
from rainband.worker.client import Client
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import Buffers


class ReadingWorker(MemoryWorker):
    """Computes with a copy of the memory, taken when a step begins."""

    def gradient(self, batch: Batch) -> Compute:
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


def copy_memory(client: MemoryClient) -> None:
    """Copy the memory into the worker's own parameters."""
    for own, vector in zip(client.flat.vectors, client.memory.vectors, strict=True):
        own.copy_(vector)
