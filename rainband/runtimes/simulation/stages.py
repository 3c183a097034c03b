"""Simulated workers that compute one model together: each has its share, and the values travel through the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model.save import save_model
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import ShareWorker
from rainband.model_parallel.graph.split_loss import build_model
from rainband.observer import Observer
from rainband.protocol.messages import Message, Peer, PeerValue
from rainband.protocol.peer_inbox import Inbox, Tag
from rainband.runtimes.simulation.message_bus import HEADER_BYTES, Payload
from rainband.runtimes.simulation.worker import SimulatedCompute, WorkerNode
from rainband.runtimes.stage_model import StageModel
from rainband.strategy import Batch
from rainband.tasks.task import Data, Task
from rainband.worker.periodic_eval import measure
from rainband.worker.worker import ModuleWorker

if TYPE_CHECKING:
    from rainband.model.gradient import Gradient
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.protocol.peer_inbox import Arrival
    from rainband.runtimes.simulation.models.compute import ComputePace
    from rainband.runtimes.simulation.models.network import Machine
    from rainband.runtimes.simulation.nodes import ClusterContext


class StageCompute(StageModel, SimulatedCompute):
    """A share of the model, with a module of its own: forward and backward are apart, and others compute between."""

    def __init__(self, task: Task, data: Data, plan: StagePlan, place: int, num_replicas: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(task, data, Submodel(task, build_model(task), data, plan, place), num_replicas)

    def gradient(self, worker: ModuleWorker, batch: Batch) -> Gradient:
        raise AssertionError("a share is computed in pieces")

    def handed_over(self, path: str) -> dict[str, Tensor]:
        return self.share.held()

    def put_together(self, worker: ShareWorker, parts: list[dict[str, Tensor]], path: str) -> dict[str, float]:
        """Here all parts may come together: there is one process anyway."""
        with torch.random.fork_rng(devices=[]):
            whole: nn.Module = self.task.model()
        for part in parts:
            whole.load_state_dict(part, strict=False)
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_model(whole, path)
        return measure(self.task, whole)


class StageNode(WorkerNode):
    """One worker of a team."""

    __slots__ = ("incoming", "place", "workers_per_replica")

    def __init__(
        self,
        cluster: ClusterContext,
        peer: Peer,
        machine: Machine,
        compute: StageCompute,
        pace: ComputePace,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(cluster, peer, machine, compute, pace, observer)
        self.place = compute.share.place
        self.workers_per_replica = compute.share.plan.size
        self.incoming = Inbox()
        for other in range(self.workers_per_replica):
            self.incoming.opened(other)
        compute.links = ReplicaLinks(self, self.place, self.workers_per_replica)

    # ---- the links to the others: what Team needs --------------------------------------------------------------------

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), payload)
        tensors = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor)]
        size = HEADER_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        stage_peer = self._mate(to)
        self.bus.send(self, stage_peer, PeerValue(tag, b""), (self.place, copied), size, self.free_at())

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.incoming.ask(source, tag)

    def _mate(self, place: int) -> Peer:
        """As it is now: it may have been started again, and then knows nothing of this team."""
        return Peer("worker", self.peer.index - self.place + place, self.peer.incarnation)

    def _take(self, message: Message, payload: Payload) -> None:
        if isinstance(message, PeerValue):
            source, value = payload
            self.incoming.arrived(source, message.tag, value)
        else:
            super()._take(message, payload)

    def lost(self, peer: Peer) -> None:
        place = peer.index - self.peer.index + self.place
        if peer.role == "worker" and 0 <= place < self.workers_per_replica:
            self.incoming.closed(place, "its connection closed")
            self._look_if_waiting()
        else:
            super().lost(peer)
