r"""Downpour SGD: every worker pushes and fetches when it likes, nobody waits (Dean et al. 2012, Algorithm 1.1).

A worker, every n_fetch steps and every n_push steps:

    w  <- server                  fetched while it computes
    g   = gradient(w, batch)
    D  += g                       what the server has not had yet
    w  -= local_lr * g            its own step, between fetches
    D  -> server;  D = 0          pushed while it computes on

The server, for every push that comes, each block by itself:

    w  -= lr * D                                        (SGD)
    w  -= lr / sqrt(sum of all D^2 so far) * D          (Adagrad, recommended: it tames stale gradients)

With n_push > 1 the server gets the sum of n_push gradients, as in the paper, not their mean. The paper's rate for
Adagrad is about ten times the best fixed one; so the worker's own step, which has no Adagrad, takes a tenth of it.
Where every step fetches (n_fetch = 1) there is nothing between fetches, and we leave the own step out unless local_lr
is given; the paper makes it all the same, and the next fetch overwrites it.

With compensation > 0 the server corrects each gradient for what has changed since the worker fetched (DC-ASGD, Zheng et
al. 2017, see rules/compensated.py):  D + compensation * D * D * (w - what the worker fetched). It keeps a copy of the
parameters for every worker, two while it fetches ahead.

Use it when machines differ, come and go, or the network is slow. Not when you need the result of one process to the
last bit (sync), or with a large momentum: it adds to the momentum that asynchrony itself brings.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import element_wise
from rainband.rules import ApplyOnArrival, compensated
from rainband.strategy import Cluster, Gradient, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True)
class Downpour(Strategy):
    """Asynchronous SGD through parameter servers."""

    n_push: int = 1  # steps between two pushes
    n_fetch: int = 1  # steps between two fetches
    lr: float = 0.01  # the servers' learning rate
    optimizer: str = "adagrad"  # the servers' optimizer: sgd, adagrad, adam, adamw, rmsprop, ...
    momentum: float = 0.0  # for sgd and rmsprop
    weight_decay: float = 0.0
    compensation: float = 0.0  # of what changed since a gradient was read (DC-ASGD, about 0.04 to 2); 0: none
    compensation_memory: float = 0.0  # 0.95: weaker where gradients have been large (DC-ASGD-a); 0: alike everywhere
    local_lr: float | None = None  # of the worker's own step; none: 0 if n_fetch=1, else lr (sgd) or a tenth of it
    overlap: bool = True  # fetch while computing; no: wait for one's own push before the next step
    warm_start_batches: int = 0  # batches that one worker does alone before the rest are released
    schedule: Shape = "constant"
    warmup: float = 0.0  # the part of the run in which the learning rate rises
    guard: bool = True  # lower the learning rate, or tighten the bound, when the loss runs away, and say so

    def __post_init__(self) -> None:
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.n_fetch < 1:
            raise ValueError(f"n_fetch={self.n_fetch}: choose at least 1.")
        if self.compensation and (self.n_push > 1 or self.n_fetch > 1):
            raise ValueError("compensation needs gradients at what was fetched: leave n_push and n_fetch at 1.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(batches_per_item=self.n_push, warm_start_batches=self.warm_start_batches)

    async def run(self, worker: Worker) -> None:
        server, step, own_lr = worker.servers, 0, self._own_lr()
        await server.pull()
        async for work_item in worker.work_items():
            owed: Gradient | None = None
            for batch in work_item.batches:
                fetch = server.pull() if self.overlap and step % self.n_fetch == 0 else None
                gradient = await worker.gradient(batch)
                owed = gradient if owed is None else owed + gradient
                if fetch is not None:
                    await fetch
                if own_lr:
                    worker.params.step(gradient, own_lr)
                step += 1
            assert owed is not None, "a cell has at least one batch"
            if not self.overlap and step % self.n_fetch < len(work_item.batches):
                await server.exchange(owed)
            else:
                server.push(owed)

    def _own_lr(self) -> float:
        if self.local_lr is not None:
            return self.local_lr
        if self.n_fetch == 1:
            return 0.0  # the next fetch replaces the parameters anyway
        return self.lr if self.optimizer == "sgd" else self.lr / 10

    def server(self, num_workers: int) -> ServerPart:
        optimizer = element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
        rule = compensated(ApplyOnArrival, self.compensation, self.compensation_memory)
        return ServerPart(rule, optimizer, Schedule(self.schedule, self.warmup), guard=self.guard)

    def staleness(self, replicas: int) -> float:
        missed = float(replicas - 1)
        if self.overlap:
            missed += replicas  # it is fetched one step before it is used
        if self.n_push == 1:  # of sums, which have gradients of several ages, it is less
            missed += replicas * (self.n_fetch - 1) / 2
        return missed

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return advice.of_momentum(self.momentum, missed, cluster) + advice.of_stale_rate(self.optimizer, missed)
