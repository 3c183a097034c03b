"""The blocks of a worker's parameters, and the port to the server of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from rainband.model.flat_parameters import Flat
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import Message
from rainband.protocol.ports import BorrowingPort, Port
from rainband.protocol.worker_stats import Stats

if TYPE_CHECKING:
    from rainband.observer import Observer


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

    def send(self, port: Port, message: Message) -> None:
        port.send(message)
        if self.observer is not None:
            self.observer.sent(message)

    def send_all(self, message: Message) -> None:
        """Send a message to every server that has a block of this worker."""
        for port in self.own_ports:
            self.send(port, message)
