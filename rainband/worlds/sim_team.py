"""Simulated workers that compute one model together: each has its share, and the values travel through the network."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.client import Client
from rainband.flat import Flat
from rainband.messages import Conclude, Concluded, Message, Peer, Value, Welcome
from rainband.pipeline.of_task import build_model
from rainband.stages.passage import Team
from rainband.stages.share import Share
from rainband.stages.worker import ShareWorker
from rainband.tasks.task import Data, Task, parameter_groups
from rainband.transports.peers_inbox import Inbox
from rainband.types import Batch, Port, Tag
from rainband.worker import ModuleWorker
from rainband.worlds.measuring import measure
from rainband.worlds.save import save_model
from rainband.worlds.sim_post import HEADER_BYTES, Payload
from rainband.worlds.sim_worker import Wanted, WorkerNode

if TYPE_CHECKING:
    from rainband.gradient import ModuleGradient
    from rainband.sim.compute import Pace
    from rainband.sim.network import Machine
    from rainband.stages.plan import TeamPlan
    from rainband.types import Arrival
    from rainband.worlds.sim_worker import Surroundings

SAVED: Tag = ("saved",)


class TeamBody:
    """A share of the model, with a module of its own: forward and backward are apart, and others compute between."""

    def __init__(self, task: Task, data: Data, plan: TeamPlan, place: int, num_replicas: int, seed: int) -> None:
        torch.manual_seed(seed)
        model = build_model(task)
        self.task, self.data = task, data
        self.num_replicas = num_replicas
        self.share = Share(task, model, data, plan, place)
        self.flat: Flat = self.share.flat(parameter_groups(task, model))
        self.team: Team | None = None

    def make_client(self, me: Peer, welcome: Welcome, ports: list[Port], tell: Callable[[Message], None]) -> Client:
        part = self.share.machine
        return Client(me, welcome.plan, self.flat, welcome.blocks, welcome.owners, ports, tell, part)

    def worker(self, index: int, client: Client) -> ShareWorker:
        assert self.team is not None
        return ShareWorker(index, self.num_replicas, self.task, self.data, self.share, client, self.team)

    def sit_down(self) -> None:
        """Nobody else computes with its module."""

    def gradient(self, worker: ModuleWorker, batch: Batch) -> ModuleGradient:
        raise AssertionError("a share is computed in pieces")

    def conclude(self, worker: ModuleWorker, conclude: Conclude, body: bytes | None) -> dict[str, float]:
        raise AssertionError("the first of a team concludes when it has all the others' parts")


class TeamNode(WorkerNode):
    """One worker of a team."""

    __slots__ = ("incoming", "place", "share_body", "team_size")

    def __init__(self, world: Surroundings, peer: Peer, machine: Machine, body: TeamBody, pace: Pace) -> None:
        super().__init__(world, peer, machine, body, pace)
        self.share_body = body
        self.place = body.share.place
        self.team_size = body.share.plan.size
        self.incoming = Inbox()
        for other in range(self.team_size):
            self.incoming.opened(other)
        body.team = Team(self, self.place, self.team_size)

    # ---- the links to the others: what Team needs --------------------------------------------------------------------

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), payload)
        tensors = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor)]
        size = HEADER_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        mate = self._mate(to)
        self.post.send(self, mate, Value(tag, b""), (self.place, copied), size, self.free_at())

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.incoming.ask(source, tag)

    def _mate(self, place: int) -> Peer:
        """As it is now: it may have been started again, and then knows nothing of this team."""
        return Peer("worker", self.peer.index - self.place + place, self.peer.incarnation)

    def _take(self, message: Message, payload: Payload) -> None:
        if isinstance(message, Value):
            source, value = payload
            self.incoming.arrived(source, message.tag, value)
        else:
            super()._take(message, payload)

    def lost(self, peer: Peer) -> None:
        place = peer.index - self.peer.index + self.place
        if peer.role == "worker" and 0 <= place < self.team_size:
            self.incoming.closed(place, "its connection closed")
            self._look_if_waiting()
        else:
            super().lost(peer)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def strategy_is_over(self, worker: ModuleWorker) -> None:
        assert isinstance(worker, ShareWorker)
        worker.team.say_end()
        worker.team.forget_ends()

    def _conclude(self, worker: ModuleWorker) -> Generator[Wanted, None, None]:
        assert isinstance(worker, ShareWorker) and self.client is not None and self.conclude is not None
        (conclude, body), self.conclude = self.conclude, None
        if self.client.blocks and self.client.ports:
            yield from self.client.pull_latest().__await__()
        if body is not None:
            worker.set_buffers(body)
        if not worker.leads:
            worker.team.send(0, SAVED, self.share_body.share.held())
            return
        held = self.share_body.share.held()
        for other in worker.team.others:
            held |= yield from worker.team.receive(other, SAVED).__await__()
        self.tell(Concluded(self._measured(held, conclude)))

    def _measured(self, held: dict[str, Tensor], conclude: Conclude) -> dict[str, float]:
        """Here all parts may come together: there is one process anyway."""
        task = self.share_body.task
        with torch.random.fork_rng(devices=[]):
            whole: nn.Module = task.model()
        whole.load_state_dict(held, strict=False)  # of parameters with two names one is enough
        if conclude.path:
            Path(conclude.path).parent.mkdir(parents=True, exist_ok=True)
        save_model(whole, conclude.path)
        return measure(task, whole)
