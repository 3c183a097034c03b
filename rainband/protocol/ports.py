"""Connections of a worker to its servers, as the worker sees them; each transport implements them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.messages import InitBlock, Message, Push

Payload = Any  # a 1-D tensor whose bytes travel beside a message


class Port(Protocol):
    """A worker's connection to one server."""

    direct: bool  # the server's parameters lie in shared memory

    def send(self, message: Message) -> None:
        """Send a message without payload."""

    def push(self, message: Push | InitBlock, values: BlockValues) -> None:
        """Send a message with the values of a block; returns when they were copied or sent, and may wait for room."""

    def read(self, spec: BlockSpec, at_version: int, out: Tensor) -> int | None:
        """Copy a block's parameters (direct ports only); return the version, None if that round is over."""


class BlockValues(Protocol):
    """The values of one block that a message carries: part of a gradient, or of the parameters."""

    def write(self, out: Tensor) -> None:
        """Write them into memory that is sent from, 1-D and as long as the block."""

    def contiguous(self) -> Tensor | None:
        """Return the memory in which they lie in this order already, if there is one."""


@runtime_checkable
class BorrowingPort(Protocol):
    """A port that, during an exchange, sends from and receives into the worker's own memory, without copies."""

    def lend(self, sequence: int, views: Mapping[int, Tensor]) -> None:
        """Lend the parameters of these blocks for one exchange; the worker must not use them until `settle` returns.

        Gradients that are pushed meanwhile stay unchanged until then.
        """

    def settle(self, pull: Settling) -> None:
        """Wait until the exchange is complete."""


class Settling(Protocol):
    """An operation that a port waits for."""

    def ready(self) -> bool: ...
