"""Workers with one model each in shared memory, which they average in pairs.

A worker computes at a copy of its model. To change models, it takes the locks of its own and its partner's, in the
order of their ranks, so workers cannot wait for each other in a circle. The locks are those of the memory file: the
kernel releases them when a process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.model_vector import ModelVector
from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.ports import Port
from rainband.protocol.steps import Work
from rainband.runtimes.hogwild.memory import SharedParameters, offsets_of
from rainband.runtimes.hogwild.worker import MemoryClient, is_refused, refuse_other_devices, settle
from rainband.strategy import Batch, BatchPart
from rainband.tasks.task import Data, Task
from rainband.transports.shared_memory import SharedSegment
from rainband.worker.client import Client
from rainband.worker.worker import Compute, ModuleWorker, WorkerParameters
from rainband.worker.worker_model import Buffers, ModuleModel

LOOK_AGAIN_S = 0.0002
PATIENCE_S = 1.0  # with a lock: a longer one is that of a worker that was stopped in the middle of an exchange


class ModelLocks:
    """The locks of the models, one byte of the memory file for each."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @contextmanager
    def of(self, *ranks: int) -> Iterator[None]:
        """Hold the locks of these models."""
        try:
            for rank in sorted(set(ranks)):
                self._take(rank)
            yield
        finally:
            for rank in set(ranks):
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, rank)

    def _take(self, rank: int) -> None:
        """Take a lock; go on without it if another worker keeps it for too long."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    return
            time.sleep(LOOK_AGAIN_S)


class PairExchange(Work):
    """The averaging of two models, and the step that follows it."""

    share = 0.0
    label = "average"

    def __init__(self, params: PairParameters, partner: int, step: ModelVector, gradient: Gradient) -> None:
        self.params = params
        self.partner = partner
        self.step = step
        self.gradient = gradient
        self.is_done = False
        if partner != params.rank:
            self.exchanged_bytes = sum(parameter.nbytes for parameter in params.flat.parameters)

    def perform(self) -> None:
        self.params.exchange(self.partner, self.step, self.gradient)
        self.params.client.stats.sent_bytes += self.exchanged_bytes
        self.is_done = True

    def __await__(self) -> Generator[PairExchange, None, None]:
        while not self.is_done:
            yield self


class PairParameters(WorkerParameters):
    """A worker's copy of its model, which is in shared memory with those of the others."""

    def __init__(self, rank: int, client: MemoryClient, locks: ModelLocks | None) -> None:
        super().__init__(client.flat, client.observer)
        self.rank = rank
        self.client = client
        self.locks = locks  # none are needed where workers take turns
        self.meetings = 0  # of its model with others, when it was read last

    def _locked(self, *ranks: int) -> AbstractContextManager[None]:
        return nullcontext() if self.locks is None else self.locks.of(*ranks)

    def read(self) -> None:
        """Copy the model as it is now."""
        memory = self.client.memory
        with self._locked(self.rank):
            self.meetings = memory.meetings(self.rank)
            copy_into(self.flat.vectors, memory.models[self.rank])

    async def average_with(self, partner: int, step: ModelVector, gradient: Gradient) -> None:
        await PairExchange(self, partner, step, gradient)

    def exchange(self, partner: int, step: ModelVector, gradient: Gradient) -> None:
        """Average with the partner's model and add the step, unless the batch's lease was revoked."""
        (batch,) = gradient.batches
        memory, own = self.client.memory, self.client.memory.models[self.rank]
        with self._locked(self.rank, partner):
            if is_refused(self.client, self.rank, batch):
                return
            memory.begin(self.rank, batch)
            if partner != self.rank:
                self._average(partner)
            copy_into(self.flat.vectors, own)
            if gradient.is_finite:
                self.replace(self.copy() + step)
                copy_into(own, self.flat.vectors)
                memory.wrote(self.rank, batch, memory.meetings(self.rank) - self.meetings)
            else:
                memory.skip(batch)
                memory.end(self.rank)
        settle(self.client, gradient)

    @torch.no_grad()
    def _average(self, partner: int) -> None:
        """Replace both models by their mean."""
        memory, apart = self.client.memory, 0.0
        for mine, theirs in zip(memory.models[self.rank], memory.models[partner], strict=True):
            apart += float((mine - theirs).square().sum(dtype=torch.float64))
            torch.add(mine, theirs, out=mine)
            mine.mul_(0.5)
            theirs.copy_(mine)
        memory.met(partner)
        # Two models of K are sqrt(2 K / (K - 1)) times as far from each other as from the mean of all.
        number = len(memory.models)
        self.client.stats.disagreement = math.sqrt(apart * (number - 1) / (2 * number))


class PairWorker(ModuleWorker):
    """A worker with a model in shared memory."""

    params: PairParameters
    client: MemoryClient

    def gradient(self, batch: Batch | BatchPart) -> Compute:
        self.params.read()
        return Compute(self, batch)


@torch.no_grad()
def copy_into(vectors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for vector, value in zip(vectors, values, strict=True):
        vector.copy_(value)


def take_mean(client: MemoryClient) -> None:
    """Copy the mean of all models into the worker's own parameters."""
    copy_into(client.flat.vectors, client.memory.mean())


class PairModel(ModuleModel):
    """A model of which each worker has its own in shared memory, the inherited file `fd`."""

    def __init__(self, num_workers: int, task: Task, data: Data, flat: Flat, fd: int) -> None:
        refuse_other_devices(flat)
        super().__init__(num_workers, task, data, flat)
        self.fd = fd
        self.lock_fd = os.dup(fd)  # mapping the memory closes the other one

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        sizes = welcome.blocks, welcome.plan, self.num_workers, self.num_workers
        segment = SharedSegment.open(self.fd, offsets_of(*sizes).num_bytes, writable=True)
        return MemoryClient(me, welcome, self.flat, SharedParameters(segment.mapping, *sizes), tell)

    def load(self, client: Client) -> None:
        assert isinstance(client, MemoryClient)
        client.load_memory(self.flat.vectors)

    def worker(self, index: int, client: Client) -> ModuleWorker:
        assert isinstance(client, MemoryClient)
        worker = PairWorker(index, self.num_workers, self.task, self.data, self.flat.module, client)
        worker.params = PairParameters(index, client, ModelLocks(self.lock_fd))
        return worker

    async def conclude(self, worker: ModuleWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        assert isinstance(worker.client, MemoryClient)
        take_mean(worker.client)
        return await super().conclude(worker, conclude, buffers)
