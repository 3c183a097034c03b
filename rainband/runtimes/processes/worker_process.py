"""A worker process: builds the task and the model, and runs the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rainband.model.block_optimizer import build
from rainband.model.flat_parameters import Flat
from rainband.model.seeds import global_generators_from
from rainband.model.sync_batch_norm import share_statistics
from rainband.observer import Observer, join_observers
from rainband.plugins import load_strategy
from rainband.protocol.messages import Address, Peer
from rainband.record.message_cost import WorkerCost
from rainband.record.record import Recorder
from rainband.record.spans import SpanFile, SpanRecorder
from rainband.runtimes.checkpoints.restore import begin_checkpoints, load_initial
from rainband.runtimes.config import Job, dataset_of
from rainband.runtimes.hogwild.pairs import PairModel
from rainband.runtimes.hogwild.worker import MemoryModel, MessageCheck
from rainband.runtimes.processes.compute import min_step_time, prefetched
from rainband.runtimes.processes.drive import drive, drive_round
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.strategy import Strategy
from rainband.tasks.load import load_task
from rainband.tasks.task import Data, Task, parameter_groups
from rainband.transports.collectives.average import GroupAverage
from rainband.transports.collectives.shared import SharedGroup
from rainband.transports.shared_rounds import SharedBoard
from rainband.worker.lifecycle import run_worker
from rainband.worker.periodic_eval import PeriodicEval
from rainband.worker.session import join_of
from rainband.worker.shared_batches import examples
from rainband.worker.worker import ModuleWorker, check_optimizer
from rainband.worker.worker_model import ModuleModel, WorkerModel


# size: it inherits the links of a worker, and what a loop asks of them
class WorkerProcess(WorkerLink):
    """A worker that trains a task."""

    def __init__(self, job: Job, task: Task | None, strategy: Strategy | None, memory: int | None = None) -> None:
        super().__init__(job, strategy, join_observers(_observers(job)))
        self.memory = memory
        self.task = task

    def run(self) -> None:
        self.connect()  # first, so that heartbeats and errors are sent while the task loads
        drive(run_worker(self.session, self._prepare), self.wait, self.session)

    def _prepare(self) -> None:
        strategy = self.strategy or load_strategy(self.config.strategy, self.config.strategy_settings)
        self.strategy = strategy
        torch.manual_seed(self.config.seed)
        # All workers build the same model and data, also with random numbers of numpy; later they draw different ones.
        with global_generators_from(self.config.seed):
            task = self.task or load_task(self.config.task, self.config.task_settings)
            check_optimizer(task, strategy)
            data, model, flat = self._build(task)
        server_part = strategy.server(self.config.num_replicas)
        if server_part is not None:
            build(server_part.optimizer, [torch.zeros(1)])  # reports a wrong setting here, before a server does
        dataset = dataset_of(task, data, self.config)
        join = join_of(strategy, flat.layout, dataset, address=self._address())
        self.session.prepare(strategy, join, model)

    def _build(self, task: Task) -> tuple[Data, WorkerModel[Any], Flat]:
        module = task.model()
        if self.strategy is not None and self.strategy.requires.computes_whole_batches:
            share_statistics(module)
        load_initial(module, self.config.from_weights)
        data = task.data()
        flat = Flat(module, parameter_groups(task, module))
        num_workers = self.config.num_workers
        if self.memory is None:
            return data, ModuleModel(num_workers, task, data, flat), flat
        in_pairs = self.strategy is not None and self.strategy.requires.in_pairs
        kind = PairModel if in_pairs else MemoryModel
        return data, kind(num_workers, task, data, flat, self.memory), flat

    def _address(self) -> Address | None:
        """Return the address for the other workers of its replica, if there are any."""
        return None

    def before_training(self, worker: ModuleWorker) -> None:
        self.session.perform = min_step_time(self.config, self.index)
        worker.prefetch = prefetched(worker)
        worker.microbatches = self.config.microbatches
        begin_checkpoints(worker, self.session, self.source(), self.save_state)
        self.session.before_step = self._before_step(worker)
        if self.session.strategy.requires.in_rounds:
            board = SharedBoard(self.round_files, self.index, examples(worker))
            requires = self.session.strategy.requires
            worker.enter_rounds(requires, board, time.monotonic, self.config.equal_parts, self.session.codec)
            if requires.algorithm and worker.shared_batches is not None:
                timeout_s = self.config.failure_timeout_s
                group = SharedGroup(self.group_files, self.index, on_lost="continue", timeout_s=timeout_s)
                worker.shared_batches.member.average = GroupAverage(group, requires.algorithm)
            if worker.shared_batches is not None:
                worker.shared_batches.share_statistics(
                    partial(drive_round, worker.shared_batches.member.membership, self.wait)
                )

    def _before_step(self, worker: ModuleWorker) -> Callable[[], None] | None:
        measuring = self._measuring(worker)
        if self.session.strategy.requires.servers:
            return measuring
        return MessageCheck(self.wait, measuring).before_step  # no answer of a server is waited for

    def _measuring(self, worker: ModuleWorker) -> Callable[[], None] | None:
        if self.index or not self.config.eval_every_s:
            return None
        return PeriodicEval(worker.task, worker.module, self.stats, self.config.eval_every_s).before_step


def _observers(job: Job) -> list[Observer]:
    """Return the observers of a worker that its configuration asks for."""
    config, name = job.config, f"worker-{job.index}"
    observers: list[Observer] = []
    if config.record and not job.memory and config.stage_plan is None:
        observers.append(Recorder(config.directory, Peer("worker", job.index)))
    if config.message_cost:
        observers.append(WorkerCost(config.directory, name))
    if config.timeline:
        file = SpanFile(Path(config.directory) / f"spans-{name}.jsonl")
        observers.append(SpanRecorder(f"worker {job.index}", time.monotonic, file.write))
    return observers
