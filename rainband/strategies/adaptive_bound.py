r"""Stale-synchronous SGD with an adaptive bound: near lock-step at first, looser while the loss is healthy.

Workers and servers do what they do in stale_sync:

    w   <- server, read at clock c            the read waits while  c - min_i c_i > bound
    g   -> server;  c = c + 1;  w <- w - lr * g

but the bound changes. The coordinator checks the run about once a second:

    bound = min_bound                         at the start, when gradients are large and change quickly
    bound + 1 -> bound                        after three checks in which the loss was finite and not diverging
    bound / 2 -> bound                        when the loss diverges or gradients are not finite

and at the lowest bound the learning rate is halved instead. Stale gradients do the most harm at the start, and a
straggler costs the most when the bound is small; so no single bound is right for a whole run.

Use when you do not know which bound is right. Avoid when the run takes only seconds: the bound rises by one in about
three of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.rules import StalenessBound
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class AdaptiveBound(OptimizerSettings, Strategy):
    """Stale-synchronous SGD whose bound follows the loss."""

    min_bound: int = 0  # the smallest bound, and the one at the start
    max_bound: int = 16  # the largest bound
    lr: float = 0.05  # the servers' learning rate

    def __post_init__(self) -> None:
        if not 0 <= self.min_bound <= self.max_bound:
            raise ValueError(
                f"min_bound={self.min_bound} max_bound={self.max_bound}: choose 0 <= min_bound <= max_bound, "
                "such as min_bound=0 max_bound=16."
            )
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded", guard=True, bound_range=(self.min_bound, self.max_bound))

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_replicas: int) -> ServerPart:
        return ServerPart(partial(StalenessBound, self.min_bound), self.spec(), self.schedule())

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / (1 if self.max_bound else 2)  # in lock-step the first push of a clock misses none

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.max_bound),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
