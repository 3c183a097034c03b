"""Admits servers and workers, at the start and later, and starts the run."""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.coordinator.buffers import FirstBuffers
from rainband.coordinator.full_batch import FullBatchDuty
from rainband.coordinator.liveness import Liveness
from rainband.coordinator.planning import EQUAL_DATA, Planning
from rainband.coordinator.saving.rollback import Rollback
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, Phase, RunState, ServerState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import NO_WORK_LEFT, Dataset, Go, Join, Peer, ServerJoin, Shutdown
from rainband.protocol.optimizer_spec import changed_numbers, plain

ENDING = (Phase.FLUSHING, Phase.FINISHING, Phase.CONCLUDING, Phase.OVER)
TASK_OF_RUN = "Copy the files of the task from the machine of the run."


class Admission:
    """Checks each node that joins, and welcomes it when its replica and all servers have joined."""

    def __init__(
        self,
        state: RunState,
        shutdown: RunEnd,
        planning: Planning,
        liveness: Liveness,
        full_batch: FullBatchDuty | None,
        rollback: Rollback,
    ) -> None:
        self.state = state
        self.rollback = rollback
        self.shutdown = shutdown
        self.planning = planning
        self.liveness = liveness
        self.full_batch = full_batch
        self.waiting: list[tuple[Peer, Join]] = []
        self.buffers = FirstBuffers()
        self.next_rank = len(state.settings.local_ranks)  # of the next worker that joins from another machine

    def new_ranks(self, number: int) -> range:
        """Return ranks for workers that join from another machine; no rank is given to two workers."""
        first = self.next_rank
        self.next_rank += number
        return range(first, self.next_rank)

    def expect_servers(self, number: int) -> range:
        """Wait for this many more servers before the run begins; return their numbers."""
        state = self.state
        assert state.phase is Phase.FORMING, "the blocks are dealt once"
        first = state.settings.num_servers
        state.settings = msgspec.structs.replace(state.settings, num_servers=first + number)
        return range(first, first + number)

    def server_joins(self, sender: Peer, message: ServerJoin, now: float) -> list[CoordinatorOutput]:
        if sender.role != "server":
            return []
        if self.state.phase is not Phase.FORMING:
            return self._server_joins_late(sender, now)
        self.state.servers[sender.index] = ServerState(sender, message.address)
        self.state.events.append(events.Joined(at_s=now, node=str(sender)))
        return self.form(now)

    def _server_joins_late(self, sender: Peer, now: float) -> list[CoordinatorOutput]:
        """Send a server away that was started again: it no longer has its blocks."""
        known = self.state.servers.get(sender.index)
        if known is not None and known.peer == sender:
            return []  # the message arrived twice
        outs = [] if known is None else self.liveness.lost(known.peer, now, "it was started again, without its blocks")
        return [*outs, CoordinatorOutput(sender, Shutdown("the run began before this server joined."))]

    def worker_joins(self, sender: Peer, join: Join, now: float, buffers: Any = None) -> list[CoordinatorOutput]:
        """Take a worker's description of its task, and the first values of its buffers."""
        state = self.state
        if sender.role != "worker":
            return []
        if state.phase in ENDING:
            return [CoordinatorOutput(sender, NO_WORK_LEFT)]
        if why := self._is_replaced(sender):
            return [CoordinatorOutput(sender, Shutdown(why))]
        rank = state.rank_in_replica(sender.index)
        if why := self._cannot_take_part(join) or self.buffers.compare(sender, rank, buffers):
            return self._turn_away(sender, now, why)
        others = set(state.replica_indices(sender.index)) - {sender.index}  # it may have been started again itself
        if lost := sorted(others & state.missing):
            return self._dismiss(sender, now, f"worker {lost[0]} of the same replica was lost")
        known = state.workers.get(sender.index)
        outs: list[CoordinatorOutput] = []
        if known is not None and known.peer != sender:  # restarted, before its end was noticed
            known.connected = False
            outs = [CoordinatorOutput(known.peer, Shutdown(f"{sender} was started again."))]
            outs += [] if known.ended else self.liveness.deactivate(known, now, "it was restarted")
            self.liveness.leases.wanting.pop(sender.index, None)
            if state.phase in ENDING:  # too many workers have died on its batches
                known.ended, state.live = True, None
                return [*outs, CoordinatorOutput(sender, NO_WORK_LEFT), *self.shutdown.after_loss()]
        if known is None or known.peer != sender:
            # No other worker waits for one that waits for the others of its replica.
            active = state.settings.workers_per_replica == 1
            state.workers[sender.index] = WorkerState(
                sender, join.address, heartbeat_at=now, worked_at=now, active=active
            )
        state.missing.discard(sender.index)
        state.events.append(events.Joined(at_s=now, node=str(sender)))
        self.waiting.append((sender, join))
        return outs + self.form(now)

    def _is_replaced(self, sender: Peer) -> str:
        """Return why a worker is dismissed that a later incarnation of the same worker has replaced; "" if none has."""
        known = self.state.workers.get(sender.index)
        replaced = known is not None and sender.incarnation < known.peer.incarnation
        return f"{sender} was started again." if replaced else ""

    def _cannot_take_part(self, join: Join) -> str:
        if join.optimizer is not None and not self._may_run(join.optimizer.name):
            name = join.optimizer.name
            return f"servers are not allowed to import {name}: start the run with --optimizer {name}."
        if join.rounds and join.batches_per_item != 1:
            return (
                f"a strategy with rounds pushes one batch at a time, and this one requests {join.batches_per_item}: "
                "leave n_push at 1, and use a larger --batch-size instead."
            )
        return ""

    def _may_run(self, optimizer: str) -> bool:
        """Allow a server to import only torch's optimizers and those named when the run was started."""
        return ":" not in optimizer or optimizer in self.state.settings.optimizers

    def form(self, now: float) -> list[CoordinatorOutput]:
        """Welcome the workers that wait, as soon as enough nodes have joined."""
        state = self.state
        if len(state.servers) < state.settings.num_servers or not self.waiting or state.phase is Phase.OVER:
            return []
        if not state.plan and self.waiting[0][1].custom_loop:
            known = len(state.workers.keys() | state.missing)
            if known < state.settings.num_workers:
                return []  # they start together: a late one could find that the others have ended
        complete = [(sender, join) for sender, join in self.waiting if state.is_complete(sender.index)]
        if self.rollback.must_wait:
            return []
        if complete and self.rollback.is_due:
            self.rollback.begin(now)
        if not state.plan:
            complete = self._who_begins(complete)
        if not complete:
            return []
        if not state.plan and (why := self.planning.unlike_checkpoint(complete[0][1], now)):
            return self.shutdown.stop("failed", f"the run cannot continue from its checkpoint: {why}.")
        welcomed = {sender for sender, _ in complete}
        self.waiting = [(sender, join) for sender, join in self.waiting if sender not in welcomed]
        outs = [] if state.plan else self._begin(complete[0][1], now)
        for sender, join in complete:
            outs += self._welcome(sender, join, now)
        return outs

    def _begin(self, join: Join, now: float) -> list[CoordinatorOutput]:
        """Make the plan; in a run that continues, lease only what its checkpoint lacks."""
        outs = self.planning.make(join, now)
        restore = self.state.settings.restore
        if restore is not None:
            self.liveness.leases.begin_again(restore)
            self.state.events.append(
                events.Restored(at_s=now, place=restore.place, step=restore.step, samples=restore.samples)
            )
        return outs

    def _who_begins(self, complete: list[tuple[Peer, Join]]) -> list[tuple[Peer, Join]]:
        """Return the workers to begin with, the one first whose task becomes that of the run; none: wait for more.

        It is one of the run's own machine, as long as one of these may join: no other machine changes the task.
        """
        state = self.state
        if len(state.connected()) < state.settings.min_workers:
            return []
        local = state.settings.local_ranks
        complete.sort(key=lambda one: one[0].index not in local)
        if complete and complete[0][0].index not in local and any(self._may_join(rank) for rank in local):
            return []
        return complete

    def _may_join(self, rank: int) -> bool:
        """Return whether a worker of the run's own machine may still join."""
        known = self.state.workers.get(rank)
        return rank not in self.state.missing and (known is None or known.connected)

    def _turn_away(self, sender: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Send a worker away with a reason, which is also an event.

        A run that goes on without a worker of its own machine fails at its end; one of another machine is only refused.
        """
        state = self.state
        is_local = sender.index in state.settings.local_ranks
        if is_local:
            state.refused.append(why)
        state.workers.pop(sender.index, None)
        self.liveness.leases.counts.forget()
        state.missing.add(sender.index)
        state.report_loss(sender, now, why)
        fatal = is_local and state.phase is Phase.FORMING
        ended = self.shutdown.stop("failed", why) if fatal else self.shutdown.after_loss()
        return [CoordinatorOutput(sender, Shutdown(why)), *ended]

    def _dismiss(self, sender: Peer, now: float, why: str) -> list[CoordinatorOutput]:
        """Send a worker away because its replica can never be complete; the other replicas go on."""
        self.state.missing.add(sender.index)
        self.state.report_loss(sender, now, why)
        return [CoordinatorOutput(sender, Shutdown(f"{why}.")), *self.shutdown.after_loss()]

    def _welcome(self, sender: Peer, join: Join, now: float) -> list[CoordinatorOutput]:
        state = self.state
        assert state.plan and state.welcome
        differs = self._difference(join)
        if differs:
            is_of_run = sender.index in state.settings.local_ranks or join.custom_loop
            advice = "" if is_of_run else f" {TASK_OF_RUN}"
            return self._turn_away(sender, now, f"{sender} does not fit this run: {differs}{advice}")
        state.workers[sender.index].active, state.live = True, None
        first = sender.index - state.rank_in_replica(sender.index)
        earlier = (w.connected and w.peer.index < first for w in state.workers.values())
        restores = state.settings.restore is not None  # then the servers have the values
        founder = state.phase is Phase.LOADING and not any(earlier) and not restores
        welcome = msgspec.structs.replace(
            state.welcome,
            load=founder,
            replica_addresses=state.addresses(sender.index),
            via=state.settings.via(sender.index),
        )
        return [
            CoordinatorOutput(sender, welcome, self.buffers.replacement(sender, sender.index - first)),
            *([CoordinatorOutput(sender, Go())] if state.phase is Phase.RUNNING else []),
        ]

    def _difference(self, join: Join) -> str:
        plan, first = self.state.plan, self.state.join
        assert plan and first
        pairs: dict[str, tuple[object, object]] = {
            "the data": (join.fingerprint, plan.fingerprint),
            "the number of samples": (join.num_samples, plan.num_samples),
            "the model": (join.layout.digest(), plan.layout),
            "the batch size": (join.batch_size, plan.batch_size),
            "drop_last": (join.drop_last, plan.drop_last),
            "the strategy": ((join.batches_per_item, join.rounds), (first.batches_per_item, first.rounds)),
            "the optimizer": (_optimizer_of(join), _optimizer_of(first)),
            **_differing_settings(join, first),
        }
        if join.custom_loop:  # its data is known later
            for later in ("the data", "the number of samples", "the batch size", "drop_last"):
                del pairs[later]
        differing = {what: f"{what} is {mine}, not {ours}" for what, (mine, ours) in pairs.items() if mine != ours}
        advice = f" {EQUAL_DATA}" if "the data" in differing else ""
        return f"{'; '.join(differing.values())}.{advice}" if differing else ""

    def described(self, worker: WorkerState, dataset: Dataset, now: float) -> list[CoordinatorOutput]:
        """Take the description of a custom loop's data, or send the loop away."""
        if self.state.dataset is None and (why := self.planning.unlike_data(dataset, now)):
            return self.shutdown.abort(f"the run cannot continue from its checkpoint: {why}.")  # nothing has begun
        shared = self.state.shares_batches()
        why = "" if shared and worker.described else self.planning.difference(worker, dataset)
        if not why and shared:
            self.planning.shared(worker, dataset, now)
            return []
        if not why:
            return self.planning.described(worker, dataset, now)
        if worker.peer.index in self.state.settings.local_ranks:
            self.state.refused.append(why)
        return [CoordinatorOutput(worker.peer, Shutdown(why)), *self.liveness.lost(worker.peer, now, why)]

    def server_ready(self, sender: Peer, now: float) -> list[CoordinatorOutput]:
        """Note that all blocks of a server have their initial values, or that it knows the plan of custom loops."""
        state = self.state
        server = state.servers.get(sender.index)
        if state.planning:
            return self.planning.server_knows(sender)
        if server is None or server.peer != sender or state.phase is not Phase.LOADING:
            return []
        server.ready = True
        if not all(s.ready for s in state.servers.values()):
            return []
        state.enter(Phase.RUNNING)
        for worker in state.workers.values():
            worker.worked_at = now
        go = [CoordinatorOutput(w.peer, Go()) for w in state.connected()]
        return go if self.full_batch is None else go + self.full_batch.start(now)


def _differing_settings(join: Join, first: Join) -> dict[str, tuple[object, object]]:
    """Return the optimizer settings that differ and cannot change during a run; learning rates may differ."""
    differing: dict[str, tuple[object, object]] = {}
    groups = zip(join.layout.groups, first.layout.groups, strict=False)  # their number is part of the model's digest
    for number, (mine, ours) in enumerate(groups if join.optimizer else ()):
        for name, value in mine.items():
            try:
                changed_numbers(_optimizer_of(join), number, plain({name: ours.get(name)}), {name: value})
            except ValueError:
                differing[f"{name} of parameter group {number}"] = value, ours.get(name)
    return differing


def _optimizer_of(join: Join) -> str:
    return join.optimizer.name if join.optimizer else ""
