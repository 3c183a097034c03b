r"""Bounded delay: a task starts when all tasks before the last tau have finished (Li et al. 2014, Parameter Server).

Every worker numbers its tasks t = 0, 1, 2, ... A task reads, computes and pushes:

    w   <- server                             it waits until everyone's tasks 0 .. t - tau - 1 have finished
    g    = gradient(w, batch of task t)       meanwhile the parameters for task t + 1 are fetched, if tau > 0
    g   -> server

The server, for every push that comes, each block by itself:

    w   <- w - lr * g

tau = 0 is one task after the other for everyone; tau = infinity never waits. Against stale_sync: there a worker always
sees its own last update; here its own tasks, too, may be up to tau behind, so that reading overlaps computing. In the
paper a scheduler sends out the tasks of all workers in one order; here each worker has its own, and the servers hold
back its reads, so nobody stands between. tau may change during the run: it goes to tau_last as the data is done.

Use it when reading takes long beside computing, and machines are about alike. Not when one is slow all the time: after
tau tasks everyone goes at its speed (downpour, soft_sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import TaskBound, compensated
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class BoundedDelay(Strategy):
    """Asynchronous SGD with a bound on the tasks that are under way."""

    tau: int = 4  # tasks that a worker may be ahead of the slowest, or of itself
    tau_last: int | None = None  # the bound at the end of the data; none: as at the beginning
    compensation: float = 0.0  # of what changed since a gradient was read (DC-ASGD, about 0.04 to 2); 0: none
    compensation_memory: float = 0.0  # 0.95: weaker where gradients have been large (DC-ASGD-a); 0: alike everywhere
    lr: float = 0.05  # the servers' learning rate
    optimizer: str = "sgd"  # the servers' optimizer: sgd, adagrad, adam, adamw, rmsprop, ...
    momentum: float = 0.0  # for sgd and rmsprop
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0  # the part of the run in which the learning rate rises
    guard: bool = True  # lower the learning rate, or tighten the bound, when the loss runs away, and say so

    def __post_init__(self) -> None:
        if self.tau < 0 or (self.tau_last is not None and self.tau_last < 0):
            raise ValueError(f"tau={self.tau} tau_last={self.tau_last}: choose 0 (one after the other) or more.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded")

    async def run(self, worker: Worker) -> None:
        fetch = None
        async for work_item in worker.work_items():
            await (fetch or worker.servers.pull())
            fetch = worker.servers.pull(ahead=1) if self.tau and work_item.more else None
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_workers: int) -> ServerPart:
        optimizer = element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
        rule = partial(TaskBound, self.tau, self.tau_last)
        return ServerPart(
            compensated(rule, self.compensation, self.compensation_memory),
            optimizer,
            Schedule(self.schedule, self.warmup),
            guard=self.guard,
        )

    def staleness(self, replicas: int) -> float:
        return float(2 * replicas - 1) if self.tau else (replicas - 1) / 2  # fetched one step before it is used

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.tau),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
