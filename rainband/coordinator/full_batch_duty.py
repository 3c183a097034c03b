"""The seam to strategies that are led from here: what their leader must hear, and what comes of it."""

from __future__ import annotations

from rainband.coordinator.full_batch import Crew, Leader, To
from rainband.coordinator.shutdown import Ending
from rainband.coordinator.state import Facts, Out, ServerState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Answer, Evaluated, Peer, Return, Want


class Leading:
    """Brings the leader what concerns it; when the leader is at its end, so is the run."""

    def __init__(self, facts: Facts, leader: Leader, ending: Ending) -> None:
        self.facts = facts
        self.leader = leader
        self.ending = ending

    def begin(self, now: float) -> list[Out]:
        """All blocks have their first values."""
        facts = self.facts
        assert facts.plan and facts.welcome
        servers = [facts.servers[index] for index in sorted(facts.servers)]
        journal = self.leader.journal
        journal.join, journal.plan, journal.welcome = facts.join, facts.plan, facts.welcome
        journal.servers = tuple(server.address for server in servers)
        peers = tuple(server.peer for server in servers)
        first = peers[facts.welcome.owners[0]]
        return self._said(self.leader.start(Crew(facts.plan, peers, first, facts.settings.seed), now))

    def take_up(self, now: float) -> list[Out]:
        """Go on where the coordinator that came before has left its journal: the servers have the parameters."""
        facts, journal = self.facts, self.leader.journal
        facts.join, facts.plan, facts.welcome = journal.join, journal.plan, journal.welcome
        facts.servers = {
            index: ServerState(Peer("server", index), address, ready=True)
            for index, address in enumerate(journal.servers)
        }
        facts.phase = "running"
        facts.events.append(events.Returned(at_s=now, node="coordinator"))
        return self.begin(now)

    def answered(self, server: Peer, message: Answer | Evaluated, now: float) -> list[Out]:
        return self._said(self.leader.receive(server, message, now))

    def wants(self, worker: Peer, message: Want, now: float) -> list[Out]:
        return self._said(self.leader.want(worker, now, message.idle))

    def delivered(self, worker: Peer, message: Return, now: float) -> list[Out]:
        return self._said(self.leader.returned(worker, message.portion, message.lease, now))

    def forget(self, worker: WorkerState, now: float, ended: bool = False) -> list[Out]:
        """What a worker has not delivered is for others."""
        if self.facts.phase != "running":
            return []
        gone = ended or not worker.connected
        if fatal := self.leader.forget(worker.peer.index, gone, died=not worker.connected):
            return self.ending.stop("failed", fatal)
        return self.look(now)

    def look(self, now: float) -> list[Out]:
        return self._said(self.leader.look(now))

    def due_at(self) -> float | None:
        """When to call `look`: someone may be late by then; None: nobody waits for that."""
        return self.leader.due_at() if self.facts.phase == "running" else None

    def tick(self, now: float) -> list[Out]:
        return self._said(self.leader.tick(now)) if self.facts.phase in ("running", "finishing") else []

    def _said(self, led: list[To]) -> list[Out]:
        outs = [Out(to, message) for to, message in led]
        if not self.leader.over:
            return outs
        if self.facts.phase == "running" and self.leader.error:
            return outs + self.ending.stop("failed", f"the strategy could not go on: {self.leader.error}")
        if self.facts.phase == "running":
            return outs + self.ending.flush()
        return outs + self.ending.when_all_ended()
