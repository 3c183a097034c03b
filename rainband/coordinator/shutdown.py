"""How a run ends: flush what rules have gathered, let workers finish, save the model, say goodbye."""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.coordinator.reporting import Accounts
from rainband.coordinator.state import Facts, Out, WorkerState
from rainband.model.buffer_mean import BufferMean
from rainband.protocol.messages import Ask, Bye, Conclude, Concluded, Ended, Finish, Flush, Halt, Peer


class Ending:
    """From the last batch, or the word to stop, to the last goodbye."""

    def __init__(self, facts: Facts, accounts: Accounts) -> None:
        self.facts = facts
        self.accounts = accounts
        self.buffers: dict[int, BufferMean] = {}  # by the place in a team
        self.metrics: dict[str, float] = {}
        self.concluder: int | None = None  # the worker that saves the model
        self.saved = False  # it has answered
        self.last_reports: set[int] = set()  # servers whose last marks, with every push in, have yet to come
        self.last_pulls: set[int] = set()  # workers of own loops that have yet to take over the final parameters

    # ---- why it ends -----------------------------------------------------------------------------------------------

    def stop(self, outcome: str, reason: str) -> list[Out]:
        """End early: workers finish the cell at hand and give their leases back."""
        facts = self.facts
        if facts.phase == "over" or (facts.phase in ("finishing", "concluding") and outcome != "failed"):
            return []
        facts.outcome, facts.reason = outcome, reason
        if facts.phase in ("forming", "loading") or outcome == "failed":
            return self.over()  # no model comes of it: there is nothing to wait for
        facts.phase = "finishing"
        halts = [Out(w.peer, Halt(reason)) for w in facts.connected()]
        led = [] if facts.leader is None else [Out(*to) for to in facts.leader.stop()]
        return halts + led + self.after_loss()

    def when_done(self) -> list[Out]:
        """The marks have changed: are they full?"""
        facts = self.facts
        assert facts.plan
        if facts.phase != "running" or not facts.has_data() or facts.leader is not None:
            return []
        return self.flush() if facts.batches_done() >= facts.plan.num_batches else []

    def ended(self, worker: WorkerState, message: Ended, body: Any) -> list[Out]:
        """A worker has come to its end."""
        facts = self.facts
        place = facts.place(worker.peer.index)
        if facts.live is not None and worker.here and not worker.ended and not place:
            facts.live -= 1
        worker.ended = True
        worker.leases.clear()
        if facts.phase == "concluding" and facts.is_own_loop():  # given up before, and now it is here all the same
            self.last_pulls.add(worker.peer.index)
            return [Out(worker.peer, Conclude(""), self._buffers_of(worker))]
        self.buffers.setdefault(place, BufferMean()).add(body, message.samples)
        if facts.phase == "running" and facts.all_have_ended():
            return self.flush()  # own loops end when they like; a strategy that returns early is not waited for
        return self.when_all_ended()

    def after_loss(self) -> list[Out]:
        """A node is gone: is anyone left, and was it the one we were waiting for?"""
        facts = self.facts
        left = facts.connected()
        if facts.phase == "loading":
            founder = min((w.peer.index for w in left if facts.is_complete(w.peer.index)), default=None)
            if founder is not None and facts.welcome is not None:
                again = msgspec.structs.replace(facts.welcome, load=True, team=facts.addresses(founder))
                return [Out(mate.peer, again) for mate in facts.team_of(founder)]
        if not left and len(facts.missing | facts.workers.keys()) >= facts.settings.num_workers:
            if facts.outcome == "finished":
                facts.outcome, facts.reason = "failed", f"no worker is left: {facts.last_loss}"
            return self.over()
        if facts.phase == "finishing":
            return self.when_all_ended()
        if facts.phase == "concluding" and self.concluder is None and not self.saved:
            return self._conclude()
        return self._when_all_left() + self.when_concluded()

    def not_waited_for(self, worker: int) -> None:
        """Somebody else saves the model, and nobody waits until it has the last parameters."""
        self.concluder = None if worker == self.concluder else self.concluder
        self.last_pulls.discard(worker)

    def _when_all_left(self) -> list[Out]:
        """Of own loops those who are waited for may all have left."""
        facts = self.facts
        if facts.phase != "running" or not facts.is_own_loop():
            return []
        waited_for = [w for w in facts.connected() if w.here or w.excused]
        return self.flush() if waited_for and all(w.ended for w in waited_for) else []

    # ---- step by step ----------------------------------------------------------------------------------------------

    def flush(self) -> list[Out]:
        """No more data: what rules have gathered becomes part of the model."""
        facts = self.facts
        facts.phase = "flushing"
        if facts.settings.num_servers:
            return [Out(s.peer, Flush()) for s in facts.servers.values()]
        return self._finish() + self.when_all_ended()

    def flushed(self) -> list[Out]:
        """A server has flushed."""
        if self.facts.phase == "flushing" and all(s.flushed for s in self.facts.servers.values()):
            return self._finish() + self.after_loss()
        return self.when_all_ended()

    def _finish(self) -> list[Out]:
        self.facts.phase = "finishing"
        return [Out(w.peer, Finish()) for w in self.facts.connected()]

    def when_all_ended(self) -> list[Out]:
        """Save the model, once no worker is at work. Who is not here is not waited for, but told when it comes back."""
        facts = self.facts
        if facts.phase != "finishing" or not facts.all_have_ended():
            return []
        if facts.leader is not None and not facts.leader.over and facts.outcome != "failed":
            return []  # it was stopped in the middle of an iteration, and goes back to where that began
        if facts.outcome == "failed":
            return self.over()
        unflushed = [s.peer for s in facts.servers.values() if s.peer.role == "server" and not s.flushed]
        if unflushed:  # a run that was stopped: what rules have gathered so far is part of its model
            return [Out(server, Flush()) for server in unflushed]
        return self._conclude()

    def _conclude(self) -> list[Out]:
        facts = self.facts
        ended = [w for i, w in facts.workers.items() if not facts.place(i) and self._team_has_ended(i)]
        ready = [w for w in ended if w.here] or ended
        if not ready and facts.connected():
            facts.phase = "finishing"  # they are not here, but their connections stand: wait until they end or are lost
            return []
        facts.phase = "concluding"
        if not ready:
            if facts.outcome == "finished":
                facts.outcome, facts.reason = "failed", "no worker is left to save the model"
            return self.over()
        chosen = min(ready, key=lambda w: w.peer)
        self.concluder = chosen.peer.index
        self.last_reports = {index for index, s in facts.servers.items() if s.peer.role == "server"}
        others = [w for w in ready if w is not chosen] if facts.is_own_loop() else []
        self.last_pulls = {w.peer.index for w in others}
        pulls = [Out(w.peer, Conclude(""), self._buffers_of(w)) for w in others]
        conclude = Conclude(facts.settings.model_path)
        saves = [Out(w.peer, conclude, self._buffers_of(w)) for w in facts.team_of(chosen.peer.index)]
        return [*self.ask_for_last_marks(), *saves, *pulls]

    def _team_has_ended(self, leader: int) -> bool:
        return self.facts.is_complete(leader) and all(mate.ended for mate in self.facts.team_of(leader))

    def _buffers_of(self, worker: WorkerState) -> bytes | None:
        mean = self.buffers.get(self.facts.place(worker.peer.index))
        return None if mean is None else mean.mean()

    def ask_for_last_marks(self) -> list[Out]:
        return [Out(self.facts.servers[index].peer, Ask()) for index in sorted(self.last_reports)]

    def last_marks(self, server: Peer) -> list[Out]:
        self.last_reports.discard(server.index)
        return self.when_concluded()

    def concluded(self, worker: WorkerState, message: Concluded) -> list[Out]:
        if worker.peer.index == self.concluder:
            self.metrics, self.saved = message.metrics, True
        self.last_pulls.discard(worker.peer.index)
        return self.when_concluded()

    def when_concluded(self) -> list[Out]:
        facts = self.facts
        told = self.saved and not self.last_pulls and not self.last_reports
        if facts.phase != "concluding" or not told:
            return []
        broken = self.accounts.staleness().broken
        if broken and facts.outcome == "finished":
            facts.outcome, facts.reason = "failed", f"the strategy did not keep its promise: {broken}"
        return self.over()

    def over(self) -> list[Out]:
        """Say goodbye to everyone."""
        facts = self.facts
        facts.phase = "over"
        servers = [s.peer for s in facts.servers.values() if s.peer.role == "server"]
        return [Out(peer, Bye(facts.reason)) for peer in [w.peer for w in facts.connected()] + servers]
