r"""Parameter averaging, or local SGD: every worker makes `period` steps of its own, then all take the mean model.

    w_i <- optimizer step from w_i with the gradient of a batch      `period` times, on each worker i
    w_i <- sum_j n_j w_j / sum_j n_j                                 n_j samples that worker j has processed

With period=1 and plain SGD, this is `sync batch_per_worker=true`: one process with a K times larger batch. Otherwise it
is not what one process computes: each worker goes its own way for `period` steps. For every optimizer, the mean of the
models is the mean of their updates: mean(w_i) = w_0 + mean(w_i - w_0). Bytes per batch fall with the period.

state=average also averages the optimizers' vectors, such as momentum, for as many more bytes; state=keep leaves each
worker its own. Statistics of BatchNorm are averaged; step counts are equal already. With one worker it is `single`.

If a worker is lost, the others go on: what it had changed since the last mean is lost with it, and its batches of that
round are repeated in the next one, so that each batch is in one mean. A worker that joins begins with the model and
the optimizer state of another one.

Use when communication costs more than computing, with a period as long as the accuracy allows. Avoid when the result
must be that of one process (sync); with many workers, try block_momentum, which keeps the speed of training up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Averaging(OptimizerSettings, Strategy):
    """Periodic averaging of the workers' models."""

    period: int = 10  # steps of each worker between two means
    state: Literal["keep", "average"] = "keep"  # of the optimizers, when models are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period={self.period}: choose 1 or more steps between two means.")

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            for batch in models.batches(self.period):
                optimizer.step(await worker.gradient(batch))
            worker.params.replace(await models.mean())
            if self.state == "average":
                await models.mean_of_optimizers()

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_waiting(cluster, how="at each mean")
