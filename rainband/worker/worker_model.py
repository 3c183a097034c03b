"""A worker's model: how its first values are sent, and how it is saved and evaluated at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rainband.model.flat_parameters import Flat
from rainband.model.save import save_model, saving
from rainband.protocol.messages import Conclude, LeaseEnd, Message, Peer, Welcome
from rainband.protocol.ports import Port
from rainband.strategy import Strategy, Worker
from rainband.tasks.task import Data, Task
from rainband.worker.client import Client
from rainband.worker.periodic_eval import measure
from rainband.worker.worker import ModuleWorker

if TYPE_CHECKING:
    from torch import nn

Buffers = bytes | memoryview | None


class RunningWorker(Worker, Protocol):
    """A worker with what is reported when its strategy has ended."""

    client: Client

    @property
    def seen(self) -> int:
        """Samples (or steps) that its buffers have followed."""

    def buffers(self) -> bytes: ...


AnyWorker = TypeVar("AnyWorker", bound=RunningWorker)


class WorkerModel(Generic[AnyWorker]):
    """The model a worker computes with. Methods that return nothing may be left as they are."""

    stays = True  # after saving, until the coordinator ends the process
    part = 0  # of a model that several workers compute together

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        raise NotImplementedError

    def worker(self, index: int, client: Client) -> AnyWorker:
        """Return the worker that the strategy gets."""
        raise NotImplementedError

    def own_module(self) -> nn.Module | None:
        """Return the module whose buffers must begin like those of the other workers; None: they surely do."""
        return None

    def module_of(self, worker: AnyWorker) -> nn.Module:
        """Return the module to save if the user's code has raised."""
        return worker.client.flat.module

    def load(self, client: Client) -> None:
        """Send the first values to the servers."""
        client.load()

    async def started(self, client: Client) -> None:
        """Prepare for training; every block has its first values."""

    async def train(self, strategy: Strategy, worker: AnyWorker) -> None:
        """Run the strategy until it returns."""
        await strategy.run(worker)

    async def ended(self, worker: AnyWorker) -> None:
        """Finish what the strategy left open: it has returned, or was stopped."""

    def return_leases(self, worker: AnyWorker) -> None:
        """Return the leases whose batches this worker will not process."""
        worker.client.leases.give_all_back(LeaseEnd.STOPPED)

    def has_order(self, worker: AnyWorker) -> bool:
        """Return True if another worker of the replica waits for this one, whose strategy has ended."""
        return False

    async def follow_order(self, worker: AnyWorker) -> None:
        """Do what the other worker of the replica waits for."""

    async def conclude(self, worker: AnyWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        """Save the model with the final parameters; return its metrics, or None if another worker reports them."""
        raise NotImplementedError


class ModuleModel(WorkerModel[ModuleWorker]):
    """A module with the task and the data that it is trained on."""

    def __init__(self, num_workers: int, task: Task, data: Data, flat: Flat) -> None:
        self.num_workers = num_workers
        self.task = task
        self.data = data
        self.flat = flat

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell)

    def own_module(self) -> nn.Module | None:
        return self.flat.module

    def worker(self, index: int, client: Client) -> ModuleWorker:
        return ModuleWorker(index, self.num_workers, self.task, self.data, self.flat.module, client)

    async def ended(self, worker: ModuleWorker) -> None:
        if worker.rounds is not None:
            await worker.rounds.leave()

    def return_leases(self, worker: ModuleWorker) -> None:
        super().return_leases(worker)
        if worker.accounting is not None:
            worker.accounting.report_rest()
        if worker.rounds is not None:
            worker.rounds.tell()

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        with saving(conclude.path, self.only_copy(worker)):  # first: an error of the evaluation must not lose the model
            await pull_final(worker.client)
            if buffers is not None:
                worker.set_buffers(buffers)
            save_model(worker.module, conclude.path)
        return self.evaluate(worker)

    def only_copy(self, worker: ModuleWorker) -> nn.Module | None:
        """Return the module if no server has its parameters: if they cannot be saved, they are lost."""
        return None if worker.client.servers.ports else worker.module

    def evaluate(self, worker: ModuleWorker) -> dict[str, float]:
        return measure(worker.task, worker.module)


async def pull_final(client: Client) -> None:
    """Copy the parameters that are to be saved into the model."""
    if client.servers.blocks and client.servers.ports:
        await client.final_parameters()


async def pull_latest(client: Client) -> None:
    """Copy the parameters as the servers have them now into the model."""
    if client.servers.blocks and client.servers.ports:
        await client.pull_latest()
