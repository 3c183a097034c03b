"""The interface of the coordinator for the coordinator part of a full-batch strategy."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from rainband.protocol.events import EndCause
    from rainband.protocol.vectors import Operation


class Evaluation(NamedTuple):
    """The loss over some work items; the vector `gradient` holds the sum of their samples' gradients."""

    loss: float  # mean over the samples; not finite if it is not finite for one of them
    samples: int


class End(NamedTuple):
    """The reason why an iteration was the last one."""

    cause: EndCause
    text: str  # for people


class CoordinatorApi(Protocol):
    """The operations that `coordinate` may use. Operations start when called; awaiting the result waits.

    The vectors stay on the servers; only numbers travel.
    """

    @property
    def num_items(self) -> int:
        """The number of work items that the data is divided into."""

    @property
    def seed(self) -> int: ...

    def compute(self, *operations: Operation) -> Awaitable[tuple[float, ...]]:
        """Run vector operations on every block of every server; return the values of its dot products and norms."""

    def evaluate(self, *operations: Operation, work_items: Sequence[int] | None = None) -> Awaitable[Evaluation]:
        """The same, then find the loss and its gradient at the new parameters, over some work items or all."""

    def report(self, iteration: int, loss: float, gradient_norm: float, step: float, end: End | None = None) -> None:
        """Report that an iteration is done; `end`: why it was the last one."""
