r"""Hogwild: every process adds its steps to one shared memory, without locks and without servers (Recht et al. 2011).

The parameters w of all workers are one memory of one machine. Each worker, over and over:

    g    = gradient(w, batch)                what it reads, others may be writing
    w_v <- w_v - lr * g_v                    for every component v that the batch touches; no lock

An addition is a read and a write. If two workers add to one component at the same moment, one addition can be lost, and
nobody knows; the smaller the part of the components that a batch touches, the rarer that is. A sparse gradient
(nn.Embedding and nn.EmbeddingBag with sparse=True) touches its own rows only, and no others are written. The paper
writes one component at a time, chosen at random, or all that a sample touches: here it is all. It adds one sample's
gradient; here it is a batch's mean.

Only plain SGD: it remembers nothing. A momentum, or Adagrad's sums, would be kept by each process for itself, and none
of them would be the right one.

What is known: a batch is marked in the same memory when its addition has been made, so each is done once, and one whose
worker died is leased again, except that the one addition it was making may be partly in; those are counted (cut short).
Staleness is the number of updates that others have written since the worker began to compute.

Use it when all workers are on one machine and gradients are sparse, or steps so short that a server would be in the
way. Not when there is more than one machine, or every update must count.
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

    lr: float = 0.1  # of one batch's mean gradient
    optimizer: str = "sgd"  # nothing else: see above
    schedule: Shape = "constant"
    warmup: float = 0.0  # the part of the run in which the learning rate rises
    guard: bool = True  # lower the learning rate when the loss runs away, and say so

    def __post_init__(self) -> None:
        self.spec()
        Schedule(self.schedule, self.warmup)

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
        optimizer = worker.optimizer(self.spec(), Schedule(self.schedule, self.warmup))
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                optimizer.step(await worker.gradient(batch))

    def spec(self) -> OptimizerSpec:
        spec = element_wise(self.optimizer, self.lr)
        if self.optimizer != "sgd":
            raise ValueError(
                f"optimizer={self.optimizer} remembers past gradients, and in shared memory each process would "
                "remember only its own: leave it at sgd, or choose downpour, whose servers remember for all."
            )
        return spec

    def staleness(self, replicas: int) -> float:
        return float(replicas - 1)

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_stale_rate(self.optimizer, self.staleness(cluster.replicas))
