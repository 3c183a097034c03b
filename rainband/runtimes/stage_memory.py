"""The most memory that each worker of a replica needs for a batch: predicted, and measured by computing one.

The workers are computed in one process, in turn. Every tensor that an operation makes counts for the worker that
computes then, until it is freed. The memory of Python, of the libraries of torch and of connections is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rainband.model_parallel.execution.in_process import MemoryNetwork, MemoryPeers
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker
from rainband.model_parallel.graph.split_loss import build_model
from rainband.model_parallel.placement.placement import Placement, is_interleaved
from rainband.model_parallel.placement.stage_plan import machine_of
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Peer
from rainband.protocol.steps import Steps
from rainband.strategy import Batch
from rainband.tasks.task import parameter_groups
from rainband.worker.client import Client

if TYPE_CHECKING:
    from rainband.model_parallel.placement.profile import Profile
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.tasks.task import Data, Task


class MemoryNeeds(NamedTuple):
    """Bytes of one worker, without those of its optimizer, which servers may have."""

    parameters: int
    predicted: int  # with gradients and activations
    measured: int  # also with what computing and messages need


class CountedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that each owner has made and that are still there."""

    def __init__(self, owners: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = 0
        self.now, self.peaks = [0] * owners, [0] * owners
        self.known: set[int] = set()  # storages

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, count, owner = int(storage._cdata), storage.nbytes(), self.owner
        if key in self.known or not count:
            return
        self.known.add(key)
        self.now[owner] += count
        self.peaks[owner] = max(self.peaks[owner], self.now[owner])
        finalize(storage, self._freed, key, count, owner)

    def _freed(self, key: int, count: int, owner: int) -> None:
        self.known.discard(key)
        self.now[owner] -= count


def predicted_peak(plan: StagePlan, profile: Profile, rank: int, batch_size: int) -> int:
    """Return the bytes of parameters, gradients, and the activations of the microbatches that are in flight at once."""
    machine, _ = plan.machine_and_replica(rank)
    of_machine = {unit for unit, at in _machines(plan.plan).items() if at == machine}
    microbatches = min(plan.microbatches, batch_size)
    kept = most = 0
    for action in plan.row(rank, microbatches):
        kept += 1 if action.kind == "F" else -1
        most = max(most, kept)
    stages = plan.stages_per_worker
    activations = profile.activation_bytes(of_machine) / microbatches / stages
    if plan.recompute:
        received = [v for v in profile.values if v.maker not in of_machine and of_machine & set(v.readers)]
        activations += most * sum(value.forward_bytes for value in received) / microbatches / stages
    else:
        activations *= most
    return 2 * profile.parameter_bytes(of_machine) + int(activations)


def _machines(plan: Placement) -> dict[str, int]:
    """Return the machine of each unit, as `StagePlan.workers` counts them."""
    if not is_interleaved(plan):
        return machine_of(plan)
    machines = sorted({stage.machines for stage in plan.stages})
    return {unit: machines.index(stage.machines) for stage in plan.stages for unit in stage.units}


def memory_of_workers(task: Task, data: Data, plan: StagePlan, profile: Profile, batch_size: int) -> list[MemoryNeeds]:
    """Compute the gradient of a batch with the workers of one replica, and return their bytes."""
    network = MemoryNetwork(plan.size)
    workers = [_worker(task, data, plan, rank, network, batch_size) for rank in range(plan.size)]
    parameters = [sum(v.numel() * v.element_size() for v in worker.flat.vectors) for worker in workers]
    counted = CountedMemory(plan.size)
    batch = Batch(0, 0, 0)
    with torch.random.fork_rng(devices=[]), counted:
        steps: list[Steps[Any]] = [Steps(worker.gradient(batch)) for worker in workers]  # type: ignore[arg-type]
        progress = True
        while progress:
            progress = False
            for counted.owner, step in enumerate(steps):
                progress |= step.advance()
    return [
        MemoryNeeds(own, predicted_peak(plan, profile, rank, batch_size), own + counted.peaks[rank])
        for rank, own in enumerate(parameters)
    ]


def _worker(task: Task, data: Data, plan: StagePlan, rank: int, network: MemoryNetwork, batch_size: int) -> StageWorker:
    torch.manual_seed(0)
    model = build_model(task)
    submodel = Submodel(task, model, data, plan, rank)
    flat = submodel.flat(parameter_groups(task, model))
    data_plan = DataPlan(
        fingerprint="", layout="", num_samples=len(data), batch_size=batch_size, epochs=1, seed=0, portion_batches=1
    )
    client = Client(Peer("worker", rank), data_plan, flat, (), (), (), lambda message: None, rank)
    links = ReplicaLinks(MemoryPeers(network, rank), rank, plan.size)
    return StageWorker(rank, 1, task, data, submodel, client, links)
