"""A worker whose parameters are in memory that all workers share, and which updates them in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.protocol.layout import Settings
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import BlockReady, LeaseEnd, Message, Peer, ReportRequest, Welcome
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.ports import Port
from rainband.runtimes.hogwild.memory import SharedParameters, offsets_of
from rainband.strategy import Batch, BatchPart
from rainband.tasks.task import Data, Task
from rainband.transports.shared_memory import SharedSegment
from rainband.worker.client import Client
from rainband.worker.worker import Compute, ModuleWorker
from rainband.worker.worker_model import ModuleModel

CHECK_INTERVAL_S = 0.05  # at which a worker that never waits checks for messages


# size: it inherits every operation of a worker
class MemoryClient(Client):
    """A client without servers: first values are written to shared memory, whose tables replace answers."""

    def __init__(
        self, me: Peer, welcome: Welcome, flat: Flat, memory: SharedParameters, tell: Callable[[Message], None]
    ) -> None:
        super().__init__(me, welcome.plan, flat, welcome.blocks, (), (), tell)
        self.memory = memory

    def load_memory(self, values: Sequence[Tensor]) -> None:
        """Write the first values, and report that."""
        for vectors in self.memory.models:
            for vector, first in zip(vectors, values, strict=True):
                vector.copy_(first)
        self.tell(BlockReady(0))

    def load(self, state: object = None) -> None:
        """Write this worker's own parameters as the first values."""
        self.load_memory(self.flat.vectors)


def is_refused(client: MemoryClient, worker: int, batch: Batch) -> bool:
    """Return True, and give the portion back, if the batch's lease was revoked: another worker processes it."""
    if not client.memory.is_fenced(batch):
        return False
    client.memory.refuse(worker)
    if batch.portion in client.leases.held:
        client.leases.give_back(batch.portion, LeaseEnd.REVOKED)
    return True


def settle(client: MemoryClient, gradient: Gradient) -> None:
    """Count a batch whose step is in the memory, or that was skipped."""
    client.stats.acked += 1
    if client.memory.is_complete(gradient.batches[0].portion):
        client.tell(ReportRequest())  # so that the hogwild server reports the progress
    client.leases.settle(gradient.push_id())


# size: it inherits the state of a worker, and adds what it has read
class MemoryWorker(ModuleWorker):
    """A worker that updates the shared parameters."""

    client: MemoryClient
    began_at = 0  # number of updates in the memory when it began to compute

    def gradient(self, batch: Batch | BatchPart) -> Compute:
        self.began_at = self.client.memory.version
        return Compute(self, batch)

    def tensors(self) -> list[Tensor | None]:
        """Return the gradients as autograd left them. Of a sparse one, only its rows are written."""
        grads = [parameter.grad for parameter in self.flat.parameters]
        return [g.coalesce() if g is not None and g.layout is torch.sparse_coo else g for g in grads]

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule) -> InPlace:  # type: ignore[override]
        shared = self.flat.over(self.client.memory.vectors).parameter_views
        lr = spec.settings["lr"]
        assert isinstance(lr, int | float), "every strategy's optimizer has a learning rate"
        return InPlace(self, shared, lr, schedule)


class InPlace:
    """Updates shared parameters: w -= lr * g, without locks."""

    def __init__(self, worker: MemoryWorker, shared: Sequence[Tensor], lr: float, schedule: Schedule) -> None:
        self.worker = worker
        self.client = worker.client
        self.memory = worker.client.memory
        self.schedule = schedule
        layout = worker.flat.layout
        rates = [_rate(number, group, lr) for number, group in enumerate(layout.groups)]
        self.parameters = [(values, rates[spec.group]) for values, spec in zip(shared, layout.parameters, strict=True)]

    def step(self, gradient: Gradient) -> None:
        (batch,) = gradient.batches
        index, memory = self.worker.rank, self.memory
        if is_refused(self.client, index, batch):
            return
        if gradient.is_finite:
            memory.begin(index, batch)
            self._add(
                gradient.tensors,
                memory.lr_factor * self.schedule.scale(self.worker.plan.progress(batch.portion, batch.k)),
            )
            memory.wrote(index, batch, max(0, memory.version - self.worker.began_at))
        else:
            memory.skip(batch)
        settle(self.client, gradient)

    def _add(self, tensors: Sequence[Tensor | None], factor: float) -> None:
        for (values, rate), tensor in zip(self.parameters, tensors, strict=True):
            if tensor is not None:
                add_in_place(values, tensor, -rate * factor)


@torch.no_grad()
def add_in_place(values: Tensor, tensor: Tensor, factor: float) -> None:
    """Add `factor` times a tensor to shared memory; of a sparse tensor only its rows are written."""
    values.add_(tensor, alpha=factor)


def _rate(number: int, group: Settings, lr: float) -> float:
    """Return the learning rate of a parameter group, which may have no other setting."""
    if other := {name: value for name, value in group.items() if name != "lr" and value}:
        others = ", ".join(f"{name}={value}" for name, value in other.items())
        raise ValueError(
            f"parameter group {number} has {others}, and hogwild supports only lr: leave it out, or choose downpour."
        )
    rate = group.get("lr", lr)
    assert isinstance(rate, int | float), "torch.optim has checked it"
    return float(rate)


class MemoryModel(ModuleModel):
    """A model whose parameters are in shared memory, the inherited file `fd`."""

    def __init__(self, num_workers: int, task: Task, data: Data, flat: Flat, fd: int) -> None:
        refuse_other_devices(flat)
        super().__init__(num_workers, task, data, flat)
        self.fd = fd

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        num_bytes = offsets_of(welcome.blocks, welcome.plan, self.num_workers).num_bytes
        segment = SharedSegment.open(self.fd, num_bytes, writable=True)
        memory = SharedParameters(segment.mapping, welcome.blocks, welcome.plan, self.num_workers)
        return MemoryClient(me, welcome, self.flat.over(memory.vectors), memory, tell)

    def load(self, client: Client) -> None:
        assert isinstance(client, MemoryClient)
        client.load_memory(self.flat.vectors)

    async def started(self, client: Client) -> None:
        client.flat.attach()

    def worker(self, index: int, client: Client) -> ModuleWorker:
        return MemoryWorker(index, self.num_workers, self.task, self.data, self.flat.module, client)

    def only_copy(self, worker: ModuleWorker) -> None:
        """Return None: the coordinator has the memory, too."""


def refuse_other_devices(flat: Flat) -> None:
    others = {vector.device for vector in flat.layout.vectors} - {"cpu"}
    if others:
        raise ValueError(
            f"the model is on {', '.join(sorted(others))}, and memory that workers share requires the CPU: build it "
            "there, or choose downpour."
        )


class MessageCheck:
    """Handles messages at intervals, because a worker that always has work never waits."""

    def __init__(self, wait: Callable[[float], object], then: Callable[[], None] | None) -> None:
        self.wait = wait
        self.then = then
        self.next_at = time.monotonic() + CHECK_INTERVAL_S

    def before_step(self) -> None:
        if time.monotonic() >= self.next_at:
            self.wait(0.0)
            self.next_at = time.monotonic() + CHECK_INTERVAL_S
        if self.then is not None:
            self.then()
