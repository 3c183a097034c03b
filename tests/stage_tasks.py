"""Tasks over models of every shape, and a replica of stage workers in one process to compute them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model.gradient import Gradient
from rainband.model_parallel.execution.in_process import MemoryNetwork, MemoryPeers, run_together
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import build_model
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.protocol.data_plan import DataPlan as DataPlan
from rainband.protocol.messages import Finish, Lease, Message, Peer, Report
from rainband.strategy import Batch
from rainband.tasks.task import TensorData, parameter_groups
from rainband.worker.client import Client
from rainband.worker.worker import ModuleWorker
from tests.pipeline_models import examples


@dataclass(frozen=True)
class Shaped:
    """One of the models in pipeline_models.py, with samples of its own kind; the loss is the mean over samples."""

    name: str = "chain"
    batch_size: int = 4
    epochs: int = 1
    samples: int = 16

    def model(self) -> nn.Module:
        return examples()[self.name][0]

    def data(self) -> TensorData:
        args = examples()[self.name][1]
        torch.manual_seed(1)
        return TensorData(*(_more(tensor, self.samples) for tensor in args))

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(model(*batch)) if isinstance(leaf, Tensor)]
        return torch.stack([(leaf * leaf).mean() for leaf in leaves]).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(self.loss(model, self.data().batch(range(self.samples))))}


def _more(tensor: Tensor, samples: int) -> Tensor:
    shape = (samples, *tensor.shape[1:])
    return torch.randn(shape, dtype=tensor.dtype) if tensor.is_floating_point() else torch.randint(0, 11, shape)


def planned(
    task: Shaped,
    placement: dict[str, int] | int,
    kind: str = "pipeline",
    replicas: Sequence[int] | None = None,
    **settings: Any,
) -> StagePlan:
    """A plan by hand: unit -> machine; or a number of stages with about equally many units."""
    graph = cut(build_model(task), task.data().batch(range(2)))
    if isinstance(placement, int):
        placement = {unit: number * placement // len(graph.units) for number, unit in enumerate(graph.units)}
    size = max(placement.values()) + 1
    counts = list(replicas or [1] * size)
    stages = [
        PlacedStage(
            tuple(range(sum(counts[:m]), sum(counts[: m + 1]))), tuple(u for u in graph.units if placement[u] == m)
        )
        for m in range(size)
    ]
    machines = sum(counts)
    plan = Placement(
        model=task.name, kind=cast(Any, kind), partitioner="hand", num_machines=machines, stages=tuple(stages)
    )
    return StagePlan(plan=plan, example_size=2, **settings)


def dealt(task: Shaped, machines: int, stages_per_worker: int, microbatches: int) -> StagePlan:
    """A plan by hand with several stages on each machine: stage s on machine s mod P."""
    plan = planned(task, machines * stages_per_worker).plan
    stages = tuple(PlacedStage((number % machines,), stage.units) for number, stage in enumerate(plan.stages))
    plan = msgspec.structs.replace(plan, stages=stages, num_machines=machines)
    return StagePlan(plan=plan, microbatches=microbatches, schedule="interleaved", example_size=2)


def worker_of(
    task: Shaped,
    plan: StagePlan,
    rank: int,
    network: MemoryNetwork,
    tell: Callable[[Message], None] = lambda message: None,
) -> StageWorker:
    model = build_model(task)
    submodel = Submodel(task, model, task.data(), plan, rank)
    flat = submodel.flat(parameter_groups(task, model))
    client = Client(Peer("worker", rank), data_plan(task), flat, (), (), (), tell, submodel.rank)
    links = ReplicaLinks(MemoryPeers(network, rank), rank, plan.size)
    return StageWorker(rank, 1, task, task.data(), submodel, client, links)


def trained_stages(
    task: Shaped, plan: StagePlan, strategy: Any, order: Sequence[int] | None = None, late: bool = False
) -> list[StageWorker]:
    """Train a replica without servers; `late`: a portion is leased when all before it are done."""
    network = MemoryNetwork(plan.size)
    reports: dict[int, int] = {}
    whole = data_plan(task)
    coming = deque(range(whole.num_portions))
    leased = 0

    def lease() -> None:
        nonlocal leased
        portion = coming.popleft()
        leased += whole.batches_in(portion)
        workers[0].client.receive(Lease(portion, 1, (tuple(range(whole.batches_in(portion))),)))

    def told(rank: int, message: Message) -> None:
        if isinstance(message, Report):
            reports[rank] = message.accepted
        if len(reports) == plan.size and min(reports.values()) == leased:
            if coming:
                lease()
            else:
                workers[0].client.receive(Finish())

    workers = [worker_of(task, plan, rank, network, partial(told, rank)) for rank in range(plan.size)]
    lease()
    while coming and not late:
        lease()
    run_together([strategy.run(worker) for worker in workers], order)
    return workers


def data_plan(task: Shaped) -> DataPlan:
    return DataPlan(
        fingerprint="",
        layout="",
        num_samples=task.samples,
        batch_size=task.batch_size,
        epochs=1,
        seed=0,
        portion_batches=4,
    )


def whole_gradient(task: Shaped, batch: Batch) -> Gradient:
    from rainband.model.flat_parameters import Flat

    model = task.model()
    flat = Flat(model, parameter_groups(task, model))
    client = Client(Peer("worker", 0), data_plan(task), flat, (), (), (), lambda message: None)
    return copy.copy(ModuleWorker(0, 1, task, task.data(), model, client).compute(batch))
