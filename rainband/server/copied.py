"""A server of which there is a copy on another one, and such a copy: a state machine around a `Server`.

The server forwards every message that it takes to its copy, in one stream, and sends what follows from a message only
when the copy has that message. So whatever a worker or the coordinator knows from a server, its copy has, too. The copy
handles the same messages in the same order, and answers nothing until it is promoted. A promotion begins a new term:
the copy refuses the stream of the old server, which therefore can answer nothing any more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rainband.protocol.messages import (
    COORDINATOR,
    AddCopy,
    Assign,
    Copied,
    CopyContents,
    CopyCounts,
    CopyUnreachable,
    DropCopy,
    FetchState,
    Forwarded,
    Heartbeat,
    Message,
    Peer,
    Promote,
    Promoted,
    ReplacedByCopy,
    ReportRequest,
    RoundChosen,
    TakeSnapshot,
    decode,
    encode,
)
from rainband.server.contents import contents_of, fill_server
from rainband.server.readers import ServerOutput
from rainband.server.server import Server

if TYPE_CHECKING:
    from torch import Tensor

NOT_COPIED = (FetchState, TakeSnapshot)  # they change nothing


class CopiedServer:
    """A server with a copy, or a copy."""

    def __init__(self, me: Peer, server: Server) -> None:
        self.me = me
        self.server = server
        self.is_copy = me.incarnation > 0
        self.replaced = False  # a copy has taken over: this server answers nothing any more
        self.assign: Assign | None = None
        self.number = 0  # of the last message in the stream
        self.copy: Peer | None = None  # where the copy is, or is being made
        self.counts_at: int | None = None  # the copy counts when it has this message; None: it is being made
        self.contents_at = 0  # the message that had the contents
        self.reported = False  # the coordinator knows that the copy counts
        self.copied = 0  # the copy has the messages up to this one
        self.held: deque[tuple[int, list[ServerOutput]]] = deque()  # what follows from messages that the copy lacks
        self.payloads: dict[int, Tensor] = {}  # of messages in the stream that have not left
        self.primary: Peer | None = None  # of a copy: the server that it follows
        self.chosen: list[ServerOutput] = []  # of a copy: the last round that was chosen; others may not know it

    def receive(self, sender: Peer, message: Message, payload: Tensor | None = None) -> list[ServerOutput]:
        """Take one message; return the messages to send."""
        if self.replaced:
            return []
        match message:
            case CopyContents() | Forwarded() if sender.role == "server":
                if self.is_copy:
                    return self._follow(sender, message, payload)
                return [ServerOutput(sender, ReplacedByCopy(self.server.term))]
            case Copied() if sender == self.copy:
                return self._copied(message.number)
            case ReplacedByCopy() if message.term > self.server.term:
                self.replaced = True
                self.held.clear()
                return []
            case AddCopy() if sender == COORDINATOR:
                return self._add(message)
            case DropCopy() if sender == COORDINATOR:
                return self._drop(message.incarnation)
            case Promote() if sender == COORDINATOR:
                return self._promote(message.term)
            case ReportRequest() if self.is_copy:
                return [ServerOutput(COORDINATOR, Heartbeat())]
            case Assign():
                self.assign = message
        if self.is_copy:
            return []
        outs = self._forward(sender, message, payload, self.server.receive(sender, message, payload))
        if isinstance(message, ReportRequest) and self.held:  # it is alive, although it waits for its copy
            outs.append(ServerOutput(COORDINATOR, Heartbeat()))
        return outs

    def lost(self, peer: Peer) -> list[ServerOutput]:
        """React to a closed connection."""
        if self.replaced or self.is_copy:
            return []
        if peer == self.copy:  # what it lacks is held until the coordinator knows that it never takes over
            return [ServerOutput(COORDINATOR, CopyUnreachable(peer.incarnation))]
        self.server.lost(peer)
        return self._forward(peer, None, None, [])

    def fill(self, message: Message) -> tuple[Message, Tensor | None]:
        """Return a message that is about to leave, with its values."""
        if isinstance(message, Forwarded | CopyContents):
            return message, self.payloads.pop(message.number, None)
        return self.server.fill(message)

    # ---- the server --------------------------------------------------------------------------------------------------

    def _forward(
        self, sender: Peer, message: Message | None, payload: Tensor | None, outs: list[ServerOutput]
    ) -> list[ServerOutput]:
        """Send a message on to the copy; hold what follows from it until the copy has it."""
        if self.copy is None or isinstance(message, NOT_COPIED):
            return outs
        self.number += 1
        num_bytes = 0
        if payload is not None:
            self.payloads[self.number] = payload.clone()  # it is lent, and may be overwritten when it is answered
            num_bytes = payload.nbytes
        encoded = b"" if message is None else encode(message)
        forwarded = ServerOutput(
            self.copy, Forwarded(self.number, sender, encoded, num_bytes), read=payload is not None
        )
        if self.counts_at is None:
            return [forwarded, *outs]
        if outs:
            self.held.append((self.number, outs))
        return [forwarded]

    def _add(self, add: AddCopy) -> list[ServerOutput]:
        """Send a new copy the contents of this moment; until it has them, answer without it."""
        outs = [] if self.copy is None else self._drop(self.copy.incarnation)
        assert self.assign is not None, "copies are made of servers with blocks"
        contents, values = contents_of(self.server)
        self.number += 1
        self.copy, self.contents_at = Peer("server", self.me.index, add.incarnation), self.number
        self.payloads[self.number] = values
        return [*outs, ServerOutput(self.copy, CopyContents(self.number, self.assign, contents), read=True)]

    def _copied(self, number: int) -> list[ServerOutput]:
        self.copied = max(self.copied, number)
        outs: list[ServerOutput] = []
        while self.held and self.held[0][0] <= self.copied:
            outs += self.held.popleft()[1]
        if self.counts_at is None and self.copied >= self.contents_at:
            self.counts_at = self.number  # until here, this server has answered without it
        if self.counts_at is not None and self.copied >= self.counts_at and not self.reported:
            assert self.copy is not None
            self.reported = True
            outs.append(ServerOutput(COORDINATOR, CopyCounts(self.copy.incarnation)))
        return outs

    def _drop(self, incarnation: int) -> list[ServerOutput]:
        """Answer without a copy, which never takes over."""
        if self.copy is None or self.copy.incarnation != incarnation:
            return []
        self.copy, self.counts_at, self.reported = None, None, False
        outs = [out for _, held in self.held for out in held]
        self.held.clear()
        self.payloads.clear()
        return outs

    # ---- the copy ----------------------------------------------------------------------------------------------------

    def _follow(self, sender: Peer, message: CopyContents | Forwarded, payload: Tensor | None) -> list[ServerOutput]:
        """Take the next message of the stream."""
        if isinstance(message, CopyContents):
            self.assign = msgspec.structs.replace(message.assign, restores=False)
            self.server.receive(COORDINATOR, self.assign)
            fill_server(self.server, message.contents, payload)
            self.primary = sender
        elif sender != self.primary or message.number != self.number + 1:
            return []
        elif not message.message:
            self.server.lost(message.sender)
        else:
            outs = self.server.receive(message.sender, decode(message.message), payload)
            self.chosen = [out for out in outs if isinstance(out.message, RoundChosen)] or self.chosen
        self.number = message.number
        return [ServerOutput(sender, Copied(self.number))]

    def _promote(self, term: int) -> list[ServerOutput]:
        """Take over."""
        if self.is_copy and self.primary is not None:
            self.is_copy = False
            self.server.promote(term)
        return [ServerOutput(COORDINATOR, Promoted(self.server.term)), *self.chosen]
