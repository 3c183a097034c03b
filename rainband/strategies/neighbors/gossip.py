r"""D-PSGD: workers average their models with their neighbors, and apply their own gradients (Lian et al. 2017).

    g_i  = gradient(x_i, batch of worker i)
    x_i <- sum_j W_ij x_j - lr * g_i                 on each worker i; W is the mixing matrix of the graph

W is symmetric and its rows sum to 1 (in a ring: 1/3 for oneself and each of two neighbors). So the mean of the models
moves by -lr * mean(g) in each step, as in all-reduce, while a worker sends its model to its neighbors only: as many
bytes for 1,000 workers as for 3. The models differ; without gradients, their distance from the mean shrinks in each
step at least by the second largest eigenvalue of W (in a ring: 1/3 + 2/3 cos(2 pi / n)). At the end, all take the mean.
Models are exchanged, not gradients: workers that averaged gradients with their neighbors would never agree.

With another optimizer, -lr * g_i is its step. A graph from a file has one edge per line, such as  0 1.

If a worker is lost, the others go on at once, and the graph closes around it: the ring is then one of the workers that
are left, so their mean stays. Its own model is lost, and its batches that are in no other model are repeated. A worker
that joins begins with another's model.

Use on slow networks with many workers, or where latency is high. Avoid for few workers on one machine, where a mean of
all is as cheap (sync).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rainband import advice
from rainband.collectives.graphs import advice_of, check_graph, mixing_matrix
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Gossip(OptimizerSettings, Strategy):
    """Averaging with neighbors."""

    graph: str = "ring"  # ring, torus, exponential, complete, or a file with one edge per line

    def __post_init__(self) -> None:
        super().__post_init__()
        check_graph(self.graph)

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            if models.is_over:
                worker.params.replace(await models.mean(equally=True))
                continue
            before = worker.params.copy()
            for batch in models.batches(1):
                optimizer.step(await worker.gradient(batch))
            step = worker.params.copy() - before
            worker.params.replace(before)
            worker.params.replace(await models.mix(self.row) + step)

    def row(self, i: int, number: int) -> Sequence[float]:
        """Return the weights that the i-th of some workers gives to each of them."""
        return mixing_matrix(self.graph, number)[i]

    def advice(self, cluster: Cluster) -> list[str]:
        return [
            *advice_of(self.graph, cluster.replicas, str(cluster)),
            *advice.of_waiting(cluster, how="in each step"),
        ]
