r"""One process, no servers: plain PyTorch, the baseline.

    w_{t+1} = w_t - lr * gradient(w_t, batch t)

Use as the baseline for the other strategies. Avoid when you want more than one worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Single(OptimizerSettings, Strategy):
    """Plain SGD in one process."""

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=False, max_replicas=1, optimizer="workers")

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.spec(), self.schedule())
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                optimizer.step(await worker.gradient(batch))
