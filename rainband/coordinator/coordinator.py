"""The coordinator: runs one run from the first join to the shutdown of all nodes. A state machine, like the servers.

No gradient or parameter passes through it. Time is an argument. Each message goes to the class of this package that it
concerns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rainband.coordinator.admission import Admission
from rainband.coordinator.divergence_guard import GuardActions
from rainband.coordinator.full_batch import FullBatchDuty, FullBatchRun
from rainband.coordinator.journal import Journal, decode_results
from rainband.coordinator.leases import Leases
from rainband.coordinator.liveness import Liveness
from rainband.coordinator.planning import Planning
from rainband.coordinator.reporting import Reporting
from rainband.coordinator.saving.checkpoints import Checkpoints, Collected
from rainband.coordinator.saving.rollback import Rollback
from rainband.coordinator.saving.server_copies import ServerCopies
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, Phase, RunSettings, RunState, ServerState
from rainband.errors import did_you_mean
from rainband.protocol import events
from rainband.protocol.messages import (
    AcceptedBatches,
    Address,
    AdjustRule,
    Answer,
    CheckpointRequest,
    Concluded,
    Dataset,
    Ended,
    Evaluated,
    Failed,
    Heartbeat,
    Join,
    LeaseRequest,
    LinksOpened,
    Message,
    Params,
    Paused,
    Peer,
    Ready,
    Report,
    ReportRequest,
    Return,
    RoundChosen,
    Saved,
    ServerJoin,
    StopRequest,
)
from rainband.strategy import Requirements, Strategy

__all__ = ["Coordinator", "CoordinatorOutput", "RunSettings"]

FREQUENT = frozenset((Heartbeat, LeaseRequest, Return, Ended))  # from workers; the set of active ones stays the same


class Coordinator:
    """Receives every message, and ticks; other objects read its `state`."""

    def __init__(self, settings: RunSettings, strategy: Strategy | None = None, journal: Journal | None = None) -> None:
        """`journal`: of a coordinator that this one replaces."""
        requires = Requirements() if strategy is None else strategy.requires
        settings = msgspec.structs.replace(settings, tree_arity=requires.tree_arity)
        self.state = state = RunState(settings)
        self.in_rounds = requires.in_rounds  # each worker can report what all together have done
        self.reporting = Reporting(state)
        self.checkpoints = Checkpoints(state, requires)
        self.shutdown = RunEnd(state, self.reporting, self.checkpoints)
        self.copies = ServerCopies(state, self.shutdown)
        self.full_batch: FullBatchDuty | None = None
        if strategy is not None and requires.coordinated:
            if journal is None and settings.restore is not None:
                journal = Journal(entries=decode_results(settings.restore.results))
            state.full_batch = FullBatchRun(strategy.coordinate, state.events, journal, self._before_stop)
            self.full_batch = FullBatchDuty(state, state.full_batch, self.shutdown)
        self.leases = Leases(state, self.shutdown)
        self.liveness = Liveness(state, self.shutdown, self.leases, self.full_batch, self.in_rounds)
        self.planning = Planning(state)
        rollback = Rollback(state, self.leases, self.checkpoints)
        self.admission = Admission(state, self.shutdown, self.planning, self.liveness, self.full_batch, rollback)
        self.guard = GuardActions(state, self.reporting, requires)
        self.warned_of_target = False

    def receive(self, sender: Peer, message: Message, now: float, body: Any = None) -> list[CoordinatorOutput]:
        """Handle one message; return the messages to send."""
        if type(message) in FREQUENT and sender.role == "worker":
            return self._from_worker(sender, message, now, body)
        if type(message) is not Report:
            self.state.live = None
        if sender.role == "server":
            outs = self.copies.receive(sender, message, now) if self.copies.wanted else None
            if outs is not None:
                return outs
            self.liveness.server_active(sender, now)
        match message:
            case ServerJoin():
                return self.admission.server_joins(sender, message, now)
            case Join():
                return self.admission.worker_joins(sender, message, now, body)
            case Ready():
                return self.admission.server_ready(sender, now)
            case Report():
                return self._reported(sender, message, now)
            case Heartbeat() if sender.role == "server":
                return self._server_lives(sender, message)
            case AcceptedBatches():
                return self.leases.fenced(sender, message, now)
            case Params() if sender.role == "server":
                return self.shutdown.rescued(message, body)
            case Failed():
                return self.liveness.failed(sender, message, now)
            case RoundChosen() if sender.role == "server":
                return [CoordinatorOutput(s.peer, message) for s in self.state.servers.values() if s.peer != sender]
            case Saved():
                return self.checkpoints.saved(sender, message, now) + self.shutdown.when_concluded()
            case Answer() | Evaluated() if self.full_batch is not None and sender.role == "server":
                return self.full_batch.answered(sender, message, now) + self.checkpoints.look(now)
        return self._from_worker(sender, message, now, body)

    def _from_worker(self, sender: Peer, message: Message, now: float, body: Any) -> list[CoordinatorOutput]:
        worker = self.state.workers.get(sender.index)
        if sender.role != "worker" or worker is None or worker.peer != sender:
            return []  # not a worker of this run, or an earlier incarnation of one
        match message:
            case Heartbeat():
                return self.liveness.heartbeat(worker, message, now) + self._look_at_target(message, now)
            case LeaseRequest():
                self.liveness.mark_active(worker, now)
                if self.full_batch is not None:
                    return self.full_batch.requested(worker.peer, message, now)
                return self.leases.requested(worker, now)
            case Return():
                self.liveness.mark_active(worker, now)
                if self.full_batch is not None:
                    return self.full_batch.delivered(worker.peer, message, now)
                return self.leases.returned(worker, message, now)
            case Ended() if not worker.connected:  # it was dismissed with its replica, which is started again
                return []
            case Ended() if worker.leaving and self.state.phase is Phase.RUNNING:
                return self.liveness.leaves(worker, now)
            case Ended():
                return self.liveness.ends(worker, now) + self.shutdown.ended(worker, message, body, now)
            case Concluded():
                return self.shutdown.concluded(worker, message)
            case Dataset():
                return self.admission.described(worker, message, now)
            case LinksOpened():
                self.state.events.append(
                    events.Linked(
                        at_s=now, worker=sender.index, machine=message.machine, links=message.links, peers=message.peers
                    )
                )
            case Paused():
                return self.liveness.pause(worker, now)
            case CheckpointRequest():
                return self.checkpoints.request(now)
            case StopRequest():
                return self.shutdown.stop("stopped", message.reason)
        return []

    def _look_at_target(self, heartbeat: Heartbeat, now: float) -> list[CoordinatorOutput]:
        """End the run if a worker has measured its target."""
        target, state = self.state.settings.target, self.state
        if target is None or state.phase is not Phase.RUNNING or not heartbeat.metrics:
            return []
        if target.metric not in heartbeat.metrics:
            self._warn_of_target(target.metric, heartbeat.metrics, now)
        if not target.is_reached(heartbeat.metrics):
            return []
        value = heartbeat.metrics[target.metric]
        computed = sum(worker.heartbeat.samples for worker in state.workers.values())  # reports of servers come later
        samples = max(self.reporting.samples_done(), computed)
        state.events.append(events.TargetReached(at_s=now, metric=target.metric, value=value, samples=samples))
        return self.shutdown.stop("finished", f"{target.metric} {value:.4g} reaches the target, {target}")

    def _warn_of_target(self, metric: str, measured: Mapping[str, float], now: float) -> None:
        """Warn once of a metric that the task does not measure; a custom loop may report it later."""
        if not self.warned_of_target and not self.state.is_custom_loop():
            self.warned_of_target = True
            text = (
                f"the target is never reached: the task measures no {metric}{did_you_mean(metric, measured)}, only "
                f"{' and '.join(measured)}."
            )
            self.state.events.append(events.Warned(at_s=now, text=text))

    def _reported(self, sender: Peer, report: Report, now: float) -> list[CoordinatorOutput]:
        """Take the accepted batches and the measurements of a server."""
        state = self.state
        if self.in_rounds:
            return self._reported_rounds(sender, report, now)
        if sender.role == "worker" and not state.settings.num_servers:
            state.servers.setdefault(sender.index, ServerState(sender, Address("", 0)))  # it holds the parameters
        server = state.servers.get(sender.index)
        if server is None or server.peer != sender:
            return []
        if not report.measured and server.report is not None:
            last = server.report
            report = msgspec.structs.replace(report, staleness=last.staleness, missed=last.missed, limit=last.limit)
        before, size = server.report and server.report.gradients_per_update, report.gradients_per_update
        if before and size and before != size and sender.index == min(state.servers):  # one server stands for all
            state.events.append(events.UpdateSizeChanged(at_s=now, gradients=size))
        server.report, server.full = report, frozenset(report.full)
        if report.flushed and state.phase in (Phase.FLUSHING, Phase.FINISHING):  # others may be requested meanwhile
            return self.shutdown.flushed(server)
        if report.measured and state.phase is Phase.CONCLUDING:
            return self.shutdown.last_report(sender)
        may_free = state.join and (state.join.warm_start_batches or state.join.rounds)  # waiting workers may start now
        return self.shutdown.when_done() + (self.leases.give(now) if may_free else [])

    def _server_lives(self, sender: Peer, heartbeat: Heartbeat) -> list[CoordinatorOutput]:
        server = self.state.servers.get(sender.index)
        if server is not None and server.peer == sender:
            server.cpu_s, server.memory_bytes = heartbeat.cpu_s, heartbeat.memory_bytes
        return []

    def _reported_rounds(self, sender: Peer, report: Report, now: float) -> list[CoordinatorOutput]:
        """Take a report on batches that all workers share: the one that has come furthest stands for all."""
        state = self.state
        if sender.role != "worker":
            return []
        known = next(iter(state.servers.values()), None)
        if known is None or known.report is None or known.report.accepted <= report.accepted:
            state.servers.clear()
            state.servers[sender.index] = ServerState(sender, Address("", 0), report=report)
        return self.shutdown.when_done()

    def lost(self, peer: Peer, now: float, why: str = "its connection closed") -> list[CoordinatorOutput]:
        """React to a closed connection, or to the end of a process."""
        self.state.live = None
        self.checkpoints.lost(peer, now)
        outs = self.copies.lost(peer, now, why)
        return self.liveness.lost(peer, now, why) if outs is None else outs

    def never_joins(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Go on without a worker whose process has ended before it joined."""
        self.state.live = None
        return self.liveness.never_joins(peer, now, why) + self.admission.form(now)

    def dismiss(self, ranks: Sequence[int], now: float) -> list[CoordinatorOutput]:
        """Let workers leave after their current work items."""
        self.state.live = None
        return self.liveness.dismiss(ranks, now)

    def tick(self, now: float) -> list[CoordinatorOutput]:
        """Do what is due regularly: call it about every fifth of the failure timeout."""
        state = self.state
        state.live = None
        outs = self.liveness.deactivate_late_workers(now) + self.leases.confirm(now) + self.liveness.check_servers(now)
        outs += self._check_copies(now)
        if self.full_batch is not None:
            outs += self.full_batch.tick(now)
        if self.full_batch is not None and state.phase is Phase.RUNNING:
            self.reporting.report_progress(now)
        elif state.phase in (Phase.RUNNING, Phase.FLUSHING):
            outs += [CoordinatorOutput(s.peer, ReportRequest()) for s in state.servers.values()]
            outs += self.leases.repeat_requests()
            self.leases.forget_done()
            self.reporting.report_progress(now)
            adjusted = self.guard.check(now)
            self.copies.adjusted += [out.message for out in adjusted[:1] if isinstance(out.message, AdjustRule)]
            outs += adjusted
        elif state.phase is Phase.FINISHING:
            outs += self.leases.forget_ended_workers()
        if state.phase is Phase.CONCLUDING:
            outs += self.shutdown.request_last_reports()
        outs += self.checkpoints.tick(now)
        return outs + self.leases.give(now)

    def _check_copies(self, now: float) -> list[CoordinatorOutput]:
        """Let copies take over silent servers, and do without silent copies."""
        if not self.copies.wanted:
            return []
        outs: list[CoordinatorOutput] = []
        for server in list(self.state.servers.values()):
            if server.reported_silent and self.copies.may_replace(server):
                self.checkpoints.lost(server.peer, now)
                outs += self.copies.replace(server, now, f"no message for {server.silent_s:.1f} s") or []
        return outs + self.copies.check(now)

    def observe(self, now: float) -> list[CoordinatorOutput]:
        """Report the progress between two ticks, and request reports from the servers: a run may be short."""
        state = self.state
        if state.phase is not Phase.RUNNING:
            return []
        self.reporting.report_progress(now)
        return [CoordinatorOutput(s.peer, ReportRequest()) for s in state.servers.values() if s.peer.role == "server"]

    def checkpoint_committed(
        self, collected: Collected, name: str, now: float, error: str = ""
    ) -> list[CoordinatorOutput]:
        """Note that a checkpoint is there, under this name, or why it is not."""
        self.checkpoints.committed(collected, name, now, error)
        return self.shutdown.when_concluded() + self.admission.form(now) + self.checkpoints.tick(now)

    def _before_stop(self) -> list[tuple[Peer, Message]]:
        """Begin the last checkpoint of a full-batch run that is stopped."""
        return [(out.to, out.message) for out in self.checkpoints.before_the_end()]

    def due_at(self) -> float | None:
        """Return when to call `look`, because a worker may be overdue then; None: never."""
        return None if self.full_batch is None else self.full_batch.due_at()

    def look(self, now: float) -> list[CoordinatorOutput]:
        """Hand out copies of overdue work items."""
        return [] if self.full_batch is None else self.full_batch.look(now)

    @property
    def journal(self) -> Journal | None:
        """The journal with which another coordinator can continue the run; None: it cannot be continued."""
        full_batch = self.state.full_batch
        if full_batch is None or not full_batch.journal.has_started or self.state.phase is not Phase.RUNNING:
            return None
        return full_batch.journal

    def resume(self, now: float) -> list[CoordinatorOutput]:
        """Continue from the journal of the previous coordinator; workers join again."""
        assert self.full_batch is not None, "only full-batch strategies keep a journal"
        return self.full_batch.resume(now)

    def waits_for(self) -> str:
        """Describe what it waits for, for reports of deadlocks."""
        state = self.state
        match state.phase:
            case Phase.FORMING:
                servers = f"{len(state.servers)} of {state.settings.num_servers} servers"
                return f"forming: {servers} and {len(state.workers)} workers have joined"
            case Phase.LOADING:
                return f"waits for {', '.join(str(s.peer) for s in state.servers.values() if not s.ready)} to be loaded"
            case Phase.FINISHING:
                late = [str(w.peer) for w in state.connected() if w.active and not w.ended]
                return f"waits for {', '.join(late)} to end"
            case Phase.CONCLUDING:
                return f"waits for worker {self.shutdown.concluder} to save the model"
        if state.full_batch is not None and state.phase is Phase.RUNNING:
            return state.full_batch.waits_for()
        batches = f"{state.batches_done()} of {state.plan.num_batches if state.plan else 0}"
        return f"{state.phase}, {batches} batches done; {self.leases.describe()}"
