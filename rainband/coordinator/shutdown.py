"""How a run ends: flush what rules have gathered, let workers finish, save the model, say goodbye."""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.coordinator.reporting import Reporting
from rainband.coordinator.state import CoordinatorOutput, RunState, WorkerState
from rainband.model.buffer_mean import BufferMean
from rainband.protocol.messages import Conclude, Concluded, Ended, Finish, Flush, Halt, Peer, ReportRequest, Shutdown


class RunEnd:
    """From the last batch, or the word to stop, to the last goodbye."""

    def __init__(self, state: RunState, accounts: Reporting) -> None:
        self.state = state
        self.accounts = accounts
        self.buffers: dict[int, BufferMean] = {}  # by the place in a team
        self.metrics: dict[str, float] = {}
        self.concluder: int | None = None  # the worker that saves the model
        self.saved = False  # it has answered
        self.last_reports: set[int] = set()  # servers whose last marks, with every push in, have yet to come
        self.last_pulls: set[int] = set()  # workers of own loops that have yet to take over the final parameters

    # ---- why it ends -----------------------------------------------------------------------------------------------

    def stop(self, outcome: str, reason: str) -> list[CoordinatorOutput]:
        """End early: workers finish the cell at hand and give their leases back."""
        state = self.state
        if state.phase == "over" or (state.phase in ("finishing", "concluding") and outcome != "failed"):
            return []
        state.outcome, state.reason = outcome, reason
        if state.phase in ("forming", "loading") or outcome == "failed":
            return self.over()  # no model comes of it: there is nothing to wait for
        state.phase = "finishing"
        halts = [CoordinatorOutput(w.peer, Halt(reason)) for w in state.connected()]
        coordinated = [] if state.full_batch is None else [CoordinatorOutput(*to) for to in state.full_batch.stop()]
        return halts + coordinated + self.after_loss()

    def when_done(self) -> list[CoordinatorOutput]:
        """The marks have changed: are they full?"""
        state = self.state
        assert state.plan
        if state.phase != "running" or not state.has_data() or state.full_batch is not None:
            return []
        return self.flush() if state.batches_done() >= state.plan.num_batches else []

    def ended(self, worker: WorkerState, message: Ended, body: Any) -> list[CoordinatorOutput]:
        """A worker has come to its end."""
        state = self.state
        rank = state.rank_in_replica(worker.peer.index)
        if state.live is not None and worker.here and not worker.ended and not rank:
            state.live -= 1
        worker.ended = True
        worker.leases.clear()
        if state.phase == "concluding" and state.is_custom_loop():  # given up before, and now it is here all the same
            self.last_pulls.add(worker.peer.index)
            return [CoordinatorOutput(worker.peer, Conclude(""), self._buffers_of(worker))]
        self.buffers.setdefault(rank, BufferMean()).add(body, message.samples)
        if state.phase == "running" and state.all_have_ended():
            return self.flush()  # own loops end when they like; a strategy that returns early is not waited for
        return self.when_all_ended()

    def after_loss(self) -> list[CoordinatorOutput]:
        """A node is gone: is anyone left, and was it the one we were waiting for?"""
        state = self.state
        left = state.connected()
        if state.phase == "loading":
            founder = min((w.peer.index for w in left if state.is_complete(w.peer.index)), default=None)
            if founder is not None and state.welcome is not None:
                again = msgspec.structs.replace(state.welcome, load=True, replica_addresses=state.addresses(founder))
                return [CoordinatorOutput(peer_state.peer, again) for peer_state in state.replica_of(founder)]
        if not left and len(state.missing | state.workers.keys()) >= state.settings.num_workers:
            if state.outcome == "finished":
                state.outcome, state.reason = "failed", f"no worker is left: {state.last_loss}"
            return self.over()
        if state.phase == "finishing":
            return self.when_all_ended()
        if state.phase == "concluding" and self.concluder is None and not self.saved:
            return self._conclude()
        return self._when_all_left() + self.when_concluded()

    def not_waited_for(self, worker: int) -> None:
        """Somebody else saves the model, and nobody waits until it has the last parameters."""
        self.concluder = None if worker == self.concluder else self.concluder
        self.last_pulls.discard(worker)

    def _when_all_left(self) -> list[CoordinatorOutput]:
        """Of own loops those who are waited for may all have left."""
        state = self.state
        if state.phase != "running" or not state.is_custom_loop():
            return []
        waited_for = [w for w in state.connected() if w.here or w.excused]
        return self.flush() if waited_for and all(w.ended for w in waited_for) else []

    # ---- step by step ----------------------------------------------------------------------------------------------

    def flush(self) -> list[CoordinatorOutput]:
        """No more data: what rules have gathered becomes part of the model."""
        state = self.state
        state.phase = "flushing"
        if state.settings.num_servers:
            return [CoordinatorOutput(s.peer, Flush()) for s in state.servers.values()]
        return self._finish() + self.when_all_ended()

    def flushed(self) -> list[CoordinatorOutput]:
        """A server has flushed."""
        if self.state.phase == "flushing" and all(s.flushed for s in self.state.servers.values()):
            return self._finish() + self.after_loss()
        return self.when_all_ended()

    def _finish(self) -> list[CoordinatorOutput]:
        self.state.phase = "finishing"
        return [CoordinatorOutput(w.peer, Finish()) for w in self.state.connected()]

    def when_all_ended(self) -> list[CoordinatorOutput]:
        """Save the model, once no worker is at work. Who is not here is not waited for, but told when it comes back."""
        state = self.state
        if state.phase != "finishing" or not state.all_have_ended():
            return []
        if state.full_batch is not None and not state.full_batch.over and state.outcome != "failed":
            return []  # it was stopped in the middle of an iteration, and goes back to where that began
        if state.outcome == "failed":
            return self.over()
        unflushed = [s.peer for s in state.servers.values() if s.peer.role == "server" and not s.flushed]
        if unflushed:  # a run that was stopped: what rules have gathered so far is part of its model
            return [CoordinatorOutput(server, Flush()) for server in unflushed]
        return self._conclude()

    def _conclude(self) -> list[CoordinatorOutput]:
        state = self.state
        ended = [w for i, w in state.workers.items() if not state.rank_in_replica(i) and self._replica_has_ended(i)]
        ready = [w for w in ended if w.here] or ended
        if not ready and state.connected():
            state.phase = "finishing"  # they are not here, but their connections stand: wait until they end or are lost
            return []
        state.phase = "concluding"
        if not ready:
            if state.outcome == "finished":
                state.outcome, state.reason = "failed", "no worker is left to save the model"
            return self.over()
        chosen = min(ready, key=lambda w: w.peer)
        self.concluder = chosen.peer.index
        self.last_reports = {index for index, s in state.servers.items() if s.peer.role == "server"}
        others = [w for w in ready if w is not chosen] if state.is_custom_loop() else []
        self.last_pulls = {w.peer.index for w in others}
        pulls = [CoordinatorOutput(w.peer, Conclude(""), self._buffers_of(w)) for w in others]
        conclude = Conclude(state.settings.model_path)
        saves = [CoordinatorOutput(w.peer, conclude, self._buffers_of(w)) for w in state.replica_of(chosen.peer.index)]
        return [*self.ask_for_last_marks(), *saves, *pulls]

    def _replica_has_ended(self, full_batch: int) -> bool:
        return self.state.is_complete(full_batch) and all(
            peer_state.ended for peer_state in self.state.replica_of(full_batch)
        )

    def _buffers_of(self, worker: WorkerState) -> bytes | None:
        mean = self.buffers.get(self.state.rank_in_replica(worker.peer.index))
        return None if mean is None else mean.mean()

    def ask_for_last_marks(self) -> list[CoordinatorOutput]:
        return [
            CoordinatorOutput(self.state.servers[index].peer, ReportRequest()) for index in sorted(self.last_reports)
        ]

    def last_marks(self, server: Peer) -> list[CoordinatorOutput]:
        self.last_reports.discard(server.index)
        return self.when_concluded()

    def concluded(self, worker: WorkerState, message: Concluded) -> list[CoordinatorOutput]:
        if worker.peer.index == self.concluder:
            self.metrics, self.saved = message.metrics, True
        self.last_pulls.discard(worker.peer.index)
        return self.when_concluded()

    def when_concluded(self) -> list[CoordinatorOutput]:
        state = self.state
        told = self.saved and not self.last_pulls and not self.last_reports
        if state.phase != "concluding" or not told:
            return []
        broken = self.accounts.staleness().broken
        if broken and state.outcome == "finished":
            state.outcome, state.reason = "failed", f"the strategy did not keep its promise: {broken}"
        return self.over()

    def over(self) -> list[CoordinatorOutput]:
        """Say goodbye to everyone."""
        state = self.state
        state.phase = "over"
        servers = [s.peer for s in state.servers.values() if s.peer.role == "server"]
        return [
            CoordinatorOutput(peer, Shutdown(state.reason)) for peer in [w.peer for w in state.connected()] + servers
        ]
