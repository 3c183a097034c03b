"""The whole model of a worker that has a module of its own."""

from __future__ import annotations

from collections.abc import Callable

from rainband.model.flat_parameters import Flat
from rainband.protocol.messages import Message, Peer, Welcome
from rainband.strategy import Port
from rainband.tasks.task import Data, Task
from rainband.worker.client import Client
from rainband.worker.session import WorkerModel
from rainband.worker.worker import ModuleWorker


class ModuleModel(WorkerModel):
    """Computes gradients of a task with its own module."""

    def __init__(self, num_workers: int, task: Task, data: Data, flat: Flat) -> None:
        self.num_workers = num_workers
        self.task = task
        self.data = data
        self.flat = flat

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell)

    def worker(self, index: int, client: Client) -> ModuleWorker:
        return ModuleWorker(index, self.num_workers, self.task, self.data, self.flat.module, client)
