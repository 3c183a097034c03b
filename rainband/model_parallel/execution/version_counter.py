"""Which update a batch is part of, and which version of a stage's parameters it meets: counting, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rainband.stage import StageVersions


@dataclass(frozen=True)
class Counting:
    """Of one stage. Batches, updates and versions are counted from 0, from when the pipeline was empty last."""

    how: StageVersions
    replicas: tuple[int, ...]  # workers of each stage
    stage: int

    @property
    def ahead(self) -> int:
        """Forwards before the first backward."""
        return (sum(self.replicas) - 1 - sum(self.replicas[: self.stage])) // self.replicas[self.stage]

    @property
    def batches(self) -> int:
        """So many make an update: one of each replica; or as many as two versions need."""
        if self.how.pipedream_2bw:
            return self.how.batches_per_update or len(self.replicas)
        return self.replicas[self.stage]

    def update(self, batch: int) -> int:
        return batch // self.batches

    def completes(self, batch: int) -> bool:
        """Has a worker all its gradients of an update with this batch? A replica has one of each."""
        return not self.how.pipedream_2bw or batch % self.batches == self.batches - 1

    def version(self, batch: int, newest: int) -> int:
        """The newest; with vertical sync that of S - 1 batches ago; double-buffered that of one update ago."""
        if self.how.pipedream_2bw:
            return max(0, self.update(batch) - 1)
        if self.how.vertical_sync:
            return max(0, batch - len(self.replicas) + 1)
        return newest

    @property
    def lags(self) -> bool:
        """Will batches that have not come yet meet older parameters than the newest?"""
        return self.how.vertical_sync or self.how.pipedream_2bw


def check_stashes(how: StageVersions, replicas: Sequence[int]) -> None:
    """Raise ValueError, which says what to type, if these stages cannot keep their versions so."""
    if not how.pipedream_2bw:
        return
    if max(replicas) > 1:
        raise ValueError(
            f"pipedream_2bw needs one worker for each stage, and the plan has {tuple(replicas)}: leave it out, or "
            "plan with --partitioner one_machine_per_stage."
        )
    if how.batches_per_update and how.batches_per_update < len(replicas):
        raise ValueError(
            f"batches_per_update={how.batches_per_update} is less than the {len(replicas)} stages, so the parameters "
            f"of one update ago would not be ready in time: type batches_per_update={len(replicas)} or more."
        )
