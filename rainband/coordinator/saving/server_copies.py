"""Copies of servers: which there are, and what happens when a server or its copy is lost.

A copy may take over as soon as its server has reported that it counts. From then on it has all that the server has
answered, until the server is asked to answer without it. When a server and its copy are lost together, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rainband.coordinator.liveness import server_patience_s
from rainband.coordinator.shutdown import RunEnd, flushes
from rainband.coordinator.state import CoordinatorOutput, Phase, RunState, ServerState
from rainband.protocol import events
from rainband.protocol.messages import (
    AddCopy,
    Address,
    AdjustRule,
    CopyCounts,
    CopyUnreachable,
    DropCopy,
    Forget,
    Message,
    Peer,
    Planned,
    Promote,
    Promoted,
    ReplacedByCopy,
    ReportRequest,
    RoundChosen,
    ServerJoin,
    ServerMoved,
    Shutdown,
)

MAX_FAILURES = 3  # of copies of one server, one after the other: then no more are made
WITH_COPIES = (Phase.RUNNING, Phase.FLUSHING, Phase.FINISHING, Phase.CONCLUDING)


@dataclass
class ServerCopy:
    """The copy of one server."""

    peer: Peer
    address: Address | None = None  # None: its process has not joined yet
    counts: bool = False  # it may take over
    silent_s: float = 0.0
    since: float = 0.0  # of a promotion: when the loss of the server was noticed
    why: str = ""  # it takes over; "": it does not

    @property
    def is_promoted(self) -> bool:
        return bool(self.why)


class ServerCopies:
    """Has each server copied, and lets its copy take over when it is lost."""

    def __init__(self, state: RunState, shutdown: RunEnd) -> None:
        self.state = state
        self.shutdown = shutdown
        self.of: dict[int, ServerCopy] = {}  # server -> its copy
        self.incarnations: dict[int, int] = {}  # server -> the last one that was started
        self.failures: dict[int, int] = {}  # server -> copies that were lost before they counted
        self.terms: dict[int, int] = {}
        self.checked_at = 0.0
        self.adjusted: list[AdjustRule] = []  # every one so far, because a message to a lost server may be lost
        self.chosen: tuple[Peer, RoundChosen] | None = None  # the last one, and the server that has chosen it

    @property
    def wanted(self) -> bool:
        return self.state.settings.copies > 1

    def to_start(self) -> list[Peer]:
        """Return the servers that the runtime is to start as copies of others."""
        if not self.wanted or self.state.phase is not Phase.RUNNING:
            return []
        started = []
        for index in sorted(self.state.servers):
            if index in self.of or self.failures.get(index, 0) >= MAX_FAILURES:
                continue
            self.incarnations[index] = self.incarnations.get(index, 0) + 1
            copy = self.of[index] = ServerCopy(Peer("server", index, self.incarnations[index]))
            started.append(copy.peer)
        return started

    def is_stranger(self, sender: Peer) -> bool:
        """Return True for a server that a copy has replaced, and for a copy: only its server speaks for both."""
        known = self.state.servers.get(sender.index)
        return self.wanted and sender.role == "server" and known is not None and known.peer != sender

    def receive(self, sender: Peer, message: Message, now: float) -> list[CoordinatorOutput] | None:
        """Take a message about copies; None: it is about something else."""
        copy = self.of.get(sender.index) if sender.role == "server" else None
        if copy is not None and copy.peer == sender:
            copy.silent_s = 0.0
        match message:
            case ServerJoin() if copy is not None and copy.peer == sender:
                return self._joins(copy, message)
            case ServerJoin() if self.is_stranger(sender):
                return [CoordinatorOutput(sender, Shutdown("this copy is not needed any more."))]
            case Promoted() if copy is not None and copy.peer == sender and copy.is_promoted:
                return self._promoted(copy, now)
        if self.is_stranger(sender):
            return []
        match message:
            case RoundChosen():
                self.chosen = sender, message
            case CopyCounts() if copy is not None and copy.peer.incarnation == message.incarnation:
                if not copy.counts:
                    copy.counts = True
                    self.failures.pop(sender.index, None)
                    self.state.events.append(events.ServerCopied(at_s=now, server=sender.index))
                return []
            case CopyUnreachable() if copy is not None and copy.peer.incarnation == message.incarnation:
                return self._lost_copy(copy, now, "its server cannot reach it")
        return [] if isinstance(message, CopyCounts | CopyUnreachable | Promoted) else None

    def _joins(self, copy: ServerCopy, join: ServerJoin) -> list[CoordinatorOutput]:
        if copy.address is not None:
            return []  # the message arrived twice
        copy.address = join.address
        server = self.state.servers[copy.peer.index]
        return [CoordinatorOutput(server.peer, AddCopy(copy.peer.incarnation, join.address))]

    # ---- losses ------------------------------------------------------------------------------------------------------

    def lost(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput] | None:
        """React to the loss of a server or a copy; None: no copy can take over, so the run ends."""
        if not self.wanted or peer.role != "server":
            return None
        copy, server = self.of.get(peer.index), self.state.servers.get(peer.index)
        if copy is not None and copy.peer == peer:
            if not copy.is_promoted:
                return self._lost_copy(copy, now, why)
            del self.of[peer.index]
            if server is not None:
                server.peer = peer  # it was taking over: the server and its copy are both lost
            return None
        if server is None or server.peer != peer or (copy is not None and copy.is_promoted):
            return []  # it was replaced before
        return self.replace(server, now, why)

    def replace(self, server: ServerState, now: float, why: str) -> list[CoordinatorOutput] | None:
        """Let the copy of a server take over; None if there is none that counts."""
        if not self.may_replace(server):
            return None
        copy = self.of[server.peer.index]
        if not server.reported_silent:
            self.state.events.append(events.Lost(at_s=now, node=str(server.peer), why=why))
        copy.since, copy.why, copy.silent_s = now, why, 0.0
        term = self.terms[server.peer.index] = self.terms.get(server.peer.index, 1) + 1
        return [CoordinatorOutput(server.peer, ReplacedByCopy(term)), CoordinatorOutput(copy.peer, Promote(term))]

    def may_replace(self, server: ServerState) -> bool:
        """Return True if a server has a copy that counts."""
        copy = self.of.get(server.peer.index)
        return copy is not None and copy.counts and not copy.is_promoted and self.state.phase in WITH_COPIES

    def _lost_copy(self, copy: ServerCopy, now: float, why: str) -> list[CoordinatorOutput]:
        """Let the server answer without its copy, and another copy be made."""
        index = copy.peer.index
        del self.of[index]
        self.state.events.append(events.Lost(at_s=now, node=f"copy of server {index}", why=why))
        if not copy.counts:
            self.failures[index] = self.failures.get(index, 0) + 1
            if self.failures[index] == MAX_FAILURES:
                text = f"{MAX_FAILURES} copies of server {index} were lost before they were complete: it has none"
                self.state.events.append(events.Warned(at_s=now, text=text))
        outs = [CoordinatorOutput(copy.peer, Shutdown("another copy takes its place."))]
        server = self.state.servers.get(index)
        return outs if server is None else [*outs, CoordinatorOutput(server.peer, DropCopy(copy.peer.incarnation))]

    def _promoted(self, copy: ServerCopy, now: float) -> list[CoordinatorOutput]:
        """Announce the copy that has taken over, and repeat to it what may have been lost with the server."""
        state, index = self.state, copy.peer.index
        del self.of[index]
        before, address = state.servers[index], copy.address
        assert address is not None and state.welcome is not None
        server = state.servers[index] = ServerState(
            copy.peer, address, ready=True, flushed=before.flushed, report=before.report, full=before.full
        )
        addresses = list(state.welcome.servers)
        addresses[index] = address
        state.welcome = msgspec.structs.replace(state.welcome, servers=tuple(addresses))
        state.events.append(
            events.ServerReplaced(at_s=now, server=index, why=copy.why, seconds=max(0.0, now - copy.since))
        )
        moved = ServerMoved(copy.peer, address)
        outs = [CoordinatorOutput(worker.peer, moved) for worker in state.connected()]
        outs += [CoordinatorOutput(copy.peer, message) for message in self._repeated(index)]
        outs += flushes(state, [server]) if before.flushing and not before.flushed else []
        return outs + self.shutdown.when_all_ended()

    def _repeated(self, index: int) -> list[Message]:
        state = self.state
        inactive = sorted(rank for rank, worker in state.workers.items() if not worker.active or not worker.connected)
        messages: list[Message] = [*map(Forget, inactive), *self.adjusted]
        if index in state.planning and state.plan is not None:
            messages.append(Planned(state.plan))
        if self.chosen is not None and self.chosen[0].index != index:
            messages.append(self.chosen[1])
        return messages

    def check(self, now: float) -> list[CoordinatorOutput]:
        """Probe silent copies, and do without one that stays silent."""
        timeout_s, outs = self.state.settings.failure_timeout_s, list[CoordinatorOutput]()
        # A clock that jumps, as after a suspend, adds no more than the longest time between two checks.
        passed_s = max(0.0, min(now - self.checked_at, timeout_s / 5))
        self.checked_at = now
        for copy in list(self.of.values()):
            copy.silent_s += passed_s if copy.address is not None else 0.0
            if copy.is_promoted and copy.silent_s > server_patience_s(timeout_s):
                outs += self.shutdown.abort(f"{copy.peer} and its copy do not answer: their parameters are lost.")
            elif copy.silent_s > timeout_s and not copy.is_promoted:
                outs += self._lost_copy(copy, now, f"no message for {copy.silent_s:.1f} s")
            elif copy.silent_s > 0.4 * timeout_s:
                outs.append(CoordinatorOutput(copy.peer, ReportRequest()))
        return outs
