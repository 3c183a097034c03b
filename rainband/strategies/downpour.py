r"""Downpour SGD: asynchronous; workers push and fetch on their own schedule (Dean et al. 2012, Algorithm 1.1).

A worker, every n_fetch steps and every n_push steps:

    w  <- server                  with all of this worker's own pushes applied
    g   = gradient(w, batch)
    D  += g                       accumulated gradient, not pushed yet
    w  -= local_lr * g            the worker's own step, between fetches
    D  -> server;  D = 0

The server, for every push, each block by itself:

    w  -= lr * D                                        (SGD)
    w  -= lr / sqrt(sum of all D^2 so far) * D          (Adagrad, recommended: it dampens stale gradients)

With n_push > 1 the server receives the sum of n_push gradients, as in the paper, not their mean. The paper's rate for
Adagrad is about ten times the best fixed one; so the worker's own step, which has no Adagrad, uses a tenth of it.
With n_fetch = 1 every step fetches, so we omit the own step unless local_lr is given; the paper makes it and overwrites
it with the next fetch.

So with n_push = n_fetch = 1 one worker makes the updates of one process, and W workers of equal speed work with
gradients that miss W - 1 updates. With overlap the next fetch starts before the gradient is computed, so communication
takes no time, but each gradient also misses its worker's own last update: up to 2 W - 1 updates, and even one worker
trains with gradients that are one update old.

What staleness costs, measured with four workers and nothing retuned: a small convolutional network with BatchNorm and
momentum 0.9 reaches 99.1 % in plain PyTorch, 79 % with W - 1 = 3 and 34 % with 2 W - 1 = 7; a small language model with
AdamW a loss of 2.38, 2.76 and 3.04. Without momentum, or with Adagrad and a smaller lr, it costs less.

With compensation > 0 the server corrects each gradient for what has changed since the worker fetched (DC-ASGD, Zheng et
al. 2017, see rules/compensated.py):  D + compensation * D * D * (w - what the worker fetched). It keeps a copy of the
parameters for every worker, two with overlap.

Use when machines differ, fail or join late, or the network is slow. Avoid when results must be reproducible (sync), or
with a large momentum: asynchrony acts as momentum too.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.optimizer_settings import AsyncSettings
from rainband.rules import ApplyOnArrival
from rainband.strategy import Cluster, Gradient, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Downpour(AsyncSettings, Strategy):
    """Asynchronous SGD through parameter servers."""

    n_push: int = 1  # steps between two pushes
    n_fetch: int = 1  # steps between two fetches
    lr: float = 0.01  # the servers' learning rate
    optimizer: str = "adagrad"  # the servers' optimizer: sgd, adagrad, adam, adamw, rmsprop, ... or module:Class
    local_lr: float | None = None  # of the worker's own step; none: 0 if n_fetch=1, else lr (sgd) or a tenth of it
    overlap: bool = False  # fetch the next parameters while computing: hides slow links, but gradients are staler
    warm_start_batches: int = 0  # batches that one worker trains alone before the other workers start

    def __post_init__(self) -> None:
        if not 1 <= self.n_push <= 64:
            raise ValueError(f"n_push={self.n_push}: choose from 1 to 64.")
        if self.n_fetch < 1:
            raise ValueError(f"n_fetch={self.n_fetch}: choose at least 1.")
        if self.compensation and (self.n_push > 1 or self.n_fetch > 1):
            raise ValueError("compensation requires gradients at what was fetched: leave n_push and n_fetch at 1.")
        self.server(1)

    @property
    def requires(self) -> Requirements:
        return Requirements(
            batches_per_item=self.n_push,
            warm_start_batches=self.warm_start_batches,
            guard=self.guard,
            not_replayable=self.not_replayable,
        )

    async def run(self, worker: Worker) -> None:
        servers, step, own_lr = worker.servers, 0, self._own_lr()
        await servers.pull()
        async for work_item in worker.work_items():
            total: Gradient | None = None
            for batch in work_item.batches:
                fetch = servers.pull() if self.overlap and step % self.n_fetch == 0 else None
                gradient = await worker.gradient(batch)
                total = gradient if total is None else total + gradient
                if fetch is not None:
                    await fetch
                if own_lr:
                    worker.params.step(gradient, own_lr)
                step += 1
            assert total is not None, "a work item has at least one batch"
            if not self.overlap and step % self.n_fetch < len(work_item.batches):
                await servers.exchange(total)
            else:
                servers.push(total)

    def _own_lr(self) -> float:
        if self.local_lr is not None:
            return self.local_lr
        if self.n_fetch == 1:
            return 0.0  # the next fetch replaces the parameters anyway
        return self.lr if self.optimizer == "sgd" else self.lr / 10

    def server(self, num_replicas: int) -> ServerPart:
        return self.compensated_part(ApplyOnArrival)

    def staleness(self, replicas: int) -> float:
        missed = float(replicas - 1)
        if self.overlap:
            missed += replicas  # at most: parameters are fetched up to one step before they are used
        if self.n_push == 1:  # a sum of several gradients has several ages, and misses less
            missed += replicas * (self.n_fetch - 1) / 2
        return missed

    def advice(self, cluster: Cluster) -> list[str]:
        missed = self.staleness(cluster.replicas)
        return advice.of_momentum(self.momentum, missed, cluster) + advice.of_stale_rate(self.optimizer, missed)
