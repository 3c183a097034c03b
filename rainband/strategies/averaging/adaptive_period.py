r"""AdaComm: averaging whose period falls with the loss: rare means at first, often at the end (Wang and Joshi 2019).

    w_i <- optimizer step from w_i with the gradient of a batch      `tau` times, on each worker i
    w_i <- sum_j n_j w_j / sum_j n_j                                 n_j samples that worker j has processed
    tau <- ceil(sqrt(eta_0 / eta * F / F_0) * period)                after each interval; if that is not less than tau:
    tau <- max(1, tau // 2)

F is the mean loss of the interval, F_0 that of the first one; eta and eta_0 are their learning rates. Long periods save
time while the loss is large, and short ones lower the noise that remains. The paper's interval is one of time (60 s);
here it is one of steps, which all workers count alike.

If a worker is lost, the others go on: its steps since the last mean are lost, and its batches are repeated in the next
round. A worker that joins receives the model, the period and the losses so far.

Use when communication takes longer than computing and time matters. Avoid when a step takes longer than an exchange,
because the gain is small then (averaging, or sync).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Cluster, Models, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class AdaptivePeriod(OptimizerSettings, Strategy):
    """Averaging with a period that falls with the loss."""

    period: int = 16  # steps of each worker between two means, at first
    interval: int = 64  # steps of each worker between two changes of the period

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period={self.period}: choose 1 or more steps between two means.")
        if self.interval < self.period:
            raise ValueError(f"interval={self.interval}: choose at least the period, {self.period} steps.")

    @property
    def requires(self) -> Requirements:
        return replace(LOCAL_STEPS, needs_loss=True)

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            for batch in models.batches(self._period(models)):
                optimizer.step(await worker.gradient(batch))
            worker.params.replace(await models.mean())
            self._adapt(models)

    def _period(self, models: Models) -> int:
        return int(models.shared.get("tau", self.period))

    def _adapt(self, models: Models) -> None:
        """Count this round, and choose the next period if the interval is over."""
        shared, tau = models.shared, self._period(models)
        steps, losses = shared.get("steps", 0.0) + tau, shared.get("losses", 0.0) + tau * models.loss
        if steps >= self.interval:
            first = shared.setdefault("first_loss", losses / steps)
            shared["tau"] = self.next_period(tau, losses / steps, first, self.schedule().scale(models.progress))
            steps = losses = 0.0
        shared["steps"], shared["losses"] = steps, losses

    def next_period(self, tau: int, loss: float, first_loss: float, lr_scale: float = 1.0) -> int:
        """Return the period after an interval with this mean loss."""
        ratio = loss / first_loss / lr_scale if first_loss > 0 and lr_scale > 0 else math.inf
        wanted = math.ceil(math.sqrt(ratio) * self.period) if 0 <= ratio < math.inf else tau
        return max(1, wanted if wanted < tau else tau // 2)

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_waiting(cluster, how="at each mean")
