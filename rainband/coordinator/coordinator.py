"""The coordinator: leads one run from the first join to the last goodbye. A state machine, like the servers.

It stands in no data path. Time enters as an argument. What it does with what comes in is in duties/, one file for each
of its duties; here is who hears of what.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.coordinator.admission import Admission
from rainband.coordinator.full_batch import FullBatchRun
from rainband.coordinator.full_batch_duty import FullBatchDuty
from rainband.coordinator.guard_actions import GuardActions
from rainband.coordinator.journal import Journal
from rainband.coordinator.leases import Leases
from rainband.coordinator.liveness import Liveness
from rainband.coordinator.planning import Planning
from rainband.coordinator.reporting import Reporting
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, RunSettings, RunState, ServerState, WorkerState
from rainband.protocol.accounting import BatchAccounting, Staleness
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.events import AnyEvent, UpdateSizeChanged
from rainband.protocol.messages import (
    AcceptedBatches,
    Address,
    Answer,
    Concluded,
    Dataset,
    Ended,
    Evaluated,
    Failed,
    Heartbeat,
    Join,
    LeaseRequest,
    Message,
    Paused,
    Peer,
    Ready,
    Report,
    ReportRequest,
    Return,
    RoundChosen,
    ServerJoin,
)
from rainband.strategy import Requirements, Strategy

__all__ = ["Coordinator", "CoordinatorOutput", "RunSettings"]

FROM_WORKERS_OFTEN = frozenset((Heartbeat, LeaseRequest, Return, Ended))  # who is here does not change by these


class Coordinator:
    """Brings what comes in to the duty that it concerns."""

    def __init__(self, settings: RunSettings, strategy: Strategy | None = None, journal: Journal | None = None) -> None:
        """`journal` is that of a coordinator whose place this one takes."""
        requires = Requirements() if strategy is None else strategy.requires
        self.state = state = RunState(settings)
        self.accounts = Reporting(state)
        self.ending = RunEnd(state, self.accounts)
        self.leading: FullBatchDuty | None = None
        if strategy is not None and requires.coordinated:
            state.full_batch = FullBatchRun(strategy.coordinate, state.events, journal)
            self.leading = FullBatchDuty(state, state.full_batch, self.ending)
        self.leases = Leases(state, self.ending)
        self.presence = Liveness(state, self.ending, self.leases, self.leading)
        self.planning = Planning(state)
        self.forming = Admission(state, self.ending, self.planning, self.presence, self.leading)
        self.guarding = GuardActions(state, self.accounts, requires)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, sender: Peer, message: Message, now: float, body: Any = None) -> list[CoordinatorOutput]:
        """Take one message; returns what to send."""
        if type(message) in FROM_WORKERS_OFTEN and sender.role == "worker":
            worker = self.state.workers.get(sender.index)
            if worker is None or worker.peer != sender:
                return []  # not a worker of this run, or an earlier life of one
            return self._from_worker(worker, message, now, body)
        if type(message) is not Report:
            self.state.live = None
        if sender.role == "server":
            self.presence.hears_of(sender, now)
        match message:
            case ServerJoin():
                return self.forming.server_joins(sender, message, now)
            case Join():
                return self.forming.worker_joins(sender, message, now)
            case Ready():
                return self.forming.server_ready(sender, now)
            case Report():
                return self._reported(sender, message, now)
            case AcceptedBatches():
                return self.leases.sets(sender, message, now)
            case Failed():
                return self.presence.failed(sender, message, now)
            case RoundChosen() if sender.role == "server":
                return [CoordinatorOutput(s.peer, message) for s in self.state.servers.values() if s.peer != sender]
            case Answer() | Evaluated() if self.leading is not None and sender.role == "server":
                return self.leading.answered(sender, message, now)
        worker = self.state.workers.get(sender.index)
        if sender.role != "worker" or worker is None or worker.peer != sender:
            return []  # not a worker of this run, or an earlier life of one
        return self._from_worker(worker, message, now, body)

    def _from_worker(self, worker: WorkerState, message: Message, now: float, body: Any) -> list[CoordinatorOutput]:
        match message:
            case Heartbeat():
                return self.presence.heartbeat(worker, message, now)
            case LeaseRequest():
                self.presence.is_here(worker, now)
                if self.leading is not None:
                    return self.leading.wants(worker.peer, message, now)
                return self.leases.wants(worker, now)
            case Return():
                self.presence.is_here(worker, now)
                if self.leading is not None:
                    return self.leading.delivered(worker.peer, message, now)
                return self.leases.returned(worker, message, now)
            case Ended():
                return self.presence.ends(worker, now) + self.ending.ended(worker, message, body)
            case Concluded():
                return self.ending.concluded(worker, message)
            case Dataset():
                return self.planning.draws_from(worker, message, now)
            case Paused():
                return self.presence.away(worker, now)
        return []

    def _reported(self, sender: Peer, report: Report, now: float) -> list[CoordinatorOutput]:
        """The marks of a server, which say what is done."""
        state = self.state
        if sender.role == "worker" and not state.settings.num_servers:
            state.servers.setdefault(sender.index, ServerState(sender, Address("", 0)))  # it holds parameters itself
        server = state.servers.get(sender.index)
        if server is None or server.peer != sender:
            return []
        if not report.measured and server.report is not None:
            last = server.report
            report = msgspec.structs.replace(report, staleness=last.staleness, missed=last.missed, limit=last.limit)
        before = server.report and server.report.gradients_per_update
        if (
            before
            and report.gradients_per_update
            and before != report.gradients_per_update
            and sender.index == min(state.servers)
        ):
            state.events.append(
                UpdateSizeChanged(at_s=now, gradients=report.gradients_per_update)
            )  # it stands for all servers
        server.report, server.full = report, frozenset(report.full)
        server.flushed |= report.flushed  # kept here: a report that was asked for meanwhile does not say so
        if report.flushed and state.phase in ("flushing", "finishing"):
            return self.ending.flushed()
        if report.measured and state.phase == "concluding":
            return self.ending.last_marks(sender)
        may_free = state.join and (state.join.warm_start_batches or state.join.rounds)  # may those who wait begin now?
        return self.ending.when_done() + (self.leases.give(now) if may_free else [])

    def lost(self, peer: Peer, now: float, why: str = "its connection closed") -> list[CoordinatorOutput]:
        """A node's connection is gone, or its process has ended."""
        self.state.live = None
        return self.presence.lost(peer, now, why)

    def never_comes(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """A worker's process has ended before it joined, and nobody starts it again."""
        return self.presence.never_comes(peer, now, why)

    def tick(self, now: float) -> list[CoordinatorOutput]:
        """Called about every fifth of the failure timeout."""
        state = self.state
        state.live = None
        outs = self.presence.give_up_the_late(now) + self.leases.confirm(now) + self.presence.look_after_servers(now)
        if self.leading is not None:
            outs += self.leading.tick(now)
        if self.leading is not None and state.phase == "running":
            self.note_progress(now)
        elif state.phase in ("running", "flushing"):
            outs += [
                CoordinatorOutput(s.peer, ReportRequest()) for s in state.servers.values()
            ] + self.leases.ask_again()
            self.note_progress(now)
            outs += self.guarding.look(now)
        if state.phase == "concluding":
            outs += self.ending.ask_for_last_marks()
        return outs + self.leases.give(now)

    def due_at(self) -> float | None:
        """When to call `look`: someone may be late by then; None: nobody waits for that."""
        return None if self.leading is None else self.leading.due_at()

    def look(self, now: float) -> list[CoordinatorOutput]:
        return [] if self.leading is None else self.leading.look(now)

    @property
    def journal(self) -> Journal | None:
        """With this another coordinator can take the run up, if it leads and has begun to; None: nobody can."""
        full_batch = self.state.full_batch
        if full_batch is None or not full_batch.journal.has_begun or self.state.phase != "running":
            return None
        return full_batch.journal

    def take_up(self, now: float) -> list[CoordinatorOutput]:
        """Go on where the coordinator that came before has left its journal; workers join again."""
        assert self.leading is not None, "a journal is kept only where the coordinator leads"
        return self.leading.take_up(now)

    def stop(self, outcome: str, reason: str) -> list[CoordinatorOutput]:
        """End early: workers finish the cell at hand and give their leases back."""
        return self.ending.stop(outcome, reason)

    # ---- what is known ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.state.phase

    @property
    def outcome(self) -> str:
        return self.state.outcome

    @property
    def reason(self) -> str:
        return self.state.reason

    @property
    def plan(self) -> DataPlan | None:
        return self.state.plan

    @property
    def workers(self) -> dict[int, WorkerState]:
        return self.state.workers

    @property
    def servers(self) -> dict[int, ServerState]:
        return self.state.servers

    @property
    def events(self) -> list[AnyEvent]:
        return self.state.events

    @property
    def metrics(self) -> dict[str, float]:
        return self.ending.metrics

    def take_events(self) -> list[AnyEvent]:
        """What has happened since they were taken last."""
        taken = self.state.events[:]
        self.state.events.clear()  # the same list: others add to it
        return taken

    def failed(self, reason: str) -> None:
        """Whoever drives the run has seen why nothing good comes of it."""
        self.state.outcome, self.state.reason = "failed", reason

    def accounting(self) -> BatchAccounting | None:
        return self.accounts.accounting()

    def staleness(self) -> Staleness:
        return self.accounts.staleness()

    def samples_done(self) -> int:
        return self.accounts.samples_done()

    def note_progress(self, now: float) -> None:
        """Add what is known to the events; called at every tick, and once more when the data is done."""
        self.accounts.note_progress(now)

    def waits_for(self) -> str:
        """In words, for who looks for a deadlock."""
        state = self.state
        match state.phase:
            case "forming":
                servers = f"{len(state.servers)} of {state.settings.num_servers} servers"
                return f"forming, {servers} and {len(state.workers)} workers are here"
            case "loading":
                return f"waits for {', '.join(str(s.peer) for s in state.servers.values() if not s.ready)} to be loaded"
            case "finishing":
                late = [str(w.peer) for w in state.connected() if w.here and not w.ended]
                return f"waits for {', '.join(late)} to end"
            case "concluding":
                return f"waits for worker {self.ending.concluder} to save the model"
        if state.full_batch is not None and state.phase == "running":
            return state.full_batch.waits_for()
        return (
            f"{state.phase}, {state.batches_done()} of {state.plan.num_batches if state.plan else 0} batches done; "
            + (self.leases.who_has_what())
        )
