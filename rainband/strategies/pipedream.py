r"""PipeDream: stages that never wait for each other's updates (Narayanan et al. 2019).

The model is cut into S stages, each on a worker of its own, and several batches are on their way at once. Stage s, with
S - s - 1 forwards ahead at the start, then one forward and one backward in turn:

    forward  of batch m      at w_s, its newest parameters, which are kept: v = version of w_s
    backward of batch m      at w_s of version v, the same that its forward used
    w_s  <-  w_s - lr * gradient                             right away, on this stage alone

So stage s computes its gradients at parameters that are S - 1 - s updates old. Keeping the versions on the way
("weight stashing") makes each a true gradient of the stage; with stash=no a backward meets newer parameters than its
forward, and the result is a gradient of nothing. With vertical_sync all stages use one version for a batch, that of
S - 1 updates ago. There are no servers: each stage steps its own parameters.

With pipedream_2bw (2BW, Narayanan et al. 2021) a stage keeps two versions and no more. m batches make one update, of
the mean of their gradients, and all stages compute them at the parameters of one update ago:

    w(t+1)  =  w(t) - lr * mean gradient of m batches at w(t-1)                  batches_per_update = m, at least S

The paper cuts a batch into m microbatches; here m batches of the run are one of the paper's. Whenever the pipeline runs
empty (at the end, or while no batch is at hand) an update of fewer batches is made, of their mean, and the next batches
begin at the newest parameters, as the first did.

A stage may have replicas (a plan of `rainband placement` says so): batches go to them in turn, and the r gradients of a
round, weighted by their samples, make one update, the same on all of them.

Use it when a model is too large or too slow for one machine, and its stages take about as long. Not when the result
must be that of one process (single, sync with --stages), or when workers may be lost: each holds what nobody else has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rainband.protocol.lr_schedules import Schedule, Shape
from rainband.protocol.optimizer_spec import OptimizerSpec, element_wise
from rainband.strategy import Requirements, StageVersions, Strategy, Turn, Worker


@dataclass(frozen=True)
class Pipedream(Strategy):
    """A pipeline that is never flushed, with weight stashing."""

    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    stash: bool = True  # go back through the parameters of the forward; no: through whatever is there, to compare
    vertical_sync: bool = False  # one version for a batch in all stages
    pipedream_2bw: bool = False  # keep two versions of the parameters; update every `batches_per_update` batches
    batches_per_update: int = 0  # pipedream_2bw: batches to an update, the paper's m; 0: one for each stage
    recompute: bool = False  # run the forward again before the backward: less memory, more time
    schedule: Shape = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        self.spec()
        if self.vertical_sync and not self.stash:
            raise ValueError("vertical_sync keeps versions, and stash=no keeps none: leave one of them out.")
        if self.pipedream_2bw and (self.vertical_sync or not self.stash):
            other = "vertical_sync" if self.vertical_sync else "stash=no"
            raise ValueError(f"pipedream_2bw says which versions are used, and so does {other}: leave one of them out.")
        if self.batches_per_update < 0 or (self.batches_per_update and not self.pipedream_2bw):
            raise ValueError(
                f"batches_per_update={self.batches_per_update} requires pipedream_2bw=yes and must be at least the "
                "number of stages: type pipedream_2bw=yes, too, or omit batches_per_update."
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=False, max_replicas=1, optimizer="workers", stages=self.stashes())

    async def run(self, worker: Worker) -> None:
        stage = worker.stage(self.spec(), Schedule(self.schedule, self.warmup), self.stashes())
        on_the_way: deque[Turn] = deque()
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                turn = stage.turn(batch)
                if turn is None:
                    continue  # it is another replica's
                await stage.forward(turn)
                on_the_way.append(turn)
                if len(on_the_way) > stage.ahead:
                    await stage.backward(on_the_way.popleft())
            if not work_item.more:  # there may be no next one: let all come home
                while on_the_way:
                    await stage.backward(on_the_way.popleft())
                await stage.settle()

    def stashes(self) -> StageVersions:
        return StageVersions(
            self.stash, self.vertical_sync, self.recompute, self.pipedream_2bw, self.batches_per_update
        )

    def spec(self) -> OptimizerSpec:
        return element_wise(self.optimizer, self.lr, self.momentum, self.weight_decay)
