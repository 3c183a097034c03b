"""The mean of a round by an all-reduce, in place of reading the tensors of all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rainband.collectives.group import RankLost
from rainband.rounds.average import Contribution, average
from rainband.transports.collectives.shared import SharedGroup


class GroupAverage:
    """Averages by a group's all-reduce until a worker is lost, and then as every round does.

    All members decide alike: by the contributions, which all of them read, and by the members of the all-reduce.
    """

    def __init__(self, group: SharedGroup, algorithm: str) -> None:
        self.group = group
        self.algorithm = algorithm
        self.is_broken = False  # a worker was lost: its rank cannot return to the group
        self.calls = 0

    def __call__(self, out: list[Tensor | None], mine: int, given: Sequence[Contribution]) -> float:
        """Do what `average` does."""
        total = sum(one.weight for one in given)
        whole = [one.rank for one in given] == list(range(self.group.num_ranks))
        self.is_broken |= not whole
        if self.is_broken or not total or not _alike(out, given) or not self._all_reduce(out, mine, given, total):
            return average(out, mine, given)
        return total

    def skip(self) -> None:
        """Take no more part: this worker was left out of a round, or has returned."""
        self.is_broken = True

    @torch.no_grad()
    def _all_reduce(self, out: list[Tensor | None], mine: int, given: Sequence[Contribution], total: float) -> bool:
        """Replace the tensors by the mean; return False if a worker was lost meanwhile."""
        tensors = [tensor for tensor in out if tensor is not None]
        vector = self.group.vector(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
        slices, first = [], 0
        for tensor in tensors:
            slices.append(vector[first : first + tensor.numel()].view(tensor.shape))
            first += tensor.numel()
        torch._foreach_copy_(slices, tensors)
        vector.mul_(given[mine].weight / total)
        try:
            members = self.group.all_reduce(vector, self.algorithm)
        except RankLost:
            members = ()
        self.calls += 1
        if len(members) < self.group.num_ranks:
            self.is_broken = True
            return False
        torch._foreach_copy_(tensors, slices)
        return True


def _alike(out: Sequence[Tensor | None], given: Sequence[Contribution]) -> bool:
    """Return True if all members have the same tensors, of one dtype that can be summed."""
    dtypes = {tensor.dtype for tensor in out if tensor is not None}
    return len({one.present for one in given}) == 1 and dtypes in ({torch.float32}, {torch.float64})
