r"""Tree of servers: inner servers add gradients on the way to the root (Rudra, Gupta et al. 2016).

    g_l = gradient(w, batch)           on worker l, which pushes to a leaf of the tree and pulls from it
    s   = sum_l n_l g_l                on each inner server, over its children, passed up with n = sum_l n_l
    w <- w - lr * s / n                on the root, the only server that updates; w comes down the same way

`--servers N` counts all servers of the tree: the root, which has the whole model, and N - 1 inner servers. Server i has
the children arity * i + 1, ..., arity * i + arity; workers are spread evenly over the servers without children. So the
root exchanges with at most `arity` servers, however many workers there are. With one server, all workers use it.

The root makes an update of every c = floor(K / n) gradients of K workers, from any of them (n-softsync); workers do not
wait for each other. With synchronous=true, a round has one batch of each worker, all computed at the same parameters:
the updates of `sync batch_per_worker=true`, up to the order of the sum.

    variant=base        workers push to and pull from the owners of the blocks; the N servers share the model, no tree
    variant=adv         the tree; a worker pulls, computes, pushes, and pulls again
    variant=adv_star    the tree; pulling and pushing overlap with computing, which never waits for parameters, and for
                        the root only if `in_flight` gradients of a worker are on their way. They may be staler.

Departures from the paper: an inner server does not wait for a gradient of each child, but sends what has arrived when
its parent has answered the sum before. So a slow or lost worker delays no other. Sums are weighted by samples. The
broadcast of weights among the workers of adv* is that of the tree of servers: a worker reads the parameters of its
leaf, on one machine in shared memory.

If a worker is lost, its batches are reassigned; what the root has accepted of it stays, once. If the root refuses a sum
that has a gradient of a lost worker, the inner server sends the others again. A worker that joins uses a leaf, too. An
inner server has no accepted gradient and no parameters that the root lacks, but its workers have no other way: if it is
lost, the run ends with an error that names it, as with every server, and can be resumed from a checkpoint.

Use when many workers saturate one server, and the model cannot be cut among many. Avoid otherwise: N servers that share
the model (variant=base, soft_sync) move 1/N of the bytes each, without another hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.rules import MeanOfArrivals, MeanOfRoundSums, Rule
from rainband.strategy import Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Tree(OptimizerSettings, Strategy):
    """Synchronous or n-softsync SGD through a tree of servers."""

    arity: int = 3  # children of each server
    variant: Literal["base", "adv", "adv_star"] = "adv"  # star; tree; tree with overlapped pushes and pulls
    synchronous: bool = False  # rounds: every worker's batch of a round is computed at the same parameters
    in_flight: int = 4  # gradients of one worker that may be on their way to the root, with adv_star
    n: int = 1  # updates in the time in which every worker pushes once; c = workers / n
    guard: bool = True  # divergence guard: lower the learning rate when the loss diverges

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arity < 2:
            raise ValueError(f"arity={self.arity}: choose 2 children of each server or more.")
        if self.n < 1:
            raise ValueError(f"n={self.n}: choose from 1 (nearly synchronous) to the number of workers (asynchronous).")
        if self.in_flight < 1:
            raise ValueError(f"in_flight={self.in_flight}: choose 1 gradient on its way or more.")
        if self.synchronous and self.n > 1:
            raise ValueError(f"synchronous=true makes one update per round: omit n={self.n}.")
        if self.synchronous and self.variant == "adv_star":
            raise ValueError(
                "variant=adv_star computes while parameters arrive, and in rounds every worker waits for them: omit "
                "synchronous=true, or use variant=adv."
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(
            tree_arity=0 if self.variant == "base" else self.arity,
            waits="rounds" if self.synchronous else "never",
            guard=self.guard and not self.synchronous,
            whole_model=True,
            not_replayable="" if self.variant == "base" else "adds gradients on inner servers, which is not recorded",
        )

    async def run(self, worker: Worker) -> None:
        if self.variant == "adv_star":
            await self._run_overlapped(worker)
            return
        async for work_item in worker.work_items():
            if await worker.servers.pull(round=work_item.round if self.synchronous else None):
                for batch in work_item.batches:
                    worker.servers.push(await worker.gradient(batch))

    async def _run_overlapped(self, worker: Worker) -> None:
        await worker.servers.pull()
        on_their_way: deque[Awaitable[None]] = deque()
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                if len(on_their_way) == self.in_flight:
                    await on_their_way.popleft()
                on_their_way.append(worker.servers.push(gradient))
                await worker.servers.refresh()

    def server(self, num_replicas: int) -> ServerPart:
        return ServerPart(lambda: self._rule(num_replicas), self.spec(), self.schedule())

    def _rule(self, num_replicas: int) -> Rule:
        if self.synchronous:
            return MeanOfRoundSums()
        return MeanOfArrivals(num_replicas, self.gradients_per_update, asked=self.variant != "base")

    def gradients_per_update(self, num_replicas: int) -> int:
        """Return c."""
        return max(1, num_replicas // self.n)

    def staleness(self, replicas: int) -> float | None:
        return None if self.synchronous else (replicas - 1) / self.gradients_per_update(replicas)

    def advice(self, cluster: Cluster) -> list[str]:
        if self.synchronous:
            return advice.of_waiting(cluster, how="in rounds")
        return advice.of_momentum(self.momentum, (cluster.replicas - 1) / self.n, cluster)
