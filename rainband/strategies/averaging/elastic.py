r"""EASGD and EAMSGD: workers train own models, tied to a common center by an elastic force (Zhang et al. 2015).

    x_i <- optimizer step from x_i with the gradient of a batch      `period` times, on each worker i
    d    = alpha * (x_i - c)                                         alpha = moving_rate / K, for K workers
    x_i <- x_i - d
    c   <- c + d                                                     c is the center, and the result

The servers hold the center, and no worker waits for another. With momentum, the steps are Nesterov's (EAMSGD). Models
stay different: workers explore, and alpha says how far from the center. The servers' learning rate is 1, always.

With synchronous=true there are no servers: every `period` steps all workers meet, and make the same exchange at once:
c <- c + sum_i alpha * (x_i - c).

If a worker is lost, what it had learned since its last exchange is lost, and its batches since then are reassigned; the
center goes on with the others. A worker that joins begins at the center (synchronous: with another worker's model).

Use when communication is slow and machines differ: it bears periods (16, 64) at which downpour fails. Avoid when few
epochs are possible: the center follows slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.rules import ApplyOnArrival
from rainband.strategy import LOCAL_STEPS, Batch, Cluster, Requirements, ServerPart, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Elastic(OptimizerSettings, Strategy):
    """Models tied to a center."""

    period: int = 4  # steps of each worker between two exchanges with the center, at most 64
    moving_rate: float = 0.9  # beta, the sum of alpha over the workers
    synchronous: bool = False  # all workers exchange at the same time, without servers

    def __post_init__(self) -> None:
        if not 1 <= self.period <= 64:
            raise ValueError(f"period={self.period}: choose from 1 to 64 steps.")
        if not 0 < self.moving_rate <= 1:
            raise ValueError(f"moving_rate={self.moving_rate:g}: choose more than 0 and at most 1.")
        self.local_spec()
        self.schedule()

    @property
    def requires(self) -> Requirements:
        if self.synchronous:
            return LOCAL_STEPS
        return Requirements(optimizer="workers", batches_per_item=self.period, whole_model=True)

    async def run(self, worker: Worker) -> None:
        await (self._run_in_rounds(worker) if self.synchronous else self._run_with_servers(worker))

    async def _run_with_servers(self, worker: Worker) -> None:
        optimizer = worker.optimizer(self.local_spec(), self.schedule(), counts=False)
        alpha = self.moving_rate / worker.num_workers
        await worker.servers.pull()
        async for work_item in worker.work_items():
            batches, samples = list[Batch](), 0
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                if gradient.is_finite:
                    optimizer.step(gradient)
                    batches += gradient.batches
                    samples += gradient.samples
                else:
                    worker.servers.push(gradient)  # it counts as skipped
            own = worker.params.copy()
            await worker.servers.pull()
            center = worker.params.copy()
            force = alpha * (own - center)
            if batches:  # the servers subtract what is pushed
                worker.servers.push(worker.change(-1.0 * force, batches, samples))
            worker.params.replace(own - force)

    async def _run_in_rounds(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.local_spec(), self.schedule())
        while await models.begin():
            center, alpha = models.shared.get("center", worker.params.copy()), self.moving_rate / len(models.members)
            for batch in models.batches(self.period):
                optimizer.step(await worker.gradient(batch))
            own = worker.params.copy()
            mean = await models.mean(own, equally=True)
            worker.params.replace(own - alpha * (own - center))
            models.shared["center"] = center + self.moving_rate * (mean - center)
        if "center" in models.shared:
            worker.params.replace(models.shared["center"])

    def local_spec(self) -> OptimizerSpec:
        """Return the workers' optimizer, with Nesterov's momentum for sgd."""
        spec = self.spec()
        nesterov = {"nesterov": True} if self.optimizer == "sgd" and self.momentum else {}
        return OptimizerSpec(spec.name, {**spec.settings, **nesterov})

    def server(self, num_replicas: int) -> ServerPart | None:
        if self.synchronous:
            return None
        return ServerPart(ApplyOnArrival, OptimizerSpec("sgd", {"lr": 1.0}), Schedule())

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_waiting(cluster, how="at each exchange") if self.synchronous else []
