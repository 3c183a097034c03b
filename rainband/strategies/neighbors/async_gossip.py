r"""AD-PSGD: workers average their models with one neighbor at a time, without waiting for others (Lian et al. 2018).

    g_i  = gradient(x_i, batch of worker i)          at a copy of x_i
    j    = a neighbor of i in the graph, at random
    x_i, x_j <- (x_i + x_j) / 2                      at once: no worker sees one without the other
    x_i <- x_i - lr * g_i                            on each worker i, at its own pace

While worker i computes, others may average with its model: so its gradient can be stale. The mean of the models moves
by -lr * g_i / K for each gradient, and averaging does not move it. A slow worker makes fewer steps, and delays no
other; its model follows those of its neighbors. At the end, the result is the mean.

The paper keeps workers from waiting for each other in a circle by a graph with two sides, of which one asks and the
other answers. Here the models are in the memory of one machine, and a worker locks two of them in the order of their
ranks, so any graph works. With another optimizer, -lr * g_i is its step. The graphs are those of gossip.

If a worker is lost, its model stays in the memory with all its steps, and others go on averaging with it; its batches
that have made no step are reassigned. If it was lost in the middle of an exchange, that one may be partially applied. A
worker that is started again continues with its model.

Use when workers differ much in speed. Avoid when the result must be that of one process (sync), or when few steps are
made: models that are apart have a worse mean.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rainband.collectives.graphs import advice_of, check_graph, mixing_matrix
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import Batch, Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class AsyncGossip(OptimizerSettings, Strategy):
    """Averaging in pairs, without waiting."""

    graph: str = "exponential"  # ring, torus, exponential, complete, or a file with one edge per line

    def __post_init__(self) -> None:
        super().__post_init__()
        check_graph(self.graph)

    @property
    def requires(self) -> Requirements:
        return Requirements(
            servers=False, optimizer="workers", shared_memory=True, in_pairs=True, whole_model=True, custom_loop=False
        )

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.spec(), self.schedule(), counts=False)
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                before = worker.params.copy()
                optimizer.step(gradient)
                step = worker.params.copy() - before
                await worker.params.average_with(self.partner(worker.rank, worker.num_workers, batch), step, gradient)

    def partner(self, rank: int, number: int, batch: Batch) -> int:
        """Return the neighbor with which a worker averages after this batch; itself if it has none."""
        weights = mixing_matrix(self.graph, number)[rank]
        neighbors = [other for other, weight in enumerate(weights) if weight and other != rank]
        return random.Random(f"{rank} {batch.portion} {batch.k}").choice(neighbors or [rank])

    def advice(self, cluster: Cluster) -> list[str]:
        return advice_of(self.graph, cluster.replicas, str(cluster))
