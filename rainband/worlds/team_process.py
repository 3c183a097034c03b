"""A worker of a team as a process: links up with the others, computes its share, saves its part of the model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from rainband.errors import PeerLost
from rainband.flat import Flat
from rainband.messages import Concluded, Ended, Join, Welcome
from rainband.pipeline.of_task import build_model
from rainband.stages.passage import Team
from rainband.stages.share import Share
from rainband.stages.worker import ShareWorker, WholeModel
from rainband.tasks.task import Data, Task, parameter_groups
from rainband.transports.peers import PeerLinks
from rainband.types import Arrival, Strategy, Tag
from rainband.worker import ModuleWorker
from rainband.worlds.config import Job
from rainband.worlds.drive import drive_to_end
from rainband.worlds.measuring import Measuring, measure
from rainband.worlds.member import flush_output
from rainband.worlds.save import join_parts, save_part
from rainband.worlds.worker_process import WorkerProcess

SAVED: Tag = ("saved",)


class TeamLinks:
    """The links to the others of one team, by their machine in its plan."""

    def __init__(self, links: PeerLinks, first: int) -> None:
        self.links = links
        self.first = first  # the number of the team's first worker

    def send(self, to: int, tag: Tag, payload: Any) -> None:
        self.links.send(self.first + to, tag, payload)

    def recv(self, source: int, tag: Tag) -> Arrival:
        return self.links.recv(self.first + source, tag)


class TeamProcess(WorkerProcess):
    """One worker of a team."""

    def __init__(self, job: Job, task: Task | None, strategy: Strategy | None) -> None:
        super().__init__(job, task, strategy)
        assert self.config.team is not None
        self.plan = self.config.team
        self.place = job.index % self.plan.size
        member = self.member
        timeout_s = self.config.failure_timeout_s
        self.links = PeerLinks(member.me, job.secret, job.run_id, member.switchboard, self.config.transport, timeout_s)
        self.first = job.index - self.place

    def _model(self, task: Task) -> nn.Module:
        return build_model(task)

    def _flat(self, task: Task, module: nn.Module, data: Data) -> Flat:
        self.share = Share(task, module, data, self.plan, self.place)
        return self.share.flat(parameter_groups(task, module))

    def _worker(self, join: Join, flat: Flat, task: Task, data: Data) -> ModuleWorker:
        join = msgspec.structs.replace(join, address=self.links.listen())
        client = self.member.enter(join, flat, part=self.share.machine, welcomed=self._link_up)
        team = Team(TeamLinks(self.links, self.first), self.place, self.plan.size)
        return ShareWorker(self.job.index, self.config.num_replicas, task, data, self.share, client, team)

    def _link_up(self, welcome: Welcome) -> None:
        self.links.connect({self.first + place: address for place, address in enumerate(welcome.team)})

    def _before_step(self, worker: ModuleWorker) -> Callable[[], None] | None:
        """Measuring comes between two cells, not before each piece of work: all of the team must take part."""
        assert isinstance(worker, ShareWorker)
        if self.job.index == 0 and self.config.eval_every_s:
            model = WholeModel(worker, self._drive)
            measuring = Measuring(worker.task, model, self.member.stats, self.config.eval_every_s)
            worker.before_cell = measuring.before_step
        return None

    def _drive(self, coroutine: Coroutine[Any, None, Any]) -> Any:
        return drive_to_end(coroutine, self.member.wait)

    def _leave(self, worker: ModuleWorker) -> None:
        """The strategy has returned: from now on the first of the team says what is to be done."""
        assert isinstance(worker, ShareWorker)
        member = self.member
        worker.team.say_end()
        worker.team.forget_ends()
        member.see_pushes_through()
        worker.client.give_all_back("stopped")
        flush_output()
        member.tell(member.stats.beat())
        member.tell(Ended(worker.seen), worker.buffers())
        order = None if worker.leads else worker.next_order()
        while True:
            if member.conclude is not None:
                self._conclude(worker)
            if order is not None and order.ready():
                order = self._follow(worker, order)
                continue
            member.wait()

    def _follow(self, worker: ShareWorker, order: Arrival) -> Arrival | None:
        """Do what the first says; returns the next order, None if it is gone: then a goodbye is under way."""
        try:
            what, payload = self._drive(_result(order))
            worker.take_order()
            if what == "answer":
                self._drive(worker.answer(payload))
        except PeerLost:
            return None
        return worker.next_order()

    def _conclude(self, worker: ShareWorker) -> None:
        """Each saves its part; the first puts them together and has the whole team measure."""
        member = self.member
        assert member.conclude is not None
        (conclude, body), member.conclude = member.conclude, None
        member.pull_latest()
        if body is not None:
            worker.set_buffers(body)
        path = save_part(self.share.held(), conclude.path, self.place)
        if not worker.leads:
            worker.team.send(0, SAVED, path)
            return
        parts = [path, *(self._drive(worker.team.receive(other, SAVED)) for other in worker.team.others)]
        join_parts([Path(part) for part in parts if part], conclude.path)
        metrics = measure(worker.task, WholeModel(worker, self._drive))
        flush_output()
        member.tell(Concluded(metrics))


async def _result(arrival: Arrival) -> Any:
    return await arrival
