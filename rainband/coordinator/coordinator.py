"""The coordinator: leads one run from the first join to the last goodbye. A state machine, like the servers.

It stands in no data path. Time enters as an argument. What it does with what comes in is in duties/, one file for each
of its duties; here is who hears of what.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.coordinator.admission import Forming
from rainband.coordinator.full_batch import Lead, Leader
from rainband.coordinator.full_batch_duty import Leading
from rainband.coordinator.guard_actions import Guarding
from rainband.coordinator.journal import Journal
from rainband.coordinator.leases import Leases
from rainband.coordinator.liveness import Presence
from rainband.coordinator.planning import Planning
from rainband.coordinator.reporting import Accounts
from rainband.coordinator.shutdown import Ending
from rainband.coordinator.state import Facts, Out, RunSettings, ServerState, WorkerState
from rainband.protocol.accounting import Books, Staleness
from rainband.protocol.data_plan import Plan
from rainband.protocol.events import AnyEvent, Regrouped
from rainband.protocol.messages import (
    Address,
    Answer,
    Ask,
    Away,
    Beat,
    Concluded,
    Dataset,
    Ended,
    Evaluated,
    Failed,
    Join,
    Message,
    Named,
    Peer,
    Ready,
    Report,
    Return,
    ServerJoin,
    Sets,
    Want,
)

__all__ = ["Coordinator", "Out", "RunSettings"]

FROM_WORKERS_OFTEN = frozenset((Beat, Want, Return, Ended))  # who is here does not change by these


class Coordinator:
    """Brings what comes in to the duty that it concerns."""

    def __init__(self, settings: RunSettings, lead: Lead | None = None, journal: Journal | None = None) -> None:
        """`lead` is the third half of a strategy that has one; `journal` is that of a coordinator that came before."""
        self.facts = facts = Facts(settings)
        self.accounts = Accounts(facts)
        self.ending = Ending(facts, self.accounts)
        self.leading: Leading | None = None
        if lead is not None:
            facts.leader = Leader(lead, facts.events, journal)
            self.leading = Leading(facts, facts.leader, self.ending)
        self.leases = Leases(facts, self.ending)
        self.presence = Presence(facts, self.ending, self.leases, self.leading)
        self.planning = Planning(facts)
        self.forming = Forming(facts, self.ending, self.planning, self.presence, self.leading)
        self.guarding = Guarding(facts, self.accounts)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, sender: Peer, message: Message, now: float, body: Any = None) -> list[Out]:
        """Take one message; returns what to send."""
        if type(message) in FROM_WORKERS_OFTEN and sender.role == "worker":
            worker = self.facts.workers.get(sender.index)
            if worker is None or worker.peer != sender:
                return []  # not a worker of this run, or an earlier life of one
            return self._from_worker(worker, message, now, body)
        if type(message) is not Report:
            self.facts.live = None
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
            case Sets():
                return self.leases.sets(sender, message, now)
            case Failed():
                return self.presence.failed(sender, message, now)
            case Named() if sender.role == "server":
                return [Out(s.peer, message) for s in self.facts.servers.values() if s.peer != sender]
            case Answer() | Evaluated() if self.leading is not None and sender.role == "server":
                return self.leading.answered(sender, message, now)
        worker = self.facts.workers.get(sender.index)
        if sender.role != "worker" or worker is None or worker.peer != sender:
            return []  # not a worker of this run, or an earlier life of one
        return self._from_worker(worker, message, now, body)

    def _from_worker(self, worker: WorkerState, message: Message, now: float, body: Any) -> list[Out]:
        match message:
            case Beat():
                return self.presence.beat(worker, message, now)
            case Want():
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
            case Away():
                return self.presence.away(worker, now)
        return []

    def _reported(self, sender: Peer, report: Report, now: float) -> list[Out]:
        """The marks of a server, which say what is done."""
        facts = self.facts
        if sender.role == "worker" and not facts.settings.num_servers:
            facts.servers.setdefault(sender.index, ServerState(sender, Address("", 0)))  # it holds parameters itself
        server = facts.servers.get(sender.index)
        if server is None or server.peer != sender:
            return []
        if not report.measured and server.report is not None:
            last = server.report
            report = msgspec.structs.replace(report, staleness=last.staleness, missed=last.missed, limit=last.limit)
        before = server.report and server.report.gathers
        if before and report.gathers and before != report.gathers and sender.index == min(facts.servers):
            facts.events.append(Regrouped(at_s=now, gradients=report.gathers))  # it stands for all servers
        server.report, server.full = report, frozenset(report.full)
        server.flushed |= report.flushed  # kept here: a report that was asked for meanwhile does not say so
        if report.flushed and facts.phase in ("flushing", "finishing"):
            return self.ending.flushed()
        if report.measured and facts.phase == "concluding":
            return self.ending.last_marks(sender)
        may_free = facts.join and (facts.join.warm_batches or facts.join.rounds)  # may those who wait begin now?
        return self.ending.when_done() + (self.leases.give(now) if may_free else [])

    def lost(self, peer: Peer, now: float, why: str = "its connection closed") -> list[Out]:
        """A node's connection is gone, or its process has ended."""
        self.facts.live = None
        return self.presence.lost(peer, now, why)

    def never_comes(self, peer: Peer, now: float, why: str) -> list[Out]:
        """A worker's process has ended before it joined, and nobody starts it again."""
        return self.presence.never_comes(peer, now, why)

    def tick(self, now: float) -> list[Out]:
        """Called about every fifth of the failure timeout."""
        facts = self.facts
        facts.live = None
        outs = self.presence.give_up_the_late(now) + self.leases.confirm(now) + self.presence.look_after_servers(now)
        if self.leading is not None:
            outs += self.leading.tick(now)
        if self.leading is not None and facts.phase == "running":
            self.note_progress(now)
        elif facts.phase in ("running", "flushing"):
            outs += [Out(s.peer, Ask()) for s in facts.servers.values()] + self.leases.ask_again()
            self.note_progress(now)
            outs += self.guarding.look(now)
        if facts.phase == "concluding":
            outs += self.ending.ask_for_last_marks()
        return outs + self.leases.give(now)

    def due_at(self) -> float | None:
        """When to call `look`: someone may be late by then; None: nobody waits for that."""
        return None if self.leading is None else self.leading.due_at()

    def look(self, now: float) -> list[Out]:
        return [] if self.leading is None else self.leading.look(now)

    @property
    def journal(self) -> Journal | None:
        """With this another coordinator can take the run up, if it leads and has begun to; None: nobody can."""
        leader = self.facts.leader
        if leader is None or not leader.journal.has_begun or self.facts.phase != "running":
            return None
        return leader.journal

    def take_up(self, now: float) -> list[Out]:
        """Go on where the coordinator that came before has left its journal; workers join again."""
        assert self.leading is not None, "a journal is kept only where the coordinator leads"
        return self.leading.take_up(now)

    def stop(self, outcome: str, reason: str) -> list[Out]:
        """End early: workers finish the cell at hand and give their leases back."""
        return self.ending.stop(outcome, reason)

    # ---- what is known ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.facts.phase

    @property
    def outcome(self) -> str:
        return self.facts.outcome

    @property
    def reason(self) -> str:
        return self.facts.reason

    @property
    def plan(self) -> Plan | None:
        return self.facts.plan

    @property
    def workers(self) -> dict[int, WorkerState]:
        return self.facts.workers

    @property
    def servers(self) -> dict[int, ServerState]:
        return self.facts.servers

    @property
    def events(self) -> list[AnyEvent]:
        return self.facts.events

    @property
    def metrics(self) -> dict[str, float]:
        return self.ending.metrics

    def take_events(self) -> list[AnyEvent]:
        """What has happened since they were taken last."""
        taken = self.facts.events[:]
        self.facts.events.clear()  # the same list: others add to it
        return taken

    def failed(self, reason: str) -> None:
        """Whoever drives the run has seen why nothing good comes of it."""
        self.facts.outcome, self.facts.reason = "failed", reason

    def books(self) -> Books | None:
        return self.accounts.books()

    def staleness(self) -> Staleness:
        return self.accounts.staleness()

    def samples_done(self) -> int:
        return self.accounts.samples_done()

    def note_progress(self, now: float) -> None:
        """Add what is known to the events; called at every tick, and once more when the data is done."""
        self.accounts.note_progress(now)

    def waits_for(self) -> str:
        """In words, for who looks for a deadlock."""
        facts = self.facts
        match facts.phase:
            case "forming":
                servers = f"{len(facts.servers)} of {facts.settings.num_servers} servers"
                return f"forming, {servers} and {len(facts.workers)} workers are here"
            case "loading":
                return f"waits for {', '.join(str(s.peer) for s in facts.servers.values() if not s.ready)} to be loaded"
            case "finishing":
                late = [str(w.peer) for w in facts.connected() if w.here and not w.ended]
                return f"waits for {', '.join(late)} to end"
            case "concluding":
                return f"waits for worker {self.ending.concluder} to save the model"
        if facts.leader is not None and facts.phase == "running":
            return facts.leader.waits_for()
        return (
            f"{facts.phase}, {facts.batches_done()} of {facts.plan.num_batches if facts.plan else 0} batches done; "
            + (self.leases.who_has_what())
        )
