"""One worker's share of a model that several compute together: how it is ended and saved, in every runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rainband.errors import PeerLost
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import ShareWorker
from rainband.protocol.messages import Conclude, Message, Peer, Welcome
from rainband.protocol.peer_inbox import Tag
from rainband.protocol.ports import Port
from rainband.tasks.task import Data, Task, parameter_groups
from rainband.worker.client import Client
from rainband.worker.worker_model import Buffers, WorkerModel, pull_latest

SAVED: Tag = ("saved",)


class StageModel(WorkerModel[ShareWorker]):
    """A share of the model; the first worker of the team says what is to be done after the end."""

    links: ReplicaLinks

    def __init__(self, task: Task, data: Data, share: Submodel, num_replicas: int) -> None:
        self.task, self.data, self.share = task, data, share
        self.part = share.machine
        self.num_replicas = num_replicas
        self.flat = share.flat(parameter_groups(task, share.model))
        self.first_is_gone = False

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell, self.part)

    def worker(self, index: int, client: Client) -> ShareWorker:
        return ShareWorker(index, self.num_replicas, self.task, self.data, self.share, client, self.links)

    async def ended(self, worker: ShareWorker) -> None:
        self.links.say_end()
        self.links.forget_ends()

    def has_order(self, worker: ShareWorker) -> bool:
        return not worker.leads and not self.first_is_gone and worker.next_order().ready()

    async def follow_order(self, worker: ShareWorker) -> None:
        try:
            what, payload = await worker.next_order()
            worker.take_order()
            if what == "answer":
                await worker.answer(payload)
        except PeerLost:
            self.first_is_gone = True  # a goodbye is under way

    async def conclude(self, worker: ShareWorker, conclude: Conclude, buffers: Buffers) -> dict[str, float] | None:
        """Each hands over its part of the model; the first puts them together and evaluates."""
        await pull_latest(worker.client)
        if buffers is not None:
            worker.set_buffers(buffers)
        mine = self.handed_over(conclude.path)
        if not worker.leads:
            self.links.send(0, SAVED, mine)
            return None
        parts = [mine, *[await self.links.receive(other, SAVED) for other in self.links.others]]
        return self.put_together(worker, parts, conclude.path)

    def handed_over(self, path: str) -> Any:
        """What the first of the team gets: tensors, or the name of a file that has them."""
        raise NotImplementedError

    def put_together(self, worker: ShareWorker, parts: list[Any], path: str) -> dict[str, float]:
        """Save the whole model, and evaluate it."""
        raise NotImplementedError
