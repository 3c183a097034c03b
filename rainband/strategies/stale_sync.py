r"""Stale synchronous parallel: run ahead of the slowest worker, but not too far (Ho et al. 2013).

A worker's clock c is the number of cells it has pushed. To go on it reads the parameters at its clock:

    w   <- server, read at clock c            it waits while  c - min_i c_i > bound
    D    = sum of n_push gradients at w
    D   -> server;  c = c + 1

so that a read at clock c contains every update of clock <= c - bound - 1 of everyone, and all its own. The server:

    w   <- w - lr * D                         for every push that comes, each block by itself

bound = 0 is lock-step, a large bound is fully asynchronous. The servers hold back the reply to a pull, block by block,
so nobody stands between workers and servers. Who is dead, away, done or without work is not waited for; who comes late,
or comes back, starts at the slowest clock. The paper keeps rows in caches on the workers; here every read goes to the
servers, so it is as fresh as they are, and never older than the bound allows.

Use it when machines are alike most of the time, and now and then one is slow for a while. Not when one is slow all the
time: at the end of the bound everyone goes at its speed (downpour, soft_sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import StalenessBound, compensated
from rainband.strategy import Cluster, Gradient, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class StaleSync(Strategy):
    """Asynchronous SGD in which nobody runs too far ahead."""

    bound: int = 3  # clocks that a worker may be ahead of the slowest
    n_push: int = 1  # steps of one clock; their gradients are summed into one push
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
        if self.bound < 0:
            raise ValueError(f"bound={self.bound}: choose 0 (lock-step) or more.")
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.compensation and self.n_push > 1:
            raise ValueError("compensation is for one gradient at a time: leave n_push at 1.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded", batches_per_item=self.n_push)

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            owed: Gradient | None = None
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                owed = gradient if owed is None else owed + gradient
            assert owed is not None, "a cell has at least one batch"
            worker.servers.push(owed)

    def server(self, num_workers: int) -> ServerPart:
        optimizer = element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
        rule = compensated(partial(StalenessBound, self.bound), self.compensation, self.compensation_memory)
        return ServerPart(rule, optimizer, Schedule(self.schedule, self.warmup), guard=self.guard)

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / (1 if self.bound else 2)  # in lock-step the first to push misses none

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.bound),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
