"""How a run begins: who may take part, and when everyone who must be there is there."""

from __future__ import annotations

import msgspec

from rainband.coordinator.full_batch_duty import Leading
from rainband.coordinator.liveness import Presence
from rainband.coordinator.planning import Planning
from rainband.coordinator.shutdown import Ending
from rainband.coordinator.state import Facts, Out, ServerState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Bye, Go, Join, Peer, ServerJoin


class Forming:
    """Welcomes servers and workers, at the start and later."""

    def __init__(
        self, facts: Facts, ending: Ending, planning: Planning, presence: Presence, leading: Leading | None
    ) -> None:
        self.facts = facts
        self.ending = ending
        self.planning = planning
        self.presence = presence
        self.leading = leading
        self.waiting: list[tuple[Peer, Join]] = []

    def server_joins(self, sender: Peer, message: ServerJoin, now: float) -> list[Out]:
        if sender.role != "server":
            return []
        self.facts.servers[sender.index] = ServerState(sender, message.address)
        self.facts.events.append(events.Joined(at_s=now, node=str(sender)))
        return self._form(now)

    def worker_joins(self, sender: Peer, join: Join, now: float) -> list[Out]:
        facts = self.facts
        if sender.role != "worker":
            return []
        if facts.phase in ("flushing", "finishing", "concluding", "over"):
            return [Out(sender, Bye("the run is at its end: there is nothing left to do."))]
        if why := self._cannot_take_part(join):
            return self._turn_away(sender, now, why)
        known = facts.workers.get(sender.index)
        if known is not None and sender.incarnation < known.peer.incarnation:
            return []  # it has been started again since
        outs: list[Out] = []
        if known is not None and known.peer != sender:  # started again, before we knew that it had ended
            known.connected = False
            outs = [] if known.ended else self.presence.give_up(known, now, "it was started again")
            self.presence.leases.wanting.pop(sender.index, None)
        if known is None or known.peer != sender:
            # Who waits for the others of its team is not waited for itself.
            here = facts.settings.team_size == 1
            facts.workers[sender.index] = WorkerState(sender, join.address, beat_at=now, worked_at=now, here=here)
        facts.events.append(events.Joined(at_s=now, node=str(sender)))
        self.waiting.append((sender, join))
        return outs + self._form(now)

    def _cannot_take_part(self, join: Join) -> str:
        if join.optimizer is not None and not self._may_run(join.optimizer.name):
            return f"the servers may not import {join.optimizer.name}: allow it with --optimizer."
        if join.rounds and join.cell_batches != 1:
            return (
                f"a strategy with rounds pushes one batch at a time, and this one wants cells of {join.cell_batches}: "
                "leave cell_batches at 1, and give a larger batch size instead (--batch-size)."
            )
        return ""

    def _may_run(self, optimizer: str) -> bool:
        """What a server imports is named by who started the run, never by a message alone."""
        return ":" not in optimizer or optimizer in self.facts.settings.optimizers

    def _form(self, now: float) -> list[Out]:
        facts = self.facts
        if len(facts.servers) < facts.settings.num_servers or not self.waiting:
            return []
        if self.waiting[0][1].own_loop and len(facts.workers) < facts.settings.num_workers:
            return []  # own loops begin together: who comes late might find that the others have left
        complete = [(sender, join) for sender, join in self.waiting if facts.is_complete(sender.index)]
        if not complete:
            return []
        welcomed = {sender for sender, _ in complete}
        self.waiting = [(sender, join) for sender, join in self.waiting if sender not in welcomed]
        outs = [] if facts.plan else self.planning.make(complete[0][1], now)
        for sender, join in complete:
            outs += self._welcome(sender, join, now)
        return outs

    def _turn_away(self, sender: Peer, now: float, why: str) -> list[Out]:
        """A worker cannot take part: it is told why, and so are those who watch."""
        facts = self.facts
        facts.workers.pop(sender.index, None)
        facts.missing.add(sender.index)
        facts.note_loss(sender, now, why)
        ended = self.ending.stop("failed", why) if facts.phase == "forming" else self.ending.after_loss()
        return [Out(sender, Bye(why)), *ended]

    def _welcome(self, sender: Peer, join: Join, now: float) -> list[Out]:
        facts = self.facts
        assert facts.plan and facts.welcome
        differs = self._difference(join)
        if differs:
            return self._turn_away(sender, now, f"{sender} does not fit this run: {differs}.")
        facts.workers[sender.index].here, facts.live = True, None
        first = sender.index - facts.place(sender.index)
        earlier = (w.connected and w.peer.index < first for w in facts.workers.values())
        founder = facts.phase == "loading" and not any(earlier)
        welcome = msgspec.structs.replace(facts.welcome, load=founder, team=facts.addresses(sender.index))
        return [Out(sender, welcome), *([Out(sender, Go())] if facts.phase == "running" else [])]

    def _difference(self, join: Join) -> str:
        plan, first = self.facts.plan, self.facts.join
        assert plan and first
        pairs: dict[str, tuple[object, object]] = {
            "the data": (join.fingerprint, plan.fingerprint),
            "the number of samples": (join.num_samples, plan.num_samples),
            "the model": (join.layout.digest(), plan.layout),
            "the batch size": (join.batch_size, plan.batch_size),
            "the strategy": ((join.cell_batches, join.rounds), (first.cell_batches, first.rounds)),
            "the optimizer": (_optimizer_of(join), _optimizer_of(first)),
        }
        if join.own_loop:  # it says later what it draws from
            for later in ("the data", "the number of samples", "the batch size"):
                del pairs[later]
        return "; ".join(f"{what} is {mine}, not {ours}" for what, (mine, ours) in pairs.items() if mine != ours)

    def server_ready(self, sender: Peer, now: float) -> list[Out]:
        """All blocks of a server have their first values, or it knows the plan of own loops."""
        facts = self.facts
        server = facts.servers.get(sender.index)
        if facts.planning:
            return self.planning.server_knows(sender)
        if server is None or server.peer != sender or facts.phase != "loading":
            return []
        server.ready = True
        if not all(s.ready for s in facts.servers.values()):
            return []
        facts.phase = "running"
        for worker in facts.workers.values():
            worker.worked_at = now
        go = [Out(w.peer, Go()) for w in facts.connected()]
        return go if self.leading is None else go + self.leading.begin(now)


def _optimizer_of(join: Join) -> str:
    return join.optimizer.name if join.optimizer else ""
