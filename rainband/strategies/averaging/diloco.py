r"""DiLoCo: many AdamW steps on each worker, then one Nesterov step with their mean change (Douillard et al. 2023).

    w_i <- `period` AdamW steps from W, on each worker i
    D    = W - mean(w_i)                     the outer gradient; mean(w_i) weighted by samples
    M   <- outer_momentum * M + D
    W   <- W - outer_lr * (D + outer_momentum * M)
    w_i <- W

Each worker keeps the state of its own AdamW. With fragments=P (streaming DiLoCo), the parameters are divided into P
fragments; one of them is exchanged every period / P steps, in turn, so that the exchanges are P times smaller. The last
round exchanges all of them.

If a worker is lost, the others go on: its steps since the last exchange are lost, and its batches are repeated in the
next round. A worker that joins receives W, M, and the optimizer state of another one.

Use for workers far apart, over slow networks: with a period of 500, as in the paper, it sends 500 times less than sync.
Avoid when exchanges are cheap (sync), or when a worker makes only a few periods of steps in the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

from rainband import advice
from rainband.optimizer_settings import OptimizerSettings
from rainband.strategy import LOCAL_STEPS, Cluster, Requirements, Strategy, Worker


@dataclass(frozen=True, kw_only=True)
class Diloco(OptimizerSettings, Strategy):
    """Local AdamW steps, and Nesterov steps with their mean."""

    lr: float = 0.001  # of the inner optimizer
    optimizer: str = "adamw"  # the inner one: sgd, adagrad, adam, adamw, rmsprop, ... or module:Class
    period: int = 100  # inner steps of each worker between two outer ones
    outer_lr: float = 0.7  # of the Nesterov step
    outer_momentum: float = 0.9
    fragments: int = 1  # of the parameters, exchanged in turn; 1: all at once

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1 or not 1 <= self.fragments <= self.period:
            raise ValueError(
                f"period={self.period} fragments={self.fragments}: choose a period of 1 or more steps, and 1 to "
                f"{max(1, self.period)} fragments."
            )

    @property
    def requires(self) -> Requirements:
        return LOCAL_STEPS

    async def run(self, worker: Worker) -> None:
        models, optimizer = worker.models, worker.optimizer(self.spec(), self.schedule())
        while await models.begin():
            shared, start = models.shared, worker.params.copy()
            model, momentum = shared.get("model", start), shared.get("momentum", start * 0.0)
            turn = int(shared.get("turn", 0))
            for batch in models.batches(self.period // self.fragments):
                optimizer.step(await worker.gradient(batch))
            part = range(len(model)) if models.is_last else self.fragment(turn, len(model))
            own = worker.params.copy()
            gradient = model.part(part) - (await models.mean(own, part)).part(part)
            moved = self.outer_momentum * momentum.part(part) + gradient
            stepped = model.part(part) - self.outer_lr * (gradient + self.outer_momentum * moved)
            shared["model"], shared["momentum"] = model.with_part(part, stepped), momentum.with_part(part, moved)
            shared["turn"] = (turn + 1) % self.fragments
            worker.params.replace(own.with_part(part, stepped))

    def fragment(self, turn: int, num_parameters: int) -> range:
        """Return the parameters that are exchanged in this turn."""
        return range(turn * num_parameters // self.fragments, (turn + 1) * num_parameters // self.fragments)

    def advice(self, cluster: Cluster) -> list[str]:
        return advice.of_waiting(cluster, how="at each exchange")
