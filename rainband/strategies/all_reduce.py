r"""All-reduce: synchronous SGD whose workers sum their gradients by an algorithm of choice; `sync` by its usual name.

    each batch of B samples is cut into parts, one for each of the K workers: n_1 + ... + n_K = B
    g_j     = gradient(w_t, part j)
    g       = all-reduce of n_j / B * g_j                            algorithm=ring, direct, double_tree, ...
    w_{t+1} = optimizer step from w_t with g                         on every worker

The updates are those of `sync`, and of one process. `rainband explain ring` shows the algorithms, with the steps and
bytes of each; auto measures the machine first, and takes the one that should be fastest for the model's size. In a
simulation, the algorithm's moves are priced with the latency and bandwidth of the network. Gradients are summed after
the backward pass, not during it: on the machines that were measured, overlapping them saved nothing.

If a worker is lost, the others compute its part of the open batch, and from then on read each other's gradients
directly, as in sync: the updates stay the same. A worker that joins or returns receives the state of another one.

Use to compare all-reduce algorithms, on this machine or on a simulated network. Avoid for training on one machine: sync
makes the same updates with fewer copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband.collectives.algorithm import load_algorithm
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class AllReduce(OptimizerSettings, Strategy):
    """Synchronous SGD by an all-reduce algorithm."""

    algorithm: str = "auto"  # auto, or an all-reduce algorithm that rainband explain lists, such as ring

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm != "auto":
            load_algorithm(self.algorithm)

    @property
    def requires(self) -> Requirements:
        return Requirements(
            servers=False, optimizer="workers", waits="rounds", split_batches=True, algorithm=self.algorithm
        )

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.spec(), self.schedule())
        async for part in worker.parts():
            optimizer.step(await worker.mean(await worker.gradient(part)))
