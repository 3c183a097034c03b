r"""Synchronous SGD: workers share each batch, and make the updates of one process.

    each batch of B samples is cut into parts, one for each of the K workers: n_1 + ... + n_K = B
    g_j     = gradient(w_t, part j)
    w_{t+1} = optimizer step from w_t with  sum_j n_j g_j / B          on every worker

The mean gradient is that of the whole batch, so the result is that of `single` with the same optimizer, up to rounding:
nothing needs to be tuned again. Exceptions are what depends on the part: dropout, and statistics of BatchNorm, which
are averaged. There are no servers: workers average their gradients in shared memory, on one machine, and each steps
with its own copy of the optimizer. Parts follow the measured speeds of the workers (--parts equal: equal ones).

When a worker is lost or paused, the others compute its part of the open batch before they step, and share the next
batches among themselves; a worker that returns receives their state. So no failure changes an update.

With batch_per_worker=true, each worker computes a batch of its own, and servers make the updates:

    g_j = gradient(w_r, batch j)          j = 1 .. K, all at exactly version r
    w_{r+1} = w_r - lr * sum_j n_j g_j / sum_j n_j          n_j samples in batch j, summed in the order of j

A round is then K batches (K = the number of workers at the start, or the batches of an epoch if there are fewer), like
one process with a K times larger batch, and does not depend on which workers are alive: a lost worker's batches are
reassigned to workers that are waiting. A block keeps version r beside r + 1, so that a batch of round r can still be
computed while some blocks already have r + 1. The order of a floating-point sum decides its bits, so a gradient that
arrives before that of an earlier j is stored until its turn: K - 1 gradients of a server's blocks if batch 1 is last.

`scaling` adapts a learning rate that was tuned for one worker: with K times the batch it may be K times as large
(linear, Goyal et al. 2017, with a warm-up) or sqrt(K) times (sqrt); with none it is used as given.

With backup_workers = b, the first K - b of the K batches that reach block 0 make the round, on every block the same;
the others are dropped, and counted as skipped (Chen et al. 2016). A round then does not wait for its b slowest batches.

Use when the result must be that of one process: it depends neither on the speed of the machines nor on failures. Avoid
when a part takes less time than the exchange (small models and batches), or over slow networks (soft_sync, downpour).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.rules import FirstArrivalsOfRound, MeanOfRound
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Sync(OptimizerSettings, Strategy):
    """The updates of one process, computed by K workers."""

    lr: float = 0.1  # learning rate for the mean gradient, before scaling
    scaling: Literal["none", "linear", "sqrt"] = "none"  # of lr, with batch_per_worker
    backup_workers: int = 0  # batches of a round that are not waited for, with batch_per_worker
    batch_per_worker: bool = False  # each worker computes a batch of its own; False: all share each batch

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers={self.backup_workers}: choose 0 (wait for all) or more.")
        for name, value, usual in (("scaling", self.scaling, "none"), ("backup_workers", self.backup_workers, 0)):
            if value != usual and not self.batch_per_worker:
                raise ValueError(
                    f"{name}={value} needs batch_per_worker=true: without it, workers share each batch, as one process "
                    f"would compute it. Add batch_per_worker=true, or omit {name}."
                )

    def num_items(self, num_replicas: int) -> int:
        """Return the number of batches whose gradients make a round."""
        return max(1, num_replicas - self.backup_workers)

    @property
    def requires(self) -> Requirements:
        if self.batch_per_worker:
            return Requirements(waits="rounds")
        in_stages = {"batch_per_worker": True}  # of one replica, a round is one batch
        return Requirements(servers=False, optimizer="workers", waits="rounds", split_batches=True, in_stages=in_stages)

    async def run(self, worker: Worker) -> None:
        if self.batch_per_worker:
            await self._run_with_servers(worker)
            return
        optimizer = worker.optimizer(self.spec(), self.schedule())
        async for part in worker.parts():
            optimizer.step(await worker.mean(await worker.gradient(part)))

    async def _run_with_servers(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            if await worker.servers.pull(round=work_item.round):
                for batch in work_item.batches:
                    worker.servers.push(await worker.gradient(batch))

    def server(self, num_replicas: int) -> ServerPart | None:
        if not self.batch_per_worker:
            return None
        rule = partial(FirstArrivalsOfRound, self.num_items(num_replicas)) if self.backup_workers else MeanOfRound
        return ServerPart(rule, self.spec(self.lr_factor(num_replicas) * self.lr), self.schedule())

    def lr_factor(self, num_replicas: int) -> float:
        if not self.batch_per_worker:
            return 1.0
        items = self.num_items(num_replicas)
        return {"none": 1.0, "linear": float(items), "sqrt": math.sqrt(items)}[self.scaling]

    def advice(self, cluster: Cluster) -> list[str]:
        if not self.batch_per_worker:
            return []  # a slow worker gets a smaller part
        waiting = [] if self.backup_workers else advice.of_waiting(cluster, how="in rounds")
        return [*self._scaling(cluster), *self._backups(cluster), *waiting]

    def _scaling(self, cluster: Cluster) -> list[str]:
        items = self.num_items(cluster.replicas)
        if self.scaling != "linear" or self.warmup_fraction or items < 2:
            return []
        return [
            f"scaling=linear without a warm-up: the first step uses a learning rate of {items * self.lr:g}, "
            f"{items} times that of one worker, before training is stable. Add warmup_fraction=0.1, or in a "
            "custom training loop a scheduler."
        ]

    def _backups(self, cluster: Cluster) -> list[str]:
        kept, number = self.num_items(cluster.replicas), cluster.replicas
        if not self.backup_workers or (self.backup_workers < number and 2 * kept >= number):
            return []
        return [
            f"backup_workers={self.backup_workers} with {cluster}: of {number} gradients {number - kept} are computed "
            f"and thrown away. Choose at most {number // 2}."
        ]
