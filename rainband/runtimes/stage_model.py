"""One worker's submodel of a model that a replica computes together: its end and how it is saved, in every runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rainband.errors import PeerLost
from rainband.model.save import saving
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker
from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.peer_inbox import Tag
from rainband.protocol.ports import Port
from rainband.tasks.task import Data, Task, parameter_groups
from rainband.worker.client import Client
from rainband.worker.worker_model import Buffers, WorkerModel, pull_latest

SAVED: Tag = ("saved",)
VERSIONS: Tag = ("versions",)


class StageModel(WorkerModel[StageWorker]):
    """A submodel. After the strategy has ended, the workers of a replica follow the orders of their leader."""

    links: ReplicaLinks

    def __init__(self, task: Task, data: Data, submodel: Submodel, num_replicas: int) -> None:
        self.task, self.data, self.submodel = task, data, submodel
        self.part = submodel.rank
        self.num_replicas = num_replicas
        self.flat = submodel.flat(parameter_groups(task, submodel.model))
        self.leader_is_lost = False

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell, self.part)

    def worker(self, index: int, client: Client) -> StageWorker:
        return StageWorker(index, self.num_replicas, self.task, self.data, self.submodel, client, self.links)

    def own_module(self) -> nn.Module:
        return self.submodel.module

    async def ended(self, worker: StageWorker) -> None:
        self.links.say_end()
        self.links.forget_ends()

    def return_leases(self, worker: StageWorker) -> None:
        super().return_leases(worker)
        if worker.accounting is not None:
            worker.accounting.report_rest()

    def has_order(self, worker: StageWorker) -> bool:
        return not worker.leads and not self.leader_is_lost and worker.next_order().ready()

    async def follow_order(self, worker: StageWorker) -> None:
        try:
            what, payload = await worker.next_order()
            worker.take_order()
            if what == "answer":
                await worker.answer(payload)
        except PeerLost:
            self.leader_is_lost = True  # the coordinator ends this process

    async def conclude(self, worker: StageWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        """Send the leader this worker's part of the model; the leader saves the whole model and evaluates it."""
        with saving(conclude.path):
            await self._pull_final(worker)
            if buffers is not None:
                worker.set_buffers(buffers)
            mine = self.own_part(conclude.path)
        if not worker.leads:
            self.links.send(0, SAVED, mine)
            return None
        parts = [mine, *[await self.links.receive(other, SAVED) for other in self.links.others]]
        return self.save_whole(worker, parts, conclude.path)

    async def _pull_final(self, worker: StageWorker) -> None:
        """Pull the parameters to save; if the run ended within a round, the last version that all stages have."""
        client = worker.client
        await pull_latest(client)
        if not client.plan.items_per_round:
            return
        mine = sorted({client.pulls.versions[block.index] for block in client.servers.blocks})
        self.links.tell_all(VERSIONS, mine)
        versions = set(mine).union(*[await self.links.receive(other, VERSIONS) for other in self.links.others])
        if mine and len(versions) > 1:  # they differ by one: a block keeps the version before its newest
            await client.pulls.round(min(versions))

    def own_part(self, path: str) -> Any:
        """Return what the leader gets: tensors, or the name of a file that has them."""
        raise NotImplementedError

    def save_whole(self, worker: StageWorker, parts: list[Any], path: str) -> dict[str, float]:
        """Save the whole model, and evaluate it."""
        raise NotImplementedError
