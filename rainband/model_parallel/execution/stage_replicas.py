"""The replicas of one stage: they take batches in turn, and an update, of all their gradients, is the same on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rainband.model_parallel.execution.microbatch_run import ReplicaLinks
    from rainband.model_parallel.execution.submodel import Submodel


class StageReplicas:
    """Those who have the same stage as this worker."""

    def __init__(self, share: Submodel, links: ReplicaLinks, leaves: Mapping[str, Tensor]) -> None:
        """`leaves`: the parameters that are trained; only their shapes count."""
        self.links, self.machine, self.replica = links, share.machine, share.replica
        self.count = share.plan.workers[share.machine]
        self.home = share.plan.home
        self.leaves = dict(leaves)
        self.others = [other for other in range(self.count) if other != self.replica]

    async def mean(self, update: int, total: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The mean over the round's samples. Each replica sums its part of the vector, in the order of the replicas.

        So 2 (m - 1) / m of the vector leave each of m, and bits repeat.
        """
        replica, present = self.replica, [name in total for name in self.leaves]
        pieces = self._flattened(total).tensor_split(self.count)
        for other in self.others:
            self.links.send(self._place(other), (update, "part"), [samples, present, pieces[other]])
        parts = {replica: (samples, present, pieces[replica])}
        for other in self.others:
            count, theirs, piece = await self.links.receive(self._place(other), (update, "part"))
            parts[other] = count, theirs, piece
        weight = sum(count for count, _, _ in parts.values())
        summed = [piece * (count / weight) for count, _, piece in (parts[number] for number in sorted(parts))]
        whole = {replica: reduce(torch.add, summed)}
        for other in self.others:
            self.links.send(self._place(other), (update, "sum"), whole[replica])
        for other in self.others:
            whole[other] = await self.links.receive(self._place(other), (update, "sum"))
        anywhere = [any(column) for column in zip(*(theirs for _, theirs, _ in parts.values()), strict=True)]
        return self._named(torch.cat([whole[number] for number in sorted(whole)]), anywhere)

    def _place(self, replica: int) -> int:
        return self.home(self.machine, replica)

    def _flattened(self, total: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(
            [
                (total[name] if name in total else torch.zeros_like(leaf)).detach().reshape(-1)
                for name, leaf in self.leaves.items()
            ]
        )

    def _named(self, vector: Tensor, present: Sequence[bool]) -> dict[str, Tensor]:
        named, at = {}, 0
        for (name, leaf), there in zip(self.leaves.items(), present, strict=True):
            if there:
                named[name] = vector[at : at + leaf.numel()].view(leaf.shape).to(leaf.dtype)
            at += leaf.numel()
        return named
