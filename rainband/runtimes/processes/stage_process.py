"""A worker of a replica as a process: links up with the others, computes its submodel, and saves its part."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rainband.errors import RainbandError
from rainband.model.flat_parameters import Flat
from rainband.model.save import elsewhere_for, join_parts, save_part, saving
from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import StageWorker, WholeModel
from rainband.model_parallel.graph.split_loss import build_model
from rainband.protocol.messages import Address, Message, TunnelRequest, Welcome
from rainband.protocol.peer_inbox import Arrival, Tag
from rainband.protocol.ports import Port
from rainband.runtimes.config import Job
from rainband.runtimes.processes.drive import drive
from rainband.runtimes.processes.worker_process import WorkerProcess
from rainband.runtimes.stage_model import StageModel
from rainband.strategy import Strategy
from rainband.tasks.task import Data, Task
from rainband.transports.peers import PeerLinks
from rainband.transports.tls.certificate import new_certificate
from rainband.transports.tunnels.dial import TunnelDialer
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
        tunnels = TunnelDialer(job.index, job.coordinator, job.keys, job.run_id) if self.config.listen else None
        self.links = PeerLinks(
            self.me, job.keys, job.run_id, self.event_loop, self.config.transport, timeout_s, tunnels=tunnels
        )
        self.first = job.index - self.rank

    def _build(self, task: Task) -> tuple[Data, WorkerModel[Any], Flat]:
        module = build_model(task)
        data = task.data()
        submodel = Submodel(task, module, data, self.plan, self.rank)
        sends = bool(self.config.listen)  # the workers of a replica may have different disks
        model = SavedInParts(task, data, submodel, self.config.num_replicas, self._drive, sends)
        model.links = ReplicaLinks(StageLinks(self.links, self.first), self.rank, self.plan.size)
        return data, model, model.flat

    def _address(self) -> Address | None:
        if not self.config.listen:
            return self.links.listen()
        run = self.job.coordinator
        assert self.control is not None, "it is connected to the coordinator before it prepares anything"
        # From another machine, that address of this one at which answers of the run's machine arrive.
        host = self.control.sock.getsockname()[0] if self.job.remote else run.host
        return self.links.listen(host, new_certificate() if run.fingerprint else None)

    def open_links(self, welcome: Welcome, part: int) -> list[Port]:
        self.links.connect({self.first + rank: address for rank, address in enumerate(welcome.replica_addresses)})
        return super().open_links(welcome, part)

    def _peers(self) -> dict[int, str]:
        return self.links.transports

    def _from_coordinator(self, message: Message, body: memoryview | None) -> None:
        if isinstance(message, TunnelRequest):
            with suppress(RainbandError):  # the other worker asks again, or ends
                self.links.answer(message.worker)
            return
        super()._from_coordinator(message, body)

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
    """Each process saves its part, or sends it to the leader, which joins the files and evaluates with the others."""

    def __init__(
        self, task: Task, data: Data, submodel: Submodel, num_replicas: int, drive: Drive, sends: bool
    ) -> None:
        super().__init__(task, data, submodel, num_replicas)
        self.drive = drive
        self.sends = sends

    def own_part(self, path: str) -> str | dict[str, Tensor]:
        held = self.submodel.held()
        if self.sends:
            return dict(held) if path else {}
        return save_part_somewhere(held, path, self.submodel.rank)

    def save_whole(self, worker: StageWorker, parts: list[Any], path: str) -> dict[str, float]:
        with saving(path):
            files = [
                part if isinstance(part, str) else save_part_somewhere(part, path, rank)
                for rank, part in enumerate(parts)
                if part
            ]
            found = [Path(file) for file in files if file]
            try:
                join_parts(found, path, self.submodel.whole_tensors)
            except OSError as error:
                if worker.client.servers.ports:
                    raise
                elsewhere = elsewhere_for(path)  # no server has the parameters
                join_parts(found, str(elsewhere), self.submodel.whole_tensors)
                raise OSError(f"{error}; it is in {elsewhere}") from error
        return measure(worker.task, WholeModel(worker, self.drive))


def save_part_somewhere(tensors: Mapping[str, Tensor], path: str, rank: int) -> str:
    """Save a worker's submodel beside the final file, or, if there is no room, elsewhere; return its path."""
    try:
        return save_part(tensors, path, rank)
    except (OSError, SafetensorError):
        return save_part(tensors, str(elsewhere_for(path)), rank)
