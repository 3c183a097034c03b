"""Parameters that several machines of one stage share, such as the weights of a convolution in tiles, with versions.

Each machine has a copy and steps it; all add up the same gradients in the same order, so the copies stay equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rainband.model_parallel.execution.stage import Stage
    from rainband.model_parallel.execution.submodel import Submodel
    from rainband.model_parallel.execution.worker import StageWorker


class SharedInStage:
    """The parameters that this worker shares with other machines of its stage."""

    def __init__(self, worker: StageWorker, stage: Stage) -> None:
        submodel, self.links = worker.submodel, worker.links
        self.rank = submodel.rank
        names = {id(master): name for name, master in stage.versions.masters.items()}
        self.users: dict[str, list[int]] = {}  # name here -> ranks that compute the same batches with this parameter
        self.numbers: dict[str, int] = {}  # the same on all workers
        for number, tie in enumerate(submodel.ties):
            ranks = [rank for rank in (tie.owner, *tie.others) if _computes_same_batches(submodel, rank)]
            if id(tie.parameter) in names and len(ranks) > 1:
                self.users[names[id(tie.parameter)]] = ranks
                self.numbers[names[id(tie.parameter)]] = number
        self.others = sorted({rank for ranks in self.users.values() for rank in ranks} - {self.rank})

    async def sum(self, update: int, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of an update, with those of shared parameters summed over their machines."""
        for name, ranks in self.users.items():
            for other in self._besides(ranks):
                self.links.send(other, (update, "shared", self.numbers[name]), total.get(name))
        summed = dict(total)
        for name, ranks in self.users.items():
            found = {self.rank: total.get(name)}
            for other in self._besides(ranks):
                found[other] = await self.links.receive(other, (update, "shared", self.numbers[name]))
            gradients = [gradient for _, gradient in sorted(found.items()) if gradient is not None]
            if gradients:
                summed[name] = sum(gradients[1:], gradients[0])
        return summed

    async def agree(self, update: int, finite: bool) -> bool:
        """Return True if the update is finite on all machines that share a parameter: all of them step, or none."""
        for other in self.others:
            self.links.send(other, (update, "finite"), finite)
        return all([finite, *[await self.links.receive(other, (update, "finite")) for other in self.others]])

    def _besides(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]


def _computes_same_batches(submodel: Submodel, rank: int) -> bool:
    return submodel.plan.machine_and_replica(rank)[1] == submodel.replica


def stages_of(submodel: Submodel, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stages of these workers."""
    plan = submodel.plan
    return tuple(sorted({plan.stage(plan.machine_and_replica(rank)[0]) for rank in ranks}))
