"""Decides which nodes are active: by heartbeats and acknowledged pushes. An inactive worker may return."""

from __future__ import annotations

from collections.abc import Sequence

from rainband.coordinator.full_batch import FullBatchDuty
from rainband.coordinator.leases import Leases
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import BEFORE_THE_END, CoordinatorOutput, FailureCause, Phase, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Failed, Forget, Halt, Heartbeat, Peer, ReportRequest, Shutdown

FATAL_DEATHS = 3  # when this many workers die on the same batches, the run ends
# Silence of a server, in failure timeouts.
PROBED_AFTER, REPORTED_AFTER, ENDED_AFTER = 0.4, 1.0, 10.0
# Ending a run without a server loses the model; a paused process may continue. torch.distributed waits as long.
SHORTEST_END_S = 600.0

NAMED_AFTER_S = 5.0  # a worker for which the others that share its batches wait is named

PAUSED = "paused, by its own request"
LEFT = "it left, by its own request"
NO_WORKER_LEFT = "no worker is left, and the run waits for one that joins from another machine; Ctrl-C ends it"


def server_patience_s(failure_timeout_s: float) -> float:
    """Return how long a server may be silent before the run ends."""
    return max(ENDED_AFTER * failure_timeout_s, SHORTEST_END_S)


class Liveness:
    """Watches the nodes of a run, and revokes the leases of workers that are lost or inactive."""

    def __init__(
        self,
        state: RunState,
        shutdown: RunEnd,
        leases: Leases,
        full_batch: FullBatchDuty | None,
        in_rounds: bool = False,
    ) -> None:
        """`in_rounds`: workers meet in rounds, without leases, and each waits for all others."""
        self.state = state
        self.in_rounds = in_rounds
        self.shutdown = shutdown
        self.leases = leases
        self.full_batch = full_batch
        self.checked_at = 0.0  # the servers
        self.deaths: dict[int, int] = {}  # portion -> workers that died while they processed it

    def heartbeat(self, worker: WorkerState, heartbeat: Heartbeat, now: float) -> list[CoordinatorOutput]:
        state = self.state
        if heartbeat.steps and not any(w.heartbeat.steps for w in state.workers.values()):
            state.events.append(events.FirstStep(at_s=now, worker=worker.peer.index))
        works = heartbeat.acked > worker.heartbeat.acked
        if state.settings.workers_per_replica > 1:  # a stage without parameters pushes nothing
            works = works or heartbeat.steps > worker.heartbeat.steps
        has_work = self._has_work(worker)
        if works or heartbeat.waiting or not has_work:
            if has_work and not worker.heartbeat.waiting:
                worker.slowest_s = max(worker.slowest_s * 0.98, now - worker.worked_at)
                worker.first_s = worker.first_s or worker.slowest_s
            worker.worked_at = now
        worker.heartbeat, worker.heartbeat_at = heartbeat, now
        if worker.held != (heartbeat.held_by, heartbeat.steps):
            worker.held, worker.held_since = (heartbeat.held_by, heartbeat.steps), now
        worker.heartbeats = [*worker.heartbeats[-5:], (now, heartbeat)]
        if not worker.active and (works or heartbeat.waiting):
            self.mark_active(worker, now)
            return self.leases.give(now)
        return []

    def mark_active(self, worker: WorkerState, now: float) -> None:
        """Note a sign of progress; an inactive replica returns as a whole, when none of its workers is late."""
        worker.heartbeat_at = worker.worked_at = now
        worker.paused = worker.late = False
        if worker.active:
            return
        replica = self.state.replica_of(worker.peer.index)
        if not self.state.is_complete(worker.peer.index) or any(other.late for other in replica):
            return
        for other in replica:
            if other.connected and not other.active:
                other.active, other.worked_at, self.state.live = True, now, None
                self.state.events.append(events.Returned(at_s=now, node=str(other.peer)))

    def pause(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        """Reassign the batches of a worker that pauses; the run does not end without it."""
        worker.paused = True
        return self.deactivate(worker, now, PAUSED, "paused")

    def dismiss(self, ranks: Sequence[int], now: float) -> list[CoordinatorOutput]:
        """Let workers finish their work items, and leave; the others get their remaining batches."""
        outs: list[CoordinatorOutput] = []
        for worker in [self.state.workers[rank] for rank in ranks if rank in self.state.workers]:
            if not worker.connected or worker.leaving:
                continue
            worker.leaving = True
            if self.state.phase in (Phase.FORMING, Phase.LOADING):  # it has no work item
                outs += self.leaves(worker, now)
            elif self.state.phase is Phase.RUNNING:
                outs.append(CoordinatorOutput(worker.peer, Halt(LEFT, leave=True)))
        return outs

    def leaves(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        """Dismiss a worker that has finished its work item to leave. It has returned its leases."""
        return [CoordinatorOutput(worker.peer, Shutdown(LEFT)), *self.lost(worker.peer, now, LEFT, "left")]

    def ends(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        """Tell the servers not to wait for a worker that has ended: custom loops may end at different times."""
        self.mark_active(worker, now)
        self.leases.counts.forget()  # its leases end, too
        servers = self.state.servers.values() if self.state.phase is Phase.RUNNING else ()
        work_items = [] if self.full_batch is None else self.full_batch.forget(worker, now, ended=True)
        return [CoordinatorOutput(s.peer, Forget(worker.peer.index)) for s in servers] + work_items

    def deactivate_late_workers(self, now: float) -> list[CoordinatorOutput]:
        state, ending = self.state, self.shutdown
        outs: list[CoordinatorOutput] = []
        for index, worker in state.workers.items():
            if state.phase in (Phase.FORMING, Phase.LOADING, Phase.OVER):
                break
            waited_for = not worker.ended or ending.is_saving(index) or index in ending.last_pulls
            if worker.connected and worker.active and waited_for:
                late, absence = self._why_late(worker, now)
                if late:
                    ending.not_waited_for(index)
                    worker.late = True
                    outs += self.deactivate(worker, now, late, absence)
                    because = f"inactive: {worker.peer} of the same replica is {absence}"
                    for other in state.replica_peers(index):
                        if other.connected and other.active:
                            outs += self.deactivate(other, now, because, "inactive")
                    outs += ending.after_loss()
        return outs

    def _why_late(self, worker: WorkerState, now: float) -> tuple[str, events.Absence]:
        """Return why a worker counts as lost or inactive; "" if it does not."""
        if now - worker.heartbeat_at > self.state.settings.failure_timeout_s:
            return f"no heartbeat for {now - worker.heartbeat_at:.1f} s", "lost"
        shares = self.state.shares_batches()
        why = self._why_stuck(worker, now) if self.in_rounds or shares else ""
        return why or ("" if shares else self._why_idle(worker, now)), "inactive"

    def _why_idle(self, worker: WorkerState, now: float) -> str:
        """Return why a worker counts as inactive; "": it does not. The deadline follows from the pushes so far."""
        timeout = self.state.settings.failure_timeout_s
        idle_s = now - worker.worked_at
        if idle_s <= 2 * timeout or not self._holds_others_back(worker):
            return ""
        everyone = self.state.workers.values()
        # The first push takes longest: things are loaded and compiled. Before it, the others' first pushes count.
        usual = max(w.slowest_s if worker.slowest_s else w.first_s for w in everyone)
        if usual and idle_s > 2 * timeout + 10 * usual:
            return f"inactive: heartbeats, but no push for {idle_s:.1f} s"
        return ""

    def _why_stuck(self, worker: WorkerState, now: float) -> str:
        """Return why a worker for which others wait in a round counts as inactive; "": it does not. First, warn."""
        index = worker.peer.index
        held = [w.held_since for w in self.state.connected() if w.active and not w.ended and w.held[0] == index]
        waited_s = now - min(held, default=now)
        if waited_s > self.state.settings.stuck_timeout_s:
            return f"inactive: heartbeats, but the others have waited {waited_s:.0f} s for it"
        if waited_s < NAMED_AFTER_S:
            worker.reported_stuck = False
        elif not worker.reported_stuck and self.state.is_custom_loop():
            worker.reported_stuck = True
            text = (
                f"the other workers have waited {waited_s:.0f} s for {worker.peer}. If it evaluates or saves while the "
                "others do not, write `with run.paused():` around that, so that no worker waits."
            )
            self.state.events.append(events.Warned(at_s=now, text=text))
        return ""

    def _has_work(self, worker: WorkerState) -> bool:
        """Return whether it has work that others may wait for.

        It or its replica has leases, or it is a custom loop with its own data loader that has made its first step. With
        a staleness bound, others also wait for a worker that has read the parameters and has not begun its first batch.
        """
        if self.state.leases_of(worker) or self._is_to_end(worker):
            return True
        if self.full_batch is not None and self.full_batch.has_items(worker):
            return True
        state = self.state
        if state.phase is not Phase.RUNNING or worker.ended:
            return False
        if not worker.heartbeat.acked:
            return state.is_bounded()
        return state.is_custom_loop() and not state.has_data()

    def _is_to_end(self, worker: WorkerState) -> bool:
        """Return whether the run only waits for its strategy to return. Custom loops may go on to other things."""
        return self.state.phase is Phase.FINISHING and not worker.ended and not self.state.is_custom_loop()

    def _holds_others_back(self, worker: WorkerState) -> bool:
        """Return whether it has leases, or other workers wait while it has other work."""
        if self.state.leases_of(worker) or self._is_to_end(worker):
            return True
        others = [
            w for w in self.state.workers.values() if w is not worker and w.connected and w.active and not w.ended
        ]
        return self._has_work(worker) and any(other.heartbeat.waiting for other in others)

    def deactivate(
        self, worker: WorkerState, now: float, why: str, absence: events.Absence = "lost"
    ) -> list[CoordinatorOutput]:
        """Do not wait for a worker: revoke its leases, and reassign the batches that are missing of them."""
        state = self.state
        worker.active, state.live = False, None
        state.report_loss(worker.peer, now, why, absence)
        outs = [CoordinatorOutput(s.peer, Forget(worker.peer.index)) for s in state.servers.values()]
        begun = self._begun_portions(worker)
        for portion in sorted(worker.leases):
            if not worker.connected and portion in begun:
                self.deaths[portion] = self.deaths.get(portion, 0) + 1
                if self.deaths[portion] >= FATAL_DEATHS:
                    fatal = f"{FATAL_DEATHS} workers died on the same batches (portion {portion})"
                    return outs + self.shutdown.stop("failed", fatal, FailureCause.WORKERS_DIED)
            if state.phase is Phase.RUNNING:
                outs += self.leases.revoke(portion, worker.peer.index)
        worker.leases.clear()
        self.leases.counts.forget()
        return outs + ([] if self.full_batch is None else self.full_batch.forget(worker, now))

    def _begun_portions(self, worker: WorkerState) -> set[int]:
        """Return the portions a worker may have begun: the first it received, or all of its first group of rounds."""
        plan = self.state.plan
        if not plan or not plan.items_per_round:
            return set([portion for portion in worker.leases if not self.state.is_done(portion)][:1])
        group = min(worker.leases, default=0) // plan.items_per_round
        return {portion for portion in worker.leases if portion // plan.items_per_round == group}

    # ---- servers: each has the only copy of its blocks ---------------------------------------------------------------

    def server_active(self, server: Peer, now: float) -> None:
        known = self.state.servers.get(server.index)
        if known is None or known.peer != server:
            return
        if known.reported_silent:
            self.state.events.append(events.Returned(at_s=now, node=str(server)))
        known.silent_s, known.reported_silent = 0.0, False

    def check_servers(self, now: float) -> list[CoordinatorOutput]:
        """Probe silent servers, report them as lost, and end the run when one stays silent."""
        state, outs, timeout_s = self.state, list[CoordinatorOutput](), self.state.settings.failure_timeout_s
        # A clock that jumps, as after a suspend, adds no more than the longest time between two checks.
        passed_s = max(0.0, min(now - self.checked_at, timeout_s / 5))
        self.checked_at = now
        if state.phase in (Phase.FORMING, Phase.LOADING, Phase.OVER):
            return []
        for server in [s for s in state.servers.values() if s.peer.role == "server"]:
            server.silent_s += passed_s
            if server.silent_s > server_patience_s(timeout_s):
                return outs + self._server_lost(server.peer, now, f"no message for {server.silent_s:.0f} s")
            if server.silent_s > REPORTED_AFTER * timeout_s and not server.reported_silent:
                server.reported_silent = True
                why = f"no message for {server.silent_s:.1f} s; all workers wait for it"
                state.events.append(events.Lost(at_s=now, node=str(server.peer), why=why))
            if server.silent_s > PROBED_AFTER * timeout_s:
                outs.append(CoordinatorOutput(server.peer, ReportRequest()))
        return outs

    def lost(self, peer: Peer, now: float, why: str, absence: events.Absence = "lost") -> list[CoordinatorOutput]:
        """React to a closed connection, or to the end of a process."""
        if self.state.phase is Phase.OVER:
            return []
        if peer.role == "server":
            return self._server_lost(peer, now, why)
        worker = self.state.workers.get(peer.index)
        if worker is None or worker.peer != peer or not worker.connected:
            return []
        outs = self._lose_worker(worker, now, why, absence) + self._dismiss_stage_peers(peer, now, why)
        is_joinable = self.state.settings.joinable and self.state.awaits_workers()
        if self.state.phase is Phase.RUNNING and is_joinable and not self.state.connected():
            self.state.events.append(events.Warned(at_s=now, text=NO_WORKER_LEFT, no_worker_left=True))
        return outs + self.shutdown.after_loss()

    def _lose_worker(
        self, worker: WorkerState, now: float, why: str, absence: events.Absence = "lost"
    ) -> list[CoordinatorOutput]:
        worker.connected = False
        if worker.ended and worker.peer.index == self.shutdown.concluder:
            self.state.report_loss(worker.peer, now, why, absence)  # another one must save the model
        outs = [] if worker.ended else self.deactivate(worker, now, why, absence)
        if not worker.ended and worker.heartbeat.unsent_norm:
            self.shutdown.reporting.lost_residuals.append(worker.heartbeat.unsent_norm)
        worker.ended, self.state.live = True, None
        self.shutdown.not_waited_for(worker.peer.index)
        return outs

    def _dismiss_stage_peers(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Send the rest of a lost worker's replica away: they cannot go on; other replicas get their batches."""
        because = f"{peer} of the same replica was lost: {why}"
        outs: list[CoordinatorOutput] = []
        for other in self.state.replica_peers(peer.index):
            if other.connected:
                outs += [
                    *self._lose_worker(other, now, because),
                    CoordinatorOutput(other.peer, Shutdown(f"{because}.")),
                ]
        return outs

    def never_joins(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Note that a worker's process has ended before it joined, and will not be restarted."""
        state, known = self.state, self.state.workers.get(peer.index)
        if state.phase is Phase.OVER or (known is not None and known.peer.incarnation >= peer.incarnation):
            return []
        if peer.index in state.missing:
            return []
        state.missing.add(peer.index)
        state.report_loss(peer, now, f"before it joined: {why}")
        return self._dismiss_stage_peers(peer, now, why) + self.shutdown.after_loss()

    def failed(self, sender: Peer, failed: Failed, now: float) -> list[CoordinatorOutput]:
        """End the run because the user's code raised on a worker; the first traceback becomes an event.

        The other workers end as after Ctrl-C, and one of them saves the model so far.
        """
        state = self.state
        if state.phase is Phase.OVER:
            return []
        if sender.role == "server":
            state.fail(f"{sender}: {failed.error}")
            return self.shutdown.over()
        if not failed.traceback:  # not the user's code, but a broken connection, for example: the others go on
            return self.lost(sender, now, failed.error)
        if state.outcome == "failed":
            return self._dismiss_failed(sender, now, failed.step > 0)
        if _concerns_one_machine(state, sender, failed):
            why = f"its code failed {'at its first step' if failed.step else 'before it could start'}: {failed.error}"
            outs = [*self.lost(sender, now, why), *self.never_joins(sender, now, why)]
            return [CoordinatorOutput(sender, Shutdown(f"{why}. The run goes on without it.")), *outs]
        state.events.append(
            events.UserError(
                at_s=now, worker=sender.index, step=failed.step, error=failed.error, traceback=failed.traceback
            )
        )
        where = f"{sender} failed at step {failed.step}" if failed.step else f"{sender} could not start"
        if state.phase is Phase.CONCLUDING and sender.index == self.shutdown.concluder:
            self.shutdown.saved = True  # evaluating comes after saving, whose errors have no traceback
        outs = self.shutdown.stop("failed", f"{where}: {failed.error}")
        return outs + self._dismiss_failed(sender, now, failed.step > 0)

    def _dismiss_failed(self, sender: Peer, now: float, was_training: bool) -> list[CoordinatorOutput]:
        """Send a worker away whose code has raised; the last one that has the parameters saves them first."""
        worker = self.state.workers.get(sender.index)
        if self.state.phase is Phase.OVER or worker is None or worker.peer != sender or not worker.connected:
            return []
        if was_training and (saves := self.shutdown.let_last_save(worker)):
            return saves
        outs = [CoordinatorOutput(sender, Shutdown(self.state.reason))]
        return outs + self.lost(sender, now, "its code raised an exception")

    def _server_lost(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        state = self.state
        if peer.index not in state.servers or state.servers[peer.index].peer != peer:
            return []
        state.lost_after = state.batches_done()
        server = state.servers.pop(peer.index)
        state.events.append(events.Lost(at_s=now, node=str(peer), why=why))
        held = f"{len(server.report.blocks)} blocks" if server.report else "its blocks"
        one = "last" if state.settings.copies > 1 else "only"
        meaning = (
            f"It held the {one} copy of {held}, with {state.batches_done()} batches applied: these parameters are "
            "lost, and no model was saved."
            if peer.index < state.settings.num_owners
            else "It was an inner server of the tree: its workers have no other way to the root; no model was saved."
        )
        state.fail(f"{peer} was lost ({why}). {meaning}", FailureCause.SERVER_LOST)
        return self.shutdown.over()


def _concerns_one_machine(state: RunState, sender: Peer, failed: Failed) -> bool:
    """Return True for an error before the first update of a worker of another machine, where a file may be missing.

    The other machines go on. An error of a worker that has trained may be one of all.
    """
    known = state.workers.get(sender.index)
    has_trained = failed.step > 1 and known is not None and known.peer == sender
    is_of_other = sender.index not in state.settings.local_ranks
    return is_of_other and not has_trained and state.phase in BEFORE_THE_END
