r"""Stale synchronous parallel: workers run ahead of the slowest one, up to a bound (Ho et al. 2013).

A worker's clock c is the number of work items it has pushed. To go on it reads the parameters at its clock:

    w   <- server, read at clock c            the read waits while  c - min_i c_i > bound
    D    = sum of n_push gradients at w
    D   -> server;  c = c + 1

so that a read at clock c contains every update of clock <= c - bound - 1 of all workers, and all its own. The server:

    w   <- w - lr * D                         for every push, each block by itself

bound = 0 is lock-step, a large bound is fully asynchronous. The servers delay the reply to a pull, block by block; the
coordinator takes no part in it. No worker waits for lost, inactive, finished and idle ones. A worker that joins late or
returns starts at the slowest worker's clock. The paper caches rows on the workers; here every read goes to the servers,
so it is as fresh as they are, and never older than the bound allows.

Use when machines are about equal and one of them is slow now and then. Avoid with a permanent straggler: once the
others are `bound` clocks ahead, all workers run at its speed (downpour, soft_sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.optimizer_settings import AsyncSettings
from rainband.rules import StalenessBound
from rainband.strategy import Cluster, Gradient, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class StaleSync(AsyncSettings, Strategy):
    """Asynchronous SGD in which no worker runs too far ahead."""

    bound: int = 3  # clocks that a worker may be ahead of the slowest
    n_push: int = 1  # steps of one clock; their gradients are summed into one push
    lr: float = 0.05  # the servers' learning rate

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(f"bound={self.bound}: choose 0 (lock-step) or more.")
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.compensation and self.n_push > 1:
            raise ValueError("compensation corrects one gradient at a time: leave n_push at 1.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded", batches_per_item=self.n_push, guard=self.guard)

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            total: Gradient | None = None
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                total = gradient if total is None else total + gradient
            assert total is not None, "a work item has at least one batch"
            worker.servers.push(total)

    def server(self, num_replicas: int) -> ServerPart:
        return self.compensated_part(partial(StalenessBound, self.bound))

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / (1 if self.bound else 2)  # in lock-step the first push of a clock misses none

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.bound),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
