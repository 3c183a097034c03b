"""Ends a run: flush what update rules have buffered, let the workers finish, save the model, shut all nodes down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rainband.coordinator.buffers import BufferMean
from rainband.coordinator.reporting import Reporting
from rainband.coordinator.saving.checkpoints import Checkpoints
from rainband.coordinator.saving.rescue import HAS_PARAMETERS, Rescue
from rainband.coordinator.state import CoordinatorOutput, FailureCause, Phase, RunState, ServerState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import (
    Conclude,
    Concluded,
    Ended,
    Finish,
    Flush,
    Halt,
    Params,
    Peer,
    ReportRequest,
    Shutdown,
)


class RunEnd:
    """The end of a run, from the last batch or a request to stop."""

    def __init__(self, state: RunState, reporting: Reporting, checkpoints: Checkpoints) -> None:
        self.state = state
        self.reporting = reporting
        self.checkpoints = checkpoints
        self.buffers: dict[int, BufferMean] = {}  # by the rank in a replica
        self.metrics: dict[str, float] = {}
        self.concluder: int | None = None  # the worker that saves the model
        self.saved = False  # it has saved the model
        self.last_reports: set[int] = set()  # servers whose last report, with every push in it, has not arrived
        self.last_pulls: set[int] = set()  # workers of custom loops that do not have the final parameters yet
        self.left: set[int] = set()  # workers of custom loops that have them: they save nothing any more
        self.rescue = Rescue(state)

    def stop(self, outcome: str, reason: str, cause: FailureCause = FailureCause.OTHER) -> list[CoordinatorOutput]:
        """End early: workers finish their work item and return their leases, and the model so far is saved."""
        state = self.state
        is_ending = state.phase in (Phase.FINISHING, Phase.CONCLUDING)
        if state.phase is Phase.OVER or (is_ending and outcome != "failed"):
            return []
        if state.outcome != "failed":  # the first failure is the reason of others
            state.outcome, state.reason, state.cause = outcome, reason, cause if outcome == "failed" else None
        if state.phase in (Phase.FORMING, Phase.LOADING):
            return self.over()  # there is no model to save
        if is_ending:
            return self.after_loss()
        state.enter(Phase.FINISHING)
        halts = [CoordinatorOutput(w.peer, Halt(reason)) for w in state.connected()]
        coordinated = [] if state.full_batch is None else [CoordinatorOutput(*to) for to in state.full_batch.stop()]
        return halts + coordinated + self.after_loss()

    def abort(self, reason: str) -> list[CoordinatorOutput]:
        """Fail at once: the nodes cannot be controlled any more."""
        if self.state.phase is Phase.OVER:
            return []
        self.state.fail(reason)
        return self.over()

    def when_done(self) -> list[CoordinatorOutput]:
        """Flush if every batch is accepted on every block."""
        state = self.state
        assert state.plan
        if state.phase is not Phase.RUNNING or not state.has_data() or state.full_batch is not None:
            return []
        return self.flush() if state.batches_done() >= state.plan.num_batches else []

    def ended(self, worker: WorkerState, message: Ended, body: Any, now: float) -> list[CoordinatorOutput]:
        """Note that a worker's strategy has returned."""
        state = self.state
        rank = state.rank_in_replica(worker.peer.index)
        if state.live is not None and worker.active and not worker.ended and not rank:
            state.live -= 1
        worker.ended = True
        worker.leases.clear()
        if worker.heartbeat.unsent_norm:  # a custom loop that shares batches does not know which one is its last
            self.reporting.lost_residuals.append(worker.heartbeat.unsent_norm)
        if state.phase is Phase.CONCLUDING and state.is_custom_loop():
            # It was declared lost before, and has ended after all.
            self.last_pulls.add(worker.peer.index)
            return [CoordinatorOutput(worker.peer, Conclude(""), self._buffers_of(worker))]
        if not_numbers := self.buffers.setdefault(rank, BufferMean()).add(body, message.samples):
            of_all = f"{not_numbers} of {len(body) // 8} numbers in the buffers of {worker.peer} are NaN"
            what = "the saved model has the mean of the other workers, if there are any. Look for NaN in the data."
            state.events.append(events.Warned(at_s=now, text=f"{of_all}: {what}"))
        if state.phase is Phase.RUNNING and state.all_have_ended():
            return self.flush()  # custom loops may end early, and so may a strategy
        return self.when_all_ended()

    def after_loss(self) -> list[CoordinatorOutput]:
        """React to a lost node: choose another worker to load or save, or end the run if none is left."""
        state = self.state
        left = self._in_whole_replicas()
        if state.phase is Phase.LOADING:
            founder = min((w.peer.index for w in left), default=None)
            if founder is not None and state.welcome is not None:
                again = msgspec.structs.replace(
                    state.welcome,
                    load=True,
                    replica_addresses=state.addresses(founder),
                    via=state.settings.via(founder),
                )
                return [CoordinatorOutput(other.peer, again) for other in state.replica_of(founder)]
        if not left and state.awaits_workers():
            return []
        if not left and len(state.missing | state.workers.keys()) >= state.settings.num_workers and not self.saved:
            state.fail_if_finished(f"no worker is left: {state.last_loss}", FailureCause.NO_WORKER_LEFT)
            return self._save_without_workers()
        if state.phase is Phase.FINISHING:
            return self.when_all_ended()
        if state.phase is Phase.CONCLUDING and self.concluder is None and not self.saved:
            return self._conclude()
        return self._when_all_left() + self.when_concluded()

    def let_last_save(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """Let a worker whose code has raised save the model, if no other node has the parameters."""
        state, index = self.state, worker.peer.index
        others = [w for w in self._in_whole_replicas() if w is not worker and w.peer.index not in self.left]
        has_tried = self.saved or index in self.left or index == self.concluder
        if others or has_tried or self.rescue.is_possible or state.phase not in HAS_PARAMETERS:
            return []
        if state.settings.workers_per_replica > 1:
            return []  # it has a part of the model only
        worker.ended, self.concluder, state.live = True, index, None
        worker.leases.clear()
        state.enter(Phase.CONCLUDING)
        return [CoordinatorOutput(worker.peer, Conclude(state.settings.model_path))]

    def _in_whole_replicas(self) -> list[WorkerState]:
        """Return the connected workers that can go on: a stage that was started again alone waits for the others."""
        return [w for w in self.state.connected() if self.state.is_complete(w.peer.index)]

    def is_saving(self, worker: int) -> bool:
        """Return whether its replica saves the model: each worker of it has a part."""
        return self.concluder is not None and worker in self.state.replica_indices(self.concluder)

    def not_waited_for(self, worker: int) -> None:
        """Do not wait for a worker to save the model or to receive the final parameters."""
        self.concluder = None if self.is_saving(worker) else self.concluder
        self.last_pulls.discard(worker)

    def _when_all_left(self) -> list[CoordinatorOutput]:
        """Flush if all custom loops that are waited for have ended."""
        state = self.state
        if state.phase is not Phase.RUNNING or not state.is_custom_loop():
            return []
        waited_for = [w for w in state.connected() if w.active or w.paused]
        return self.flush() if waited_for and all(w.ended for w in waited_for) else []

    def flush(self) -> list[CoordinatorOutput]:
        """Tell the servers to apply buffered gradients."""
        state = self.state
        state.enter(Phase.FLUSHING)
        if state.settings.num_servers:
            return flushes(state, list(state.servers.values()))
        return self._finish() + self.when_all_ended()

    def flushed(self, server: ServerState) -> list[CoordinatorOutput]:
        """Note that a server has flushed, and go on when all have."""
        server.has_flushed()
        if self.state.phase is Phase.FLUSHING and all(s.flushed for s in self.state.servers.values()):
            return self._finish() + self.after_loss()
        return self.when_all_ended()

    def _finish(self) -> list[CoordinatorOutput]:
        self.state.enter(Phase.FINISHING)
        return [CoordinatorOutput(w.peer, Finish()) for w in self.state.connected()]

    def when_all_ended(self) -> list[CoordinatorOutput]:
        """Save the model once all active workers have ended."""
        state = self.state
        if state.phase is not Phase.FINISHING or not state.all_have_ended():
            return []
        if state.full_batch is not None and not state.full_batch.over:
            return []  # stopped within an iteration: it first restores the parameters at its start
        unflushed = [s for s in state.servers.values() if s.peer.role == "server" and not s.flushed]
        if unflushed:  # the run was stopped: buffered gradients are part of its model
            ended = [w for i, w in sorted(state.workers.items()) if w.active and self._replica_has_ended(i)]
            first = self.checkpoints.before_the_last_flush(ended[0]) if ended else []
            return [*first, *flushes(state, unflushed)]
        return self._conclude()

    def _conclude(self) -> list[CoordinatorOutput]:
        state = self.state
        ended = [w for i, w in state.workers.items() if not state.rank_in_replica(i) and self._replica_has_ended(i)]
        ended = [w for w in ended if w.peer.index not in self.left]
        ready = [w for w in ended if w.active] or ended
        if not ready and any(w.peer.index not in self.left for w in self._in_whole_replicas()):
            state.enter(Phase.FINISHING)  # they are inactive but connected: wait until they end or are lost
            return []
        state.enter(Phase.CONCLUDING)
        if not ready:
            why = f": {state.last_loss}" if state.last_loss else ""
            state.fail_if_finished(f"no worker is left to save the model{why}", FailureCause.NO_WORKER_LEFT)
            return self._save_without_workers()
        local = state.settings.local_ranks  # their disk is the one where the model is to be
        chosen = min(ready, key=lambda w: (w.peer.index not in local, w.peer))
        self.concluder = chosen.peer.index
        self.last_reports = {index for index, s in state.servers.items() if s.peer.role == "server"}
        others = [w for w in ready if w is not chosen] if state.is_custom_loop() else []
        self.last_pulls = {w.peer.index for w in others}
        pulls = [CoordinatorOutput(w.peer, Conclude(""), self._buffers_of(w)) for w in others]
        conclude = Conclude(state.settings.model_path)
        saves = [CoordinatorOutput(w.peer, conclude, self._buffers_of(w)) for w in state.replica_of(chosen.peer.index)]
        return [*self.checkpoints.before_the_end(chosen), *self.request_last_reports(), *saves, *pulls]

    def _save_without_workers(self) -> list[CoordinatorOutput]:
        """Fetch the model from the servers, after they have applied what they buffer; then the run is over."""
        state = self.state
        if not self.rescue.is_possible:
            return self.over()
        if state.phase is Phase.CONCLUDING:
            return [] if self.rescue.begun else self.rescue.begin()
        coordinated = [] if state.full_batch is None else [CoordinatorOutput(*to) for to in state.full_batch.stop()]
        state.enter(Phase.FINISHING)
        return coordinated + self.when_all_ended()

    def rescued(self, params: Params, body: Any) -> list[CoordinatorOutput]:
        """Take a block of the model that no worker can save."""
        outs = self.rescue.receive(params, body)
        return self.over() if self.rescue.over else outs

    def _replica_has_ended(self, worker: int) -> bool:
        return self.state.is_complete(worker) and all(other.ended for other in self.state.replica_of(worker))

    def _buffers_of(self, worker: WorkerState) -> bytes | None:
        mean = self.buffers.get(self.state.rank_in_replica(worker.peer.index))
        return None if mean is None else mean.mean()

    def request_last_reports(self) -> list[CoordinatorOutput]:
        return [
            CoordinatorOutput(self.state.servers[index].peer, ReportRequest()) for index in sorted(self.last_reports)
        ]

    def last_report(self, server: Peer) -> list[CoordinatorOutput]:
        self.last_reports.discard(server.index)
        return self.when_concluded()

    def concluded(self, worker: WorkerState, message: Concluded) -> list[CoordinatorOutput]:
        if worker.peer.index == self.concluder:
            self.metrics, self.saved = message.metrics, True
        if self.state.is_custom_loop():
            self.left.add(worker.peer.index)
        self.last_pulls.discard(worker.peer.index)
        return self.when_concluded()

    def when_concluded(self) -> list[CoordinatorOutput]:
        state = self.state
        complete = self.saved and not self.last_pulls and not self.last_reports and not self.checkpoints.is_awaited
        if state.phase is not Phase.CONCLUDING or not complete:
            return []
        broken = self.reporting.staleness().broken
        if broken:
            state.fail_if_finished(f"the staleness bound was exceeded: {broken}", FailureCause.BOUND_EXCEEDED)
        accounting = self.reporting.accounting()
        if accounting is not None and accounting.broken:
            why = f"the batch accounting does not balance: {accounting.broken}"
            state.fail_if_finished(why, FailureCause.NOT_BALANCED)
        return self.over()

    def over(self) -> list[CoordinatorOutput]:
        """Shut all nodes down."""
        state = self.state
        if state.refused:
            why = f"{len(state.refused)} of {state.settings.num_workers} workers were refused: {state.refused[0]}"
            state.fail_if_finished(why, FailureCause.OTHER)
        state.enter(Phase.OVER)
        servers = [s.peer for s in state.servers.values() if s.peer.role == "server"]
        return [
            CoordinatorOutput(peer, Shutdown(state.reason)) for peer in [w.peer for w in state.connected()] + servers
        ]


def flushes(state: RunState, servers: Sequence[ServerState]) -> list[CoordinatorOutput]:
    """Ask servers to flush, and to refuse what lost workers push from then on: the model would lack it.

    An inactive worker counts as lost when the run has been stopped, because the others do not wait for it.
    """
    is_stopped = state.phase is Phase.FINISHING
    lost = [
        (index, w.peer.incarnation - (w.connected and (w.ended or w.active or w.paused or not is_stopped)))
        for index, w in sorted(state.workers.items())
    ]
    flush = Flush(tuple((index, incarnation) for index, incarnation in lost if incarnation >= 0))
    return [CoordinatorOutput(s.peer, flush) for s in servers if s.begins_to_flush()]
