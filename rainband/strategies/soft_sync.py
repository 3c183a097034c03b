r"""n-softsync: the server averages every c gradients, from any workers, into one update (Zhang et al. 2016).

A worker never waits for the others (Gupta et al. 2016 describe the same protocol):

    w   <- server;   g = gradient(w, batch);   g -> server

The server, with lambda workers, after every c = floor(lambda / n) gradients g_1 .. g_c, each block by itself:

    w   <- w - 1/c * sum_l  a_l * g_l                   a_l = lr / max(1, t_l)          (scaling=staleness)
                                                        a_l = lr / n                    (scaling=n)
                                                        a_l = lr                        (scaling=none)

where t_l is the staleness of g_l: the updates that its worker has missed. Its mean is (lambda - 1) / c, about n,
whatever the speeds of the workers; a single gradient has no bound. n = 1 is close to synchronous, without waiting;
n = lambda is asynchronous, and with scaling=none it is Downpour. Delayed gradient descent is stable only for steps of
about 1 / t, hence the division. lambda is the number of live workers: when one is lost, returns or joins, c follows
with the next update of each block.

Use when machines differ and you want fewer, better updates than downpour makes. Avoid scaling=none with a learning rate
that was tuned for one process: it may diverge, because gradients are stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from rainband import advice
from rainband.optimizer_settings import AsyncSettings
from rainband.rules import ApplyEvery
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class SoftSync(AsyncSettings, Strategy):
    """Asynchronous SGD that averages several gradients into each update."""

    n: int = 1  # updates in the time in which every worker pushes once; c = workers / n
    scaling: Literal["staleness", "n", "none"] = "staleness"  # what the learning rate is divided by
    lr: float = 0.1  # learning rate of one process

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: choose from 1 (nearly synchronous) to the number of workers (asynchronous).")
        self.server(1)
        if self.scaling == "staleness" and self.optimizer != "sgd":
            raise ValueError(
                f"scaling=staleness shrinks stale gradients, and {self.optimizer} normalizes that away: "
                "use scaling=n, which divides the learning rate, or optimizer=sgd."
            )

    def gradients_per_update(self, num_replicas: int) -> int:
        """Return c."""
        return max(1, num_replicas // self.n)

    @property
    def requires(self) -> Requirements:
        return Requirements(guard=self.guard, not_replayable=self.not_replayable)

    async def run(self, worker: Worker) -> None:
        async for work_item in worker.work_items():
            await worker.servers.pull()
            for batch in work_item.batches:
                worker.servers.push(await worker.gradient(batch))

    def server(self, num_replicas: int) -> ServerPart:
        c, by_staleness = self.gradients_per_update(num_replicas), self.scaling == "staleness"
        rule = partial(ApplyEvery, c, by_staleness, num_replicas, self.gradients_per_update)
        return self.compensated_part(rule, self.lr_factor(num_replicas) * self.lr)

    def lr_factor(self, num_replicas: int) -> float:
        return 1 / self.n if self.scaling == "n" else 1.0

    def staleness(self, replicas: int) -> float:
        return (replicas - 1) / self.gradients_per_update(replicas)

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
                f"n={n} with {cluster}: an update needs at least one gradient, so n acts as {number}{rate}. "
                f"Choose n from 1 to {number}."
            ]
        if number % n:
            count = number // n
            fitting = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
            return [
                f"n={n} does not divide {cluster}: c = {number} / {n} is rounded down to {count}, so there are "
                f"{number / count:.3g} updates, not {n}, when all have pushed once. Choose n from {fitting}."
            ]
        return []
