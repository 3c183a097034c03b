"""A worker of a replica as a process: links up with the others, computes its submodel, and saves its part."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rainband.model.flat_parameters import Flat
from rainband.model.save import join_parts, save_part, saving
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker, WholeModel
from rainband.model_parallel.graph.split_loss import build_model
from rainband.protocol.messages import Address, Welcome
from rainband.protocol.peer_inbox import Arrival, Tag
from rainband.protocol.ports import Port
from rainband.runtimes.config import Job
from rainband.runtimes.processes.drive import drive
from rainband.runtimes.processes.worker_process import WorkerProcess
from rainband.runtimes.stage_model import StageModel
from rainband.strategy import Strategy
from rainband.tasks.task import Data, Task
from rainband.transports.peers import PeerLinks
from rainband.worker.periodic_eval import PeriodicEval, measure
from rainband.worker.worker import ModuleWorker
from rainband.worker.worker_model import WorkerModel

Drive = Callable[[Coroutine[Any, None, Any]], Any]


class StageLinks:
    """The links to the other workers of a replica, by their ranks."""

    def __init__(self, links: PeerLinks, first: int) -> None:
        self.links = links
        self.first = first  # the number of the replica's worker of rank 0

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        self.links.send(self.first + to, tag, payload)

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.links.recv(self.first + source, tag)


# size: it inherits the links of a worker process, and adds those between the workers of a replica
class StageProcess(WorkerProcess):
    """One worker of a replica."""

    def __init__(self, job: Job, task: Task | None, strategy: Strategy | None) -> None:
        super().__init__(job, task, strategy)
        assert self.config.stage_plan is not None
        self.plan = self.config.stage_plan
        self.rank = job.index % self.plan.size
        timeout_s = self.config.failure_timeout_s
        self.links = PeerLinks(self.me, job.keys, job.run_id, self.event_loop, self.config.transport, timeout_s)
        self.first = job.index - self.rank

    def _build(self, task: Task) -> tuple[Data, WorkerModel[Any], Flat]:
        module = build_model(task)
        data = task.data()
        submodel = Submodel(task, module, data, self.plan, self.rank)
        model = SavedInParts(task, data, submodel, self.config.num_replicas, self._drive)
        model.links = ReplicaLinks(StageLinks(self.links, self.first), self.rank, self.plan.size)
        return data, model, model.flat

    def _address(self) -> Address | None:
        return self.links.listen()

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        self.links.connect({self.first + rank: address for rank, address in enumerate(welcome.replica_addresses)})
        return super().open_links(welcome, part)

    def _before_step(self, worker: ModuleWorker) -> Callable[[], None] | None:
        """Evaluate between two work items, not before each fragment: all workers of the replica take part."""
        assert isinstance(worker, StageWorker)
        if self.index == 0 and self.config.eval_every_s:
            model = WholeModel(worker, self._drive)
            measuring = PeriodicEval(worker.task, model, self.stats, self.config.eval_every_s)
            worker.before_item = measuring.before_step
        return None

    def _drive(self, coroutine: Coroutine[Any, None, Any]) -> Any:
        return drive(coroutine, self.wait)


class SavedInParts(StageModel):
    """Each process saves its part; the leader joins the files and evaluates with the others."""

    def __init__(self, task: Task, data: Data, submodel: Submodel, num_replicas: int, drive: Drive) -> None:
        super().__init__(task, data, submodel, num_replicas)
        self.drive = drive

    def own_part(self, path: str) -> str:
        return save_part(self.submodel.held(), path, self.submodel.rank)

    def save_whole(self, worker: StageWorker, parts: list[str], path: str) -> dict[str, float]:
        with saving(path):
            join_parts([Path(part) for part in parts if part], path)
        return measure(worker.task, WholeModel(worker, self.drive))
