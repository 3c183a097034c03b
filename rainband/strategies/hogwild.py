r"""Hogwild: workers add their steps to one shared memory, without locks and without servers (Recht et al. 2011).

All workers share one copy of the parameters w, in the memory of one machine. Each worker repeats:

    g    = gradient(w, batch)                others may write while it reads
    w_v <- w_v - lr * g_v                    for every component v that the batch touches; no lock

An addition is a read and a write. If two workers add to one component at the same moment, one addition can be lost, and
such losses cannot be counted; they are rarer the smaller the fraction of components that a batch touches. A sparse
gradient (nn.Embedding and nn.EmbeddingBag with sparse=True) touches its own rows only, and no others are written. The
paper writes one component at a time, chosen at random, or all that a sample touches: here it is all. It adds one
sample's gradient; here it is a batch's mean.

Only plain SGD is supported, because it has no state: each process would keep its own momentum or Adagrad sums, which
would miss the gradients of the others.

A batch is marked in the same memory when its addition is complete, so each batch is processed once, and the batches of
a worker that died are reassigned. The one addition it was making may be partially applied; these are counted. Staleness
is the number of updates that others wrote since the worker began to compute.

Use when all workers run on one machine and gradients are sparse, or steps so short that servers would be the
bottleneck. Avoid when you need more than one machine, or when no update may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import OptimizerSpec, element_wise
from rainband.strategy import Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Lock-free SGD in shared memory."""

    lr: float = 0.1  # learning rate for a batch's mean gradient
    optimizer: str = "sgd"  # only sgd is supported
    lr_schedule: Shape = "constant"  # factor on the learning rate from the start of the run to its end
    warmup_fraction: float = 0.0  # learning-rate warm-up, as a fraction of the run
    guard: bool = True  # divergence guard: lower the learning rate when the loss diverges

    def __post_init__(self) -> None:
        self.spec()
        Schedule(self.lr_schedule, self.warmup_fraction)

    @property
    def requires(self) -> Requirements:
        return Requirements(
            servers=False,
            optimizer="workers",
            shared_memory=True,
            whole_model=True,
            custom_loop=False,
            guard=self.guard,
        )

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.spec(), Schedule(self.lr_schedule, self.warmup_fraction))
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                optimizer.step(await worker.gradient(batch))

    def spec(self) -> OptimizerSpec:
        spec = element_wise(self.optimizer, self.lr)
        if self.optimizer != "sgd":
            raise ValueError(
                f"optimizer={self.optimizer} is not supported by hogwild: each process would keep the state of its "
                "own gradients only: leave it at sgd, or choose downpour, whose servers keep one state for all."
            )
        return spec

    def staleness(self, replicas: int) -> float:
        return float(replicas - 1)

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_stale_rate(self.optimizer, self.staleness(cluster.replicas))
