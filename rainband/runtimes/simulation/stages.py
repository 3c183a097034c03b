"""Simulated workers that compute one model together: each has a submodel, and values travel through the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model.save import save_model, saving
from rainband.model.whole_tensors import joined_tensors
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker
from rainband.model_parallel.graph.split_loss import build_model
from rainband.observer import Observer
from rainband.protocol.messages import Message, Peer, PeerValue
from rainband.protocol.peer_inbox import Inbox, Tag
from rainband.runtimes.simulation.message_bus import HEADER_BYTES, Payload
from rainband.runtimes.simulation.worker import SimulatedCompute, WorkerNode
from rainband.runtimes.stage_model import StageModel
from rainband.strategy import Batch, BatchPart
from rainband.tasks.task import Data, Task
from rainband.worker.periodic_eval import PeriodicEval, measure
from rainband.worker.worker import ModuleWorker

if TYPE_CHECKING:
    from rainband.model.gradient import Gradient
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.protocol.peer_inbox import Arrival
    from rainband.runtimes.simulation.cluster import SimulatedCluster
    from rainband.runtimes.simulation.models.compute import ComputePace
    from rainband.runtimes.simulation.models.network import Machine


class StageCompute(StageModel, SimulatedCompute):
    """A submodel with a module of its own: forward and backward are separate work."""

    def __init__(self, task: Task, data: Data, plan: StagePlan, rank: int, num_replicas: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(task, data, Submodel(task, build_model(task), data, plan, rank), num_replicas)

    def gradient(self, worker: ModuleWorker, batch: Batch | BatchPart) -> Gradient:
        raise AssertionError("a submodel is computed by fragments")

    def own_part(self, path: str) -> dict[str, Tensor]:
        return self.submodel.held()

    def save_whole(self, worker: StageWorker, parts: list[dict[str, Tensor]], path: str) -> dict[str, float]:
        """Build the whole model in memory: a simulation is one process anyway."""
        with saving(path):
            whole = self.whole_model(parts)
            if path:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_model(whole, path)
        return measure(self.task, whole)

    def whole_model(self, parts: list[dict[str, Tensor]]) -> nn.Module:
        """Return a model with the tensors of all parts."""
        with torch.random.fork_rng(devices=[]):
            whole: nn.Module = self.task.model()
        tensors = {name: tensor for part in parts for name, tensor in part.items()}
        whole.load_state_dict(joined_tensors(tensors, self.submodel.whole_tensors), strict=False)
        return whole


class AssembledModel(nn.Module):
    """The model of a replica, put together from its workers' tensors whenever it is evaluated."""

    def __init__(self, leader: StageNode) -> None:
        super().__init__()
        self.leader = leader
        self.whole: nn.Module | None = None

    def eval(self) -> AssembledModel:
        parts = [node.compute.submodel.held() for node in self.leader.replica()]
        self.whole = self.leader.compute.whole_model(parts).eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.whole is not None, "it is evaluated"
        return self.whole(*args, **kwargs)


# size: it inherits the state of a simulated worker, and adds its links to the other stages
class StageNode(WorkerNode):
    """One worker of a replica."""

    __slots__ = ("arrivals", "rank", "workers_per_replica")
    compute: StageCompute

    def __init__(
        self,
        cluster: SimulatedCluster,
        peer: Peer,
        machine: Machine,
        compute: StageCompute,
        pace: ComputePace,
        observer: Observer | None,
    ) -> None:
        super().__init__(cluster, peer, machine, compute, pace, observer)
        self.rank = compute.submodel.rank
        self.workers_per_replica = compute.submodel.plan.size
        self.arrivals = Inbox()
        for other in range(self.workers_per_replica):
            self.arrivals.opened(other)
        compute.links = ReplicaLinks(self, self.rank, self.workers_per_replica)

    def before_training(self, worker: ModuleWorker) -> None:
        """Let the leader evaluate the first replica between two work items, in no time."""
        every_s, self.eval_every_s = self.eval_every_s, 0.0
        super().before_training(worker)
        if every_s:
            assert isinstance(worker, StageWorker)
            whole = AssembledModel(self)
            worker.before_item = PeriodicEval(worker.task, whole, self.stats, every_s, self.clock.now_s).before_step

    def replica(self) -> list[StageNode]:
        """Return the workers of its replica."""
        first = self.peer.index - self.rank
        nodes = [self.cluster.workers[first + rank] for rank in range(self.workers_per_replica)]
        return [node for node in nodes if isinstance(node, StageNode)]

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        copied = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), payload)
        tensors = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor)]
        size = HEADER_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        stage_peer = self._stage_peer(to)
        self.bus.send(self, stage_peer, PeerValue(tag, b""), (self.rank, copied), size, self.free_at())

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.arrivals.ask(source, tag)

    def _stage_peer(self, rank: int) -> Peer:
        """Return the other worker of the same incarnation: all of a replica are started again together."""
        return Peer("worker", self.peer.index - self.rank + rank, self.peer.incarnation)

    def _take(self, message: Message, payload: Payload) -> None:
        if isinstance(message, PeerValue):
            source, value = payload
            self.arrivals.arrived(source, message.tag, value)
        else:
            super()._take(message, payload)

    def lost(self, peer: Peer) -> None:
        rank = peer.index - self.peer.index + self.rank
        if peer.role == "worker" and 0 <= rank < self.workers_per_replica:
            if peer != self._stage_peer(rank):
                return  # of an earlier incarnation of its replica
            self.arrivals.closed(rank, "its connection closed")
            self.look_if_waiting()
        else:
            super().lost(peer)
