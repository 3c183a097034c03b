r"""Bounded delay: a task starts when all tasks before the last tau have finished (Li et al. 2014, Parameter Server).

Every worker numbers its tasks t = 0, 1, 2, ... A task reads, computes and pushes:

    w   <- server                             it waits until all workers' tasks 0 .. t - tau - 1 have finished
    g    = gradient(w, batch of task t)       meanwhile the parameters for task t + 1 are fetched, if tau > 0
    g   -> server

The server, for every push, each block by itself:

    w   <- w - lr * g

tau = 0 is lock-step; a large tau never waits. The difference from stale_sync: there a worker always reads its own last
update; here its own last tau tasks may be missing too, so that reading overlaps computing. In the paper a scheduler
orders the tasks of all workers; here each worker numbers its own, and the servers delay its reads. tau may change
during the run: it goes linearly to tau_end as the data is processed.

Use when reading takes long beside computing, and machines are about equal. Avoid with a permanent straggler: once the
others are tau tasks ahead, all workers run at its speed (downpour, soft_sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.optimizer_settings import AsyncSettings
from rainband.rules import TaskBound
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class BoundedDelay(AsyncSettings, Strategy):
    """Asynchronous SGD with a bound on the tasks in flight."""

    tau: int = 4  # tasks that a worker may be ahead of the slowest worker, or of its own last finished task
    tau_end: int | None = None  # tau at the end of the data; none: constant
    lr: float = 0.05  # the servers' learning rate

    def __post_init__(self) -> None:
        for name, value in (("tau", self.tau), ("tau_end", self.tau_end)):
            if value is not None and value < 0:
                raise ValueError(f"{name}={value}: choose 0 (lock-step) or more.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded", guard=self.guard)

    async def run(self, worker: Worker) -> None:
        fetch = None
        async for work_item in worker.work_items():
            await (fetch or worker.servers.pull())
            fetch = worker.servers.pull(ahead=1) if self.tau and work_item.more else None
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_replicas: int) -> ServerPart:
        return self.compensated_part(partial(TaskBound, self.tau, self.tau_end))

    def staleness(self, replicas: int) -> float:
        return float(2 * replicas - 1) if self.tau else (replicas - 1) / 2  # fetched one step before it is used

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.tau),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
