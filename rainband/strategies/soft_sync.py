r"""Soft synchronisation: one update for every c gradients, whoever they are from (Gupta et al., Zhang et al. 2016).

A worker, never waiting for the others:

    w   <- server;   g = gradient(w, batch);   g -> server

The server, with lambda workers, after every c = floor(lambda / n) gradients g_1 .. g_c, each block by itself:

    w   <- w - 1/c * sum_l  a_l * g_l                   a_l = lr / max(1, t_l)          (scaling=staleness)
                                                        a_l = lr / n                    (scaling=n)
                                                        a_l = lr                        (scaling=none)

where t_l is how many updates g_l has missed. It is (lambda - 1) / c in the mean, about n, whatever the speeds of the
workers are; for one gradient it has no bound. n = 1 is close to synchronous, with nobody waiting; n = lambda is
asynchronous, and with scaling=none it is Downpour. Delayed gradient descent is stable only for steps of about 1 / t,
hence the division. lambda is the number of workers that are there: when one is lost, comes back or is new, c follows
with the next update of each block.

Use it when machines differ and you want fewer, better updates than downpour makes. Not when the learning rate was tuned
for one process and scaling is none: what is stable there need not be stable here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import ApplyEvery, compensated
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class SoftSync(Strategy):
    """Asynchronous SGD that gathers a few gradients for each update."""

    n: int = 1  # updates in the time in which every worker pushes once; c = workers / n
    scaling: Literal["staleness", "n", "none"] = "staleness"  # what the learning rate is divided by
    compensation: float = 0.0  # of what changed since a gradient was read (DC-ASGD, about 0.04 to 2); 0: none
    compensation_memory: float = 0.0  # 0.95: weaker where gradients have been large (DC-ASGD-a); 0: alike everywhere
    lr: float = 0.1  # of one process
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0  # the part of the run in which the learning rate rises
    guard: bool = True  # lower the learning rate, or tighten the bound, when the loss runs away, and say so

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: choose from 1 (nearly synchronous) to the number of workers (asynchronous).")
        self.server(1)
        if self.scaling == "staleness" and self.optimizer != "sgd":
            raise ValueError(
                f"scaling=staleness divides each gradient, and {self.optimizer} does not mind how long a gradient is: "
                "type scaling=n, which divides the learning rate, or optimizer=sgd."
            )

    def count(self, num_workers: int) -> int:
        """Gradients of one update."""
        return max(1, num_workers // self.n)

    @property
    def requires(self) -> Requirements:
        return Requirements()

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_workers: int) -> ServerPart:
        lr = self.lr / self.n if self.scaling == "n" else self.lr
        optimizer = element_wise(self.optimizer, lr, self.momentum, self.weight_decay)
        by_staleness = self.scaling == "staleness"
        rule = partial(ApplyEvery, self.count(num_workers), by_staleness, num_workers, self.count)
        return ServerPart(
            compensated(rule, self.compensation, self.compensation_memory),
            optimizer,
            Schedule(self.schedule, self.warmup),
            guard=self.guard,
        )

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / self.count(replicas)

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        stale = advice.of_stale_rate(self.optimizer, missed) if self.scaling == "none" else []
        return [*advice.of_momentum(self.momentum, missed, cluster), *self._groups(cluster), *stale]

    def _groups(self, cluster: Cluster) -> list[str]:
        n, number = self.n, cluster.replicas
        if number < 2:
            return []
        if n > number:
            rate = f" and the learning rate is divided by {n}" if self.scaling == "n" else ""
            return [
                f"n={n} with {cluster}: an update cannot be of less than one gradient, so n is {number} in truth"
                f"{rate}. Choose n from 1 to {number}."
            ]
        if number % n:
            count = number // n
            fitting = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
            return [
                f"n={n} does not divide {cluster}: c = {number} / {n} is rounded down to {count}, so there are "
                f"{number / count:.3g} updates, not {n}, when all have pushed once. Choose n from {fitting}."
            ]
        return []
