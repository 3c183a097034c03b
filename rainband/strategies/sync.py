r"""Synchronous SGD: one round at a time, equal to one process with a K times larger batch.

A round is K cells of the plan, one batch each, whoever computes them (K = the number of workers at the start):

    g_j = gradient(w_r, cell j)          j = 1 .. K, every one at exactly version r
    w_{r+1} = w_r - lr * sum_j n_j g_j / sum_j n_j          n_j samples in cell j, summed in cell order

The rule never looks at who is there: when a worker dies, those who wait for the round to end are given its cells, so
the update is over the same batches at the same parameters. A block keeps version r beside r + 1, so that a cell of
round r can still be computed while some block already has r + 1.

scaling says what becomes of the learning rate of one worker: with K times the batch it may be K times as large (linear,
Goyal et al. 2017, with a warmup) or sqrt(K) times (sqrt); with none it is taken as it is.

With backup_workers = b, of K cells the first K - b that reach block 0 make the round, on every block the same; the late
ones are dropped, and counted (Chen et al. 2016). Nobody waits for the last b, and the books say what that cost.

Use it when the result must not depend on the machines. Not with slow or mixed machines: everyone waits for the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import FirstArrivalsOfRound, MeanOfRound
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class Sync(Strategy):
    """Large-batch SGD over K workers, exactly."""

    lr: float = 0.1  # for the mean over all K cells, before scaling
    scaling: Literal["none", "linear", "sqrt"] = "none"  # of the learning rate with the number of cells in a round
    backup_workers: int = 0  # cells of a round that are not waited for
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers={self.backup_workers}: choose 0 (wait for all) or more.")
        self.server(1)

    def num_items(self, num_workers: int) -> int:
        """Cells that make a round."""
        return max(1, num_workers - self.backup_workers)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="rounds")

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            if await worker.servers.pull(round=work_item.round):
                for batch in work_item.batches:
                    worker.servers.push(await worker.gradient(batch))

    def server(self, num_workers: int) -> ServerPart:
        replicas = self.num_items(num_workers)
        factor = {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}[self.scaling]
        optimizer = element_wise(self.optimizer, factor * self.lr, self.momentum, self.weight_decay)
        rule = partial(FirstArrivalsOfRound, replicas) if self.backup_workers else MeanOfRound
        return ServerPart(rule, optimizer, Schedule(self.schedule, self.warmup))

    def advice(self, cluster: Cluster) -> list[str]:
        waiting = [] if self.backup_workers else advice.of_waiting(cluster, how="in rounds")
        return [*self._scaling(cluster), *self._backups(cluster), *waiting]

    def _scaling(self, cluster: Cluster) -> list[str]:
        replicas = self.num_items(cluster.replicas)
        if self.scaling != "linear" or self.warmup or replicas < 2:
            return []
        return [
            f"scaling=linear without a warm-up: the first step uses a learning rate of {replicas * self.lr:g}, "
            f"{replicas} times that of one worker, before training is stable. Add warmup=0.1."
        ]

    def _backups(self, cluster: Cluster) -> list[str]:
        kept, number = self.num_items(cluster.replicas), cluster.replicas
        if not self.backup_workers or (self.backup_workers < number and 2 * kept >= number):
            return []
        return [
            f"backup_workers={self.backup_workers} with {cluster}: of {number} gradients {number - kept} are computed "
            f"and thrown away. Choose at most {number // 2}."
        ]
