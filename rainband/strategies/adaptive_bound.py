r"""A bound that moves: begin nearly in lock-step, run further ahead while all is well, draw in when it is not.

Workers and servers do what they do in stale_sync:

    w   <- server, read at clock c            it waits while  c - min_i c_i > bound
    g   -> server;  c = c + 1;  w <- w - lr * g

but the bound is no constant. The coordinator looks at the run about once a second:

    bound = low                               at the beginning, when gradients are large and change quickly
    bound + 1 -> bound                        after three looks in which the loss was well and gradients not too stale
    bound / 2 -> bound                        when the loss runs away, or gradients are not finite

and at the lowest bound the learning rate is halved instead. Stale gradients do the most harm at the beginning, and a
straggler costs the most when the bound is small; so neither a small nor a large bound is right for a whole run.

Use it when you do not know which bound is right. Not when the run takes only seconds: the bound rises by one in about
three of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import StalenessBound
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class AdaptiveBound(Strategy):
    """Stale-synchronous SGD whose bound follows the loss."""

    low: int = 0  # the bound at the beginning, and the least
    high: int = 16  # the most
    lr: float = 0.05  # the servers' learning rate
    optimizer: str = "sgd"  # the servers' optimizer: sgd, adagrad, adam, adamw, rmsprop, ...
    momentum: float = 0.0  # for sgd and rmsprop
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0  # the part of the run in which the learning rate rises

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low={self.low} high={self.high}: choose 0 <= low <= high, such as low=0 high=16.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(waits="bounded")

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_workers: int) -> ServerPart:
        optimizer = element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
        rule = partial(StalenessBound, self.low)
        schedule = Schedule(self.schedule, self.warmup)
        return ServerPart(rule, optimizer, schedule, guard=True, adapt=(self.low, self.high))

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / (1 if self.high else 2)  # in lock-step the first to push misses none

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return [
            *advice.of_momentum(self.momentum, missed, cluster),
            *advice.of_waiting(cluster, self.high),
            *advice.of_stale_rate(self.optimizer, missed),
        ]
