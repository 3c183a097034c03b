"""Workers that share one memory, in virtual time: a worker sees what was there when its step began.

How two writes interleave is modelled step by step: a worker reads all parameters at the moment it begins to compute,
and its addition is made whole at the moment it has computed. So gradients are as stale as they would be; but no
addition is lost to another, and none is cut short, as happens in real memory.
"""

from __future__ import annotations

from collections.abc import Callable

from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.ports import Port
from rainband.runtimes.hogwild.memory import SharedParameters
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
    """It computes with a copy, taken when it begins."""

    def gradient(self, batch: Batch) -> Compute:
        take_over(self.client)
        return super().gradient(batch)


class HogwildCompute(GradientCompute):
    """Computes true gradients at its copy of the memory."""

    def __init__(
        self, shared_module: SharedModule, task: Task, data: Data, num_workers: int, hogwild_server: HogwildServer
    ) -> None:
        super().__init__(shared_module, task, data, num_workers)
        self.hogwild_server = hogwild_server

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return MemoryClient(me, welcome, self.memory.flat, self._memory(), tell)

    def _memory(self) -> SharedParameters:
        assert self.hogwild_server.memory is not None, "it was made before anyone was welcome"
        return self.hogwild_server.memory

    def worker(self, index: int, client: Client) -> ModuleWorker:
        worker = ReadingWorker(index, self.num_workers, self.task, self.data, self.memory.module, client)
        worker.sampler = self.shared_module.sampler(worker.plan)
        return worker

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        assert isinstance(worker.client, MemoryClient)
        take_over(worker.client)
        return await super().conclude(worker, conclude, buffers)


def take_over(client: MemoryClient) -> None:
    """Make what is in the memory the worker's own parameters."""
    for own, vector in zip(client.flat.vectors, client.memory.vectors, strict=True):
        own.copy_(vector)
