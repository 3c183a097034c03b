"""The replicas of one stage: they take batches in turn, and every update averages the gradients of all of them."""

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
    """The workers that have the same stage as this one."""

    def __init__(self, submodel: Submodel, links: ReplicaLinks, leaves: Mapping[str, Tensor]) -> None:
        """`leaves`: the trained parameters; only their shapes are used."""
        self.links, self.machine, self.replica = links, submodel.machine, submodel.replica
        self.count = submodel.plan.workers[submodel.machine]
        self.rank_of = submodel.plan.rank_of
        self.leaves = dict(leaves)
        self.others = [other for other in range(self.count) if other != self.replica]

    async def mean(self, update: int, total: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Return the mean gradient over the samples of an update: a reduce-scatter and an all-gather.

        Each of m replicas sums its slice of the vector in the order of the replicas, so bits repeat; it sends
        2 (m - 1) / m of the vector.
        """
        replica, present = self.replica, [name in total for name in self.leaves]
        slices = self._flattened(total).tensor_split(self.count)
        for other in self.others:
            self.links.send(self._rank(other), (update, "part"), [samples, present, slices[other]])
        parts = {replica: (samples, present, slices[replica])}
        for other in self.others:
            count, theirs, values = await self.links.receive(self._rank(other), (update, "part"))
            parts[other] = count, theirs, values
        weight = sum(count for count, _, _ in parts.values())
        summed = [values * (count / weight) for count, _, values in (parts[number] for number in sorted(parts))]
        whole = {replica: reduce(torch.add, summed)}
        for other in self.others:
            self.links.send(self._rank(other), (update, "sum"), whole[replica])
        for other in self.others:
            whole[other] = await self.links.receive(self._rank(other), (update, "sum"))
        anywhere = [any(column) for column in zip(*(theirs for _, theirs, _ in parts.values()), strict=True)]
        return self._named(torch.cat([whole[number] for number in sorted(whole)]), anywhere)

    def _rank(self, replica: int) -> int:
        return self.rank_of(self.machine, replica)

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
