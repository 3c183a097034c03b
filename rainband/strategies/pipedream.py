r"""PipeDream: a pipeline whose stages never wait for each other's updates (Narayanan et al. 2019).

The model is split into S stages, each on its own worker, and several batches are in flight at once. Stage s starts with
S - s - 1 forward passes, and then alternates one forward and one backward pass:

    forward  of batch m      at w_s, its newest parameters, which it keeps: v = version of w_s
    backward of batch m      at w_s of version v, the same that its forward used
    w_s  <-  w_s - lr * gradient                             right away, on this stage alone

So stage s computes its gradients at parameters that are S - 1 - s updates old. Keeping the versions in flight ("weight
stashing") makes each a true gradient of the stage. With stash=no, a backward pass may use newer weights than its
forward pass: the result is not the gradient of any function; the option exists for comparison. With vertical_sync all
stages use the same version for a batch, that of S - 1 updates ago. There are no servers: each stage steps its own
parameters.

With pipedream_2bw (2BW, Narayanan et al. 2021) a stage keeps only two versions. m batches make one update, of the mean
of their gradients, and all stages compute them at the parameters of one update ago:

    w(t+1)  =  w(t) - lr * mean gradient of m batches at w(t-1)                  batches_per_update = m, at least S

The paper splits a batch into m microbatches; here m batches of the run are one batch of the paper. When the pipeline
runs empty (at the end, or while no batch is ready), the update averages fewer batches, and the next batches start at
the newest parameters, as the first did.

A stage may have replicas (as `rainband placement` decides): batches go to them in turn, and the r gradients of a round,
weighted by their samples, make one update, the same on all replicas.

Use when a model is too large or too slow for one machine, and its stages take about equally long. Avoid when the result
must equal that of one process (--stages with single, or with sync batch_per_worker=true), or when workers are lost
often: all stages then go on from the last checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband.optimizer_settings import OptimizerSettings
from rainband.stage import StageVersions
from rainband.strategy import Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Pipedream(OptimizerSettings, Strategy):
    """A pipeline that is never flushed, with weight stashing."""

    stash: bool = True  # a backward pass uses the weights of its forward pass; no: the newest ones, for comparison
    vertical_sync: bool = False  # a batch uses the same version in all stages
    pipedream_2bw: bool = False  # keep two versions of the parameters; update every `batches_per_update` batches
    batches_per_update: int = 0  # with pipedream_2bw: batches averaged into one update; 0: one per stage
    recompute: bool = False  # run the forward pass again before the backward pass: less memory, more time

    def __post_init__(self) -> None:
        self.spec()
        if self.vertical_sync and not self.stash:
            raise ValueError("vertical_sync=yes requires stored versions, and stash=no stores none: omit one of them.")
        if self.pipedream_2bw and (self.vertical_sync or not self.stash):
            other = "vertical_sync" if self.vertical_sync else "stash=no"
            raise ValueError(f"pipedream_2bw=yes and {other} both set which versions are used: omit one of them.")
        if self.batches_per_update < 0 or (self.batches_per_update and not self.pipedream_2bw):
            raise ValueError(
                f"batches_per_update={self.batches_per_update} requires pipedream_2bw=yes and must be at least the "
                "number of stages: add pipedream_2bw=yes, or omit batches_per_update."
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(
            servers=False, max_replicas=1, optimizer="workers", stages=self.stashes(), custom_loop=False
        )

    async def run(self, worker: Worker) -> None:
        stage = worker.stage(self.spec(), self.schedule(), self.stashes())
        await stage.train(worker.work_items())

    def stashes(self) -> StageVersions:
        return StageVersions(
            self.stash, self.vertical_sync, self.recompute, self.pipedream_2bw, self.batches_per_update
        )
