"""The seam to strategies that are led from here: what their leader must hear, and what comes of it."""

from __future__ import annotations

from rainband.coordinator.full_batch import EvaluationWorkers, FullBatchRun, To
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, RunState, ServerState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Answer, Evaluated, LeaseRequest, Peer, Return


class FullBatchDuty:
    """Brings the leader what concerns it; when the leader is at its end, so is the run."""

    def __init__(self, state: RunState, full_batch: FullBatchRun, ending: RunEnd) -> None:
        self.state = state
        self.full_batch = full_batch
        self.ending = ending

    def begin(self, now: float) -> list[CoordinatorOutput]:
        """All blocks have their first values."""
        state = self.state
        assert state.plan and state.welcome
        servers = [state.servers[index] for index in sorted(state.servers)]
        journal = self.full_batch.journal
        journal.join, journal.plan, journal.welcome = state.join, state.plan, state.welcome
        journal.servers = tuple(server.address for server in servers)
        peers = tuple(server.peer for server in servers)
        first = peers[state.welcome.owners[0]]
        return self._said(self.full_batch.start(EvaluationWorkers(state.plan, peers, first, state.settings.seed), now))

    def take_up(self, now: float) -> list[CoordinatorOutput]:
        """Go on where the coordinator that came before has left its journal: the servers have the parameters."""
        state, journal = self.state, self.full_batch.journal
        state.join, state.plan, state.welcome = journal.join, journal.plan, journal.welcome
        state.servers = {
            index: ServerState(Peer("server", index), address, ready=True)
            for index, address in enumerate(journal.servers)
        }
        state.phase = "running"
        state.events.append(events.Returned(at_s=now, node="coordinator"))
        return self.begin(now)

    def answered(self, server: Peer, message: Answer | Evaluated, now: float) -> list[CoordinatorOutput]:
        return self._said(self.full_batch.receive(server, message, now))

    def wants(self, worker: Peer, message: LeaseRequest, now: float) -> list[CoordinatorOutput]:
        return self._said(self.full_batch.want(worker, now, message.idle))

    def delivered(self, worker: Peer, message: Return, now: float) -> list[CoordinatorOutput]:
        return self._said(self.full_batch.returned(worker, message.portion, message.lease, now))

    def forget(self, worker: WorkerState, now: float, ended: bool = False) -> list[CoordinatorOutput]:
        """What a worker has not delivered is for others."""
        if self.state.phase != "running":
            return []
        gone = ended or not worker.connected
        if fatal := self.full_batch.forget(worker.peer.index, gone, died=not worker.connected):
            return self.ending.stop("failed", fatal)
        return self.look(now)

    def look(self, now: float) -> list[CoordinatorOutput]:
        return self._said(self.full_batch.look(now))

    def due_at(self) -> float | None:
        """When to call `look`: someone may be late by then; None: nobody waits for that."""
        return self.full_batch.due_at() if self.state.phase == "running" else None

    def tick(self, now: float) -> list[CoordinatorOutput]:
        return self._said(self.full_batch.tick(now)) if self.state.phase in ("running", "finishing") else []

    def _said(self, coordinated: list[To]) -> list[CoordinatorOutput]:
        outs = [CoordinatorOutput(to, message) for to, message in coordinated]
        if not self.full_batch.over:
            return outs
        if self.state.phase == "running" and self.full_batch.error:
            return outs + self.ending.stop("failed", f"the strategy could not go on: {self.full_batch.error}")
        if self.state.phase == "running":
            return outs + self.ending.flush()
        return outs + self.ending.when_all_ended()
