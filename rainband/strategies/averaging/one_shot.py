r"""ParallelSGD: every worker trains on its own part of the data; one mean at the end (Zinkevich et al. 2010).

    w_i <- optimizer step from w_i with the gradient of a batch      for all batches of worker i
    w    = sum_j n_j w_j / sum_j n_j                                 at the end; n_j samples that worker j has processed

The data of the run, with all its epochs, is cut into one part for each worker. Nothing is exchanged before the end, so
workers never wait. For convex losses the mean is better than each model; for networks, models that are far apart have
no useful mean. Each worker makes 1/K of the steps that one process makes.

If a worker is lost, all that it has learned is lost, too: the others share its part once more, after the mean. A worker
that joins receives nothing to do before the mean, because the data is given out at the start.

Use for convex losses and much data. Avoid for networks, and for long runs on machines that fail (averaging).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class OneShot(OptimizerSettings, Strategy):
    """One mean, at the end."""

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            for batch in models.batches(sys.maxsize):
                optimizer.step(await worker.gradient(batch))
            worker.params.replace(await models.mean())
