"""The contract of pipeline strategies whose stages step by themselves (pipedream)."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rainband.strategy import Batch


@dataclass(frozen=True)
class StageVersions:
    """How a stage that steps by itself keeps versions of its parameters."""

    stash: bool = True  # a backward pass uses the parameters of its forward pass
    vertical_sync: bool = False  # a batch uses the same version in all stages
    recompute: bool = False  # keep the inputs, and run the forward pass again before the backward pass
    pipedream_2bw: bool = False  # two versions only: a batch uses, in all stages, that of one update ago
    batches_per_update: int = 0  # with pipedream_2bw; 0: one for each stage


class Turn:
    """A batch on its way through a stage."""


class PipelineStage(Protocol):
    """A worker's stage of a pipeline that is never flushed."""

    ahead: int  # forward passes before the first backward pass

    def turn(self, batch: Batch) -> Turn | None:
        """Number the next batch; None: it belongs to another replica of this stage."""

    def forward(self, turn: Turn) -> Awaitable[None]:
        """Compute with the parameters that `StageVersions` prescribes, and keep them for the backward pass."""

    def backward(self, turn: Turn) -> Awaitable[None]:
        """Compute the gradient, and make a step if this batch was the last of an update."""

    def settle(self) -> Awaitable[None]:
        """Wait until no batch is in flight; the last update may average fewer batches."""
