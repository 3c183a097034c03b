"""The blocks of a worker's parameters, and the port to the server of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rainband.model.flat_parameters import Flat
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import Message, Push
from rainband.protocol.ports import BlockValues, BorrowingPort, Port
from rainband.protocol.worker_stats import Stats

if TYPE_CHECKING:
    from rainband.observer import Observer


class KeptValues:
    """A copy of the values of a push, which the worker may overwrite."""

    def __init__(self, message: Push, values: BlockValues) -> None:
        dtype, numel = message.payload
        self.tensor = torch.empty(numel, dtype=getattr(torch, dtype))
        values.write(self.tensor)

    def write(self, out: Tensor) -> None:
        out.copy_(self.tensor)

    def contiguous(self) -> Tensor | None:
        return self.tensor


@cache
def _borrows(port: type) -> bool:
    """Return True if this type is a BorrowingPort. Cached: a protocol is slow to check."""
    return issubclass(port, BorrowingPort)


class ServerBlocks:
    """Parameters in `flat`, the blocks they are divided into, and one port for each server."""

    __slots__ = (
        "blocks",
        "borrowers",
        "direct_blocks",
        "flat",
        "num_bytes",
        "observer",
        "own_ports",
        "owner_port_of",
        "part",
        "port_of",
        "ports",
        "specs",
        "stats",
        "unanswered",
        "views",
    )

    def __init__(
        self, flat: Flat | None, specs: Sequence[BlockSpec], owners: Sequence[int], ports: Sequence[Port], part: int = 0
    ) -> None:
        """See Client. Without servers, `flat` may be None: a user's loop has the parameters."""
        if flat is not None:
            self.flat = flat
        self.part = part
        self.specs = specs  # of all parts, by index
        self.num_bytes = [block.num_bytes for block in specs]
        self.blocks = [block for block in specs if block.part == part]
        self.ports = ports
        self.owner_port_of = [ports[owner] for owner in owners]
        self.views = [self.flat.view(block) for block in specs] if owners else []
        self.stats = Stats()
        self.observer: Observer | None = None
        # (block, sequence) -> a push that has no answer, if a copy of its server may take over; it is sent again then
        self.unanswered: dict[tuple[int, int], tuple[Push, KeptValues | None]] | None = None
        self._push_to(self.owner_port_of)

    def use(self, server: int) -> None:
        """Push to this server and pull from it: of a tree of servers, in which another one owns the blocks."""
        self._push_to([self.ports[server]] * len(self.specs))

    def _push_to(self, port_of: list[Port]) -> None:
        self.port_of = port_of
        self.own_ports = tuple(dict.fromkeys(port_of[block.index] for block in self.blocks)) if port_of else ()
        self.direct_blocks = [block for block in self.blocks if port_of[block.index].direct] if port_of else []
        self.borrowers = [
            (port, {b.index: self.views[b.index] for b in self.blocks if port_of[b.index] is port})
            for port in dict.fromkeys(port_of)
            if _borrows(type(port)) and isinstance(port, BorrowingPort)
        ]  # each with the parameters of its blocks

    def move(self, server: int, port: Port) -> None:
        """Use another port to a server, and send it again what was not answered."""
        before = self.ports[server]
        self.ports = [*self.ports[:server], port, *self.ports[server + 1 :]]
        self.owner_port_of = [port if one is before else one for one in self.owner_port_of]
        self._push_to([port if one is before else one for one in self.port_of])
        for message, values in list((self.unanswered or {}).values()):
            if self.port_of[message.block] is not port:
                continue
            if values is None:
                port.send(message)
            else:
                port.push(message, values)

    def push(self, message: Push, values: BlockValues | None) -> None:
        """Send the push of one block; no values: its batches are skipped."""
        if self.unanswered is not None:
            values = kept = None if values is None else KeptValues(message, values)
            self.unanswered[message.block, message.sequence] = message, kept
        if values is None:
            self.send(self.port_of[message.block], message)
        else:
            self.port_of[message.block].push(message, values)

    def send(self, port: Port, message: Message) -> None:
        port.send(message)
        if self.observer is not None:
            self.observer.sent(message)

    def send_all(self, message: Message) -> None:
        """Send a message to every server that has a block of this worker."""
        for port in self.own_ports:
            self.send(port, message)
