r"""One process, no servers: plain PyTorch, the yardstick.

    w_{t+1} = w_t - lr * gradient(w_t, batch t)

Use it to see what the others are worth. Not when you have more than one machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import OptimizerSpec, element_wise
from rainband.strategy import Requirements, Strategy, Worker


@dataclass(frozen=True)
class Single(Strategy):
    """Plain SGD in one process."""

    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Shape = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        self.spec()

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=False, max_replicas=1, optimizer="workers")

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.spec(), Schedule(self.schedule, self.warmup))
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                optimizer.step(await worker.gradient(batch))

    def spec(self) -> OptimizerSpec:
        return element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
