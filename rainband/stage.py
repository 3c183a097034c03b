"""The contract of pipeline strategies whose stages step by themselves (pipedream)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rainband.strategy import WorkItem


@dataclass(frozen=True)
class StageVersions:
    """The versions of parameters that a stage with its own optimizer keeps."""

    stash: bool = True  # a backward pass uses the parameters of its forward pass
    vertical_sync: bool = False  # a batch uses the same version in all stages
    recompute: bool = False  # keep the inputs, and run the forward pass again before the backward pass
    pipedream_2bw: bool = False  # two versions only: a batch uses, in all stages, that of one update ago
    batches_per_update: int = 0  # with pipedream_2bw; 0: one for each stage


class PipelineStage(Protocol):
    """A worker's stage of a pipeline that is never flushed."""

    def train(self, items: AsyncIterator[WorkItem]) -> Awaitable[None]:
        """Process work items: forward passes, backward passes and updates, with versions as `StageVersions` says."""
