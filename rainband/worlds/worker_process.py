"""One worker's life in a process: builds the task, joins the run, drives the strategy, and says goodbye."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rainband.catalogue import load_strategy
from rainband.flat import Flat
from rainband.messages import Conclude, Concluded, Ended, Join
from rainband.optim import build
from rainband.tasks.load import load_task
from rainband.tasks.task import Data, Task, fingerprint, parameter_groups
from rainband.types import Strategy
from rainband.worker import ModuleWorker
from rainband.worlds import hogwild_worker
from rainband.worlds.config import Job, lead_of
from rainband.worlds.drive import drive
from rainband.worlds.measuring import Measuring, measure
from rainband.worlds.member import Member, flush_output
from rainband.worlds.paced import at_its_pace
from rainband.worlds.pieces import Pieces
from rainband.worlds.prefetch import prefetched
from rainband.worlds.record import Recorder
from rainband.worlds.save import save_model
from rainband.worlds.spans import SpanFile, Watch


class WorkerProcess:
    """One worker's life."""

    def __init__(self, job: Job, task: Task | None, strategy: Strategy | None, memory: int | None = None) -> None:
        self.job = job
        self.memory = memory
        self.config = job.config
        self.task = task
        self.strategy = strategy
        self.member = Member(job, strategy)

    def run(self) -> None:
        self.member.connect()
        strategy = self.strategy or load_strategy(self.config.strategy, self.config.strategy_settings)
        task = self.task or load_task(self.config.task, self.config.task_settings)
        torch.manual_seed(self.config.seed)
        module = self._model(task)
        data = task.data()
        flat = self._flat(task, module, data)
        half = strategy.server(self.config.num_replicas)
        if half is not None:
            build(half.optimizer, [torch.zeros(1)])  # a wrong setting is told here, not by a server later
        join = Join(
            fingerprint=fingerprint(data),
            num_samples=len(data),
            layout=flat.layout,
            batch_size=self.config.batch_size or task.batch_size,
            epochs=self.config.epochs or task.epochs,
            cell_batches=getattr(strategy, "cell_batches", 1),
            rounds=getattr(strategy, "rounds", False),
            warm_batches=getattr(strategy, "warm_batches", 0),
            led=lead_of(strategy) is not None,
        )
        worker = self._worker(join, flat, task, data)
        at_its_pace(worker, self.config)
        prefetched(worker)
        if self.config.pieces:
            Pieces(self.config.directory, f"worker-{self.job.index}").watch_worker(worker)
        drive(strategy, worker, self.member.wait, self._watch(), self._before_step(worker))
        self._leave(worker)

    def _model(self, task: Task) -> nn.Module:
        return task.model()

    def _flat(self, task: Task, module: nn.Module, data: Data) -> Flat:
        return Flat(module, parameter_groups(task, module))

    def _worker(self, join: Join, flat: Flat, task: Task, data: Data) -> ModuleWorker:
        """Enter the run; returns when all is ready."""
        index, num_workers = self.job.index, self.config.num_workers
        if self.memory is not None:
            shared = hogwild_worker.enter(self.member, join, flat, self.memory)
            return hogwild_worker.MemoryWorker(index, num_workers, task, data, flat.module, shared)
        client = self.member.enter(join, flat)
        if self.config.record and self.member.welcome is not None:
            Recorder(self.config.directory, self.member.me).watch_client(client, self.member.welcome)
        return ModuleWorker(index, num_workers, task, data, flat.module, client)

    def _before_step(self, worker: ModuleWorker) -> Callable[[], None] | None:
        measuring = self._measuring(worker)
        return measuring if self.memory is None else hogwild_worker.Looking(self.member.wait, measuring).before_step

    def _measuring(self, worker: ModuleWorker) -> Callable[[], None] | None:
        if self.job.index or not self.config.eval_every_s:
            return None
        return Measuring(worker.task, worker.module, self.member.stats, self.config.eval_every_s).before_step

    def _watch(self) -> Watch | None:
        if not self.config.timeline:
            return None
        file = SpanFile(Path(self.config.directory) / f"spans-worker-{self.job.index}.jsonl")
        return Watch(f"worker {self.job.index}", time.monotonic, file.write)

    def _leave(self, worker: ModuleWorker) -> None:
        """The strategy has returned: wait for the last answers, hand over the buffers, save if asked to."""
        member = self.member
        member.see_pushes_through()
        worker.client.give_all_back("stopped")
        flush_output()
        member.tell(member.stats.beat())
        member.tell(Ended(worker.seen), worker.buffers())
        while True:
            if member.conclude is not None:
                conclude, body = member.conclude
                member.conclude = None
                member.tell(Concluded(self._save(worker, conclude, body)))
            member.wait()

    def _save(self, worker: ModuleWorker, conclude: Conclude, body: memoryview | None) -> dict[str, float]:
        self.member.pull_final()
        if body is not None:
            worker.set_buffers(body)
        module: nn.Module = worker.module
        save_model(module, conclude.path)  # first: an error in the user's measuring must not cost the model
        metrics = measure(worker.task, module)
        flush_output()
        return metrics
