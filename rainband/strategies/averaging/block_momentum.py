r"""Block momentum, BMUF: averaging whose mean change passes through a momentum (Chen and Huo 2016; SlowMo is similar).

    w_i  <- `period` optimizer steps from W_g, on each worker i
    G     = mean(w_i) - W_g                  mean(w_i) weighted by samples
    D    <- eta * D + zeta * G               eta: block_momentum; zeta: block_lr
    W    <- W + D
    W_g   = W                                nesterov=false (classical)
    W_g   = W + eta * D                      nesterov=true

A mean of K models moves about as far as one of them, but has used K times the data. With eta = 1 - 1/K, the default, a
change counts 1 / (1 - eta) = K times in the end, as the steps of one process would. At the end, the model is W.

If a worker is lost, the others go on: its steps since the last mean are lost, and its batches are repeated in the next
round. A worker that joins receives W_g, W, D and an optimizer state. eta follows the number of workers.

Use for many workers and rare communication, where plain averaging is slower per epoch. Avoid with few workers and short
periods (averaging), and with a large momentum of the optimizers: the two add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class BlockMomentum(OptimizerSettings, Strategy):
    """Averaging with a momentum of the mean change."""

    period: int = 10  # steps of each worker between two means
    block_momentum: float | None = None  # eta; none: 1 - 1/K for K workers
    block_lr: float = 1.0  # zeta
    nesterov: bool = True  # workers begin where the momentum leads next; false: at the model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period={self.period}: choose 1 or more steps between two means.")
        if self.block_momentum is not None and not 0 <= self.block_momentum < 1:
            raise ValueError(
                f"block_momentum={self.block_momentum:g}: choose 0 or more, and less than 1; none: 1 - 1/K."
            )

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        shared = models.shared
        while await models.begin():
            shared, start = models.shared, worker.params.copy()
            model, change = shared.get("model", start), shared.get("change", start * 0.0)
            for batch in models.batches(self.period):
                optimizer.step(await worker.gradient(batch))
            eta = 1 - 1 / len(models.members) if self.block_momentum is None else self.block_momentum
            change = eta * change + self.block_lr * (await models.mean() - start)
            model = model + change
            shared["model"], shared["change"] = model, change
            worker.params.replace(model + eta * change if self.nesterov else model)
        if "model" in shared:
            worker.params.replace(shared["model"])

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_waiting(cluster, how="at each mean")
