"""Who is here: heartbeats say alive, acknowledged pushes say working. Who is not is given up, and may come back."""

from __future__ import annotations

from rainband.coordinator.full_batch_duty import FullBatchDuty
from rainband.coordinator.leases import Leases
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Failed, Forget, Heartbeat, Peer, ReportRequest, Shutdown

FATAL_DEATHS = 3  # a portion that cost so many workers their lives ends the run
# Of servers that fall silent, in ticks, each a fifth of the failure timeout. A clock that jumps makes no tick.
ASKED_AFTER, TOLD_AFTER, ENDED_AFTER = 2, 5, 50


class Liveness:
    """Watches over the nodes of a run."""

    def __init__(self, state: RunState, ending: RunEnd, leases: Leases, leading: FullBatchDuty | None) -> None:
        self.state = state
        self.ending = ending
        self.leases = leases
        self.leading = leading
        self.deaths: dict[int, int] = {}  # portion -> workers that ended while they had it

    # ---- signs of life ---------------------------------------------------------------------------------------------

    def heartbeat(self, worker: WorkerState, heartbeat: Heartbeat, now: float) -> list[CoordinatorOutput]:
        state = self.state
        if heartbeat.steps and not any(w.heartbeat.steps for w in state.workers.values()):
            state.events.append(events.FirstStep(at_s=now, worker=worker.peer.index))
        works = heartbeat.acked > worker.heartbeat.acked
        at_work = self._has_work(worker)
        if works or heartbeat.waiting or not at_work:
            if at_work and not worker.heartbeat.waiting:
                worker.slowest_s = max(worker.slowest_s * 0.98, now - worker.worked_at)
                worker.first_s = worker.first_s or worker.slowest_s
            worker.worked_at = now
        worker.heartbeat, worker.heartbeat_at = heartbeat, now
        worker.heartbeats = [*worker.heartbeats[-5:], (now, heartbeat)]
        if not worker.here and (works or heartbeat.waiting):
            self.is_here(worker, now)
            return self.leases.give(now)
        return []

    def is_here(self, worker: WorkerState, now: float) -> None:
        worker.heartbeat_at = worker.worked_at = now
        worker.excused = False
        if not worker.here:
            worker.here, self.state.live = True, None
            self.state.events.append(events.Returned(at_s=now, node=str(worker.peer)))

    def away(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        """By its own word: the run does not end without it."""
        worker.excused = True
        return self.give_up(worker, now, "away, by its own word")

    def ends(self, worker: WorkerState, now: float) -> list[CoordinatorOutput]:
        """A worker that has come to its end is not waited for: of own loops one may end before the others."""
        self.is_here(worker, now)
        servers = self.state.servers.values() if self.state.phase == "running" else ()
        work_items = [] if self.leading is None else self.leading.forget(worker, now, ended=True)
        return [CoordinatorOutput(s.peer, Forget(worker.peer.index)) for s in servers] + work_items

    # ---- giving up -------------------------------------------------------------------------------------------------

    def give_up_the_late(self, now: float) -> list[CoordinatorOutput]:
        state, ending = self.state, self.ending
        outs: list[CoordinatorOutput] = []
        for index, worker in state.workers.items():
            if state.phase in ("forming", "loading", "over"):
                break
            waited_for = not worker.ended or index == ending.concluder or index in ending.last_pulls
            if worker.connected and worker.here and waited_for:
                late = self._why_late(worker, now)
                if late:
                    ending.not_waited_for(index)
                    outs += self.give_up(worker, now, late)
                    for peer_state in state.replica_peers(index):
                        if peer_state.connected and peer_state.here:
                            outs += self.give_up(
                                peer_state, now, f"{worker.peer}, with which it computes one model, is not"
                            )
                    outs += ending.after_loss()
        return outs

    def _why_late(self, worker: WorkerState, now: float) -> str:
        """A heartbeat says alive, acknowledged pushes say working; deadlines are learnt from what was seen."""
        timeout = self.state.settings.failure_timeout_s
        if now - worker.heartbeat_at > timeout:
            return f"not heard of for {now - worker.heartbeat_at:.1f} s"
        idle_s = now - worker.worked_at
        if idle_s <= 2 * timeout or not self._is_missed(worker):
            return ""
        everyone = self.state.workers.values()
        # The first push takes longest: things are loaded and compiled. Until there is one, others' first ones count.
        usual = max(w.slowest_s if worker.slowest_s else w.first_s for w in everyone)
        if usual and idle_s > 2 * timeout + 10 * usual:
            return f"away: alive, but no push for {idle_s:.1f} s"
        return ""

    def _has_work(self, worker: WorkerState) -> bool:
        """It has leases, or a loop of the user's own goes over a loader of its own, and has begun to."""
        state = self.state
        own_loader = state.is_custom_loop() and not state.has_data() and state.phase == "running"
        return bool(worker.leases) or (own_loader and worker.heartbeat.acked > 0 and not worker.ended)

    def _is_missed(self, worker: WorkerState) -> bool:
        """Is there work that it alone can do? Of loaders of their own nobody knows; but others may wait for it."""
        if worker.leases:
            return True
        others = [w for w in self.state.workers.values() if w is not worker and w.connected and w.here and not w.ended]
        return self._has_work(worker) and any(other.heartbeat.waiting for other in others)

    def give_up(self, worker: WorkerState, now: float, why: str) -> list[CoordinatorOutput]:
        """Do not wait for a worker; what it had leased is fenced, and what is missing of it leased again."""
        state = self.state
        worker.here, state.live = False, None
        state.note_loss(worker.peer, now, why)
        outs = [CoordinatorOutput(s.peer, Forget(worker.peer.index)) for s in state.servers.values()]
        at_work = self._at_work(worker)
        for portion in sorted(worker.leases):
            if not worker.connected and portion in at_work:
                self.deaths[portion] = self.deaths.get(portion, 0) + 1
                if self.deaths[portion] >= FATAL_DEATHS:
                    return outs + self.ending.stop("failed", f"portion {portion} ended {FATAL_DEATHS} workers")
            if state.phase == "running":
                outs += self.leases.gather(portion, worker.peer.index)
        worker.leases.clear()
        return outs + ([] if self.leading is None else self.leading.forget(worker, now))

    def _at_work(self, worker: WorkerState) -> set[int]:
        """The portions a worker may have begun: the one it got first, or its columns of the first group of rounds."""
        plan = self.state.plan
        if not plan or not plan.items_per_round:
            return set([portion for portion in worker.leases if not self.state.is_done(portion)][:1])
        group = min(worker.leases, default=0) // plan.items_per_round
        return {portion for portion in worker.leases if portion // plan.items_per_round == group}

    # ---- servers, which nobody can replace ---------------------------------------------------------------------------

    def hears_of(self, server: Peer, now: float) -> None:
        known = self.state.servers.get(server.index)
        if known is None or known.peer != server or not known.silent_ticks:
            return
        if known.silent_ticks > TOLD_AFTER:
            self.state.events.append(events.Returned(at_s=now, node=str(server)))
        known.silent_ticks = 0

    def look_after_servers(self, now: float) -> list[CoordinatorOutput]:
        """One that is stopped, or whose machine is gone, holds everyone up: that is said, and after a while the end."""
        state, outs = self.state, list[CoordinatorOutput]()
        if state.phase in ("forming", "loading", "over"):
            return []
        for server in [s for s in state.servers.values() if s.peer.role == "server"]:
            server.silent_ticks += 1
            silent_s = server.silent_ticks * state.settings.failure_timeout_s / 5
            if server.silent_ticks > ENDED_AFTER:
                return outs + self._server_lost(server.peer, now, f"not heard of for {silent_s:.0f} s")
            if server.silent_ticks == TOLD_AFTER + 1:
                why = f"not heard of for {silent_s:.1f} s; all wait for it"
                state.events.append(events.Lost(at_s=now, node=str(server.peer), why=why))
            if server.silent_ticks > ASKED_AFTER:
                outs.append(CoordinatorOutput(server.peer, ReportRequest()))
        return outs

    # ---- who is gone for good --------------------------------------------------------------------------------------

    def lost(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """A node's connection is gone, or its process has ended."""
        if self.state.phase == "over":
            return []
        if peer.role == "server":
            return self._server_lost(peer, now, why)
        worker = self.state.workers.get(peer.index)
        if worker is None or worker.peer != peer or not worker.connected:
            return []
        outs = self._gone(worker, now, why) + self._dismiss_stage_peers(peer, now, why)
        return outs + self.ending.after_loss()

    def _gone(self, worker: WorkerState, now: float, why: str) -> list[CoordinatorOutput]:
        worker.connected = False
        outs = [] if worker.ended else self.give_up(worker, now, why)
        worker.ended, self.state.live = True, None
        self.ending.not_waited_for(worker.peer.index)
        return outs

    def _dismiss_stage_peers(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Those who computed one model with a worker that is gone cannot go on; what they had is for other teams."""
        because = f"{peer}, with which it computed one model, was lost: {why}"
        outs: list[CoordinatorOutput] = []
        for peer_state in self.state.replica_peers(peer.index):
            if peer_state.connected:
                outs += [
                    *self._gone(peer_state, now, because),
                    CoordinatorOutput(peer_state.peer, Shutdown(f"{because}.")),
                ]
        return outs

    def never_comes(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """A worker's process has ended before it joined, and nobody starts it again."""
        state = self.state
        if state.phase == "over" or peer.index in state.workers or peer.index in state.missing:
            return []
        state.missing.add(peer.index)
        state.note_loss(peer, now, f"before it joined: {why}")
        return self._dismiss_stage_peers(peer, now, why) + self.ending.after_loss()

    def failed(self, sender: Peer, failed: Failed, now: float) -> list[CoordinatorOutput]:
        """The user's code raised on a worker: the first time it is shown, and the run ends."""
        state = self.state
        if state.outcome == "failed" or state.phase == "over":
            return []
        if not failed.traceback:  # not the user's code: its way to a server is broken, say; the others go on
            return self.lost(sender, now, failed.error)
        state.events.append(
            events.UserError(
                at_s=now,
                worker=sender.index,
                step=failed.step,
                error=failed.error,
                traceback=failed.traceback,
            )
        )
        where = f"{sender} failed at step {failed.step}" if failed.step else f"{sender} could not start"
        state.outcome, state.reason = "failed", f"{where}: {failed.error}"
        return self.ending.over()  # at whatever point: others may be waiting for it

    def _server_lost(self, peer: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        state = self.state
        server = state.servers.pop(peer.index, None)
        if server is None:
            return []
        state.events.append(events.Lost(at_s=now, node=str(peer), why=why))
        held = f"{len(server.report.blocks)} blocks" if server.report else "its blocks"
        state.outcome = "failed"
        state.reason = (
            f"{peer} was lost ({why}). It held the only copy of {held}, with {state.batches_done()} batches applied: "
            "these parameters are gone, and no model was saved."
        )
        return self.ending.over()
