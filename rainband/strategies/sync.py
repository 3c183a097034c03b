r"""Synchronous SGD: one round at a time, equal to one process with a K times larger batch.

A round is K cells of the plan, one batch each, whoever computes them (K = the number of workers at the start):

    g_j = gradient(w_r, cell j)          j = 1 .. K, every one at exactly version r
    w_{r+1} = w_r - lr * sum_j n_j g_j / sum_j n_j          n_j samples in cell j, summed in cell order

The rule never looks at who is there: when a worker dies, those who wait for the round to end are given its cells, so
the update is over the same batches at the same parameters. A block keeps version r beside r + 1, so that a cell of
round r can still be computed while some block already has r + 1.

Use it when the result must not depend on the machines. Not with slow or mixed machines: everyone waits for the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband.optim_spec import element_wise
from rainband.rules import MeanOfRound
from rainband.schedules import Schedule, Shape
from rainband.types import ServerHalf, Worker


@dataclass(frozen=True)
class Sync:
    """Large-batch SGD over K workers, exactly."""

    lr: float = 0.1  # for the mean over all K cells
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0

    rounds = True

    def __post_init__(self) -> None:
        self.server(1)

    async def run(self, worker: Worker) -> None:
        async for cell in worker.cells():
            if await worker.server.pull(round=cell.round):
                for batch in cell.batches:
                    worker.server.push(await worker.gradient(batch))

    def server(self, num_workers: int) -> ServerHalf:
        optimizer = element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
        return ServerHalf(MeanOfRound, optimizer, Schedule(self.schedule, self.warmup))
