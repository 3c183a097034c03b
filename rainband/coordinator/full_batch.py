"""Runs a strategy's coordinator part, `coordinate`: its commands to the servers, its evaluations, its end.

No I/O, no clock. One command is in flight at a time, and sent again until every server has answered it. Its results are
in the journal before the next one leaves, so that `coordinate` can be run again from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from rainband.coordinator.journal import CommandPosition, Journal, digest
from rainband.coordinator.pending_command import Computed, Evaluating, PendingCommand
from rainband.coordinator.shutdown import RunEnd
from rainband.coordinator.state import CoordinatorOutput, FailureCause, Phase, RunState, ServerState, WorkerState
from rainband.coordinator.work_queue import WorkerPace, WorkQueue
from rainband.coordinator_api import CoordinatorApi, End, Evaluation
from rainband.errors import RainbandError, Stop
from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import (
    Answer,
    AssignItems,
    Command,
    Evaluated,
    ItemsDelivered,
    LeaseRequest,
    Message,
    Peer,
    Return,
)
from rainband.protocol.steps import Steps
from rainband.protocol.vectors import Operation

FATAL_DEATHS = 3  # when this many workers die on the same work item, the run ends
MAX_AFTER_STOP = 100  # commands of a strategy after the run was asked to stop
To = tuple[Peer, Message]
Coordinate = Callable[[CoordinatorApi], Coroutine[Any, Any, None]]


class EvaluationWorkers(NamedTuple):
    """The data plan and the servers of a run; known when all blocks have their initial values."""

    plan: DataPlan
    servers: tuple[Peer, ...]
    first: Peer  # the server that has block 0, and sums the loss
    seed: int


class ItemDispatch:
    """Hands the work items of evaluations to workers that request them."""

    def __init__(self, backups: int) -> None:
        self.pace = WorkerPace()
        self.requests: dict[int, Peer] = {}  # workers that wait for work items, longest first
        self.idle: set[int] = set()  # of these, the ones that compute nothing now
        self.active: dict[int, Peer] = {}  # workers that have requested items, and are active
        self.deaths: dict[int, int] = {}  # work item -> workers that died on it
        self.backups = backups  # copies handed out

    def request(self, worker: Peer, idle: bool) -> None:
        self.active[worker.index] = self.requests[worker.index] = worker
        if idle:
            self.idle.add(worker.index)

    def hand_out(self, queue: WorkQueue, at_version: int, now: float) -> list[To]:
        outs: list[To] = []
        before = queue.backups
        for index, peer in list(self.requests.items()):
            if work_items := queue.give(index, len(self.active), now, index in self.idle):
                del self.requests[index]
                self.idle.discard(index)
                outs.append((peer, AssignItems(at_version, work_items)))
        self.backups += queue.backups - before
        return outs

    def delivered(self, queue: WorkQueue, worker: int, work_item: int, at_version: int, now: float) -> list[To]:
        """Note a delivered item; tell the other workers that have it."""
        others = queue.returned(worker, work_item, now)
        message = ItemsDelivered(at_version, (work_item,))
        return [(self.active[other], message) for other in others if other in self.active]

    def call_off(self, queue: WorkQueue, at_version: int) -> list[To]:
        """Tell workers that compute items which others have delivered: the evaluation is complete."""
        return [
            (self.active[worker], ItemsDelivered(at_version, work_items))
            for worker, work_items in queue.copied().items()
            if worker in self.active
        ]

    def forget(self, queue: WorkQueue | None, worker: int, lost: bool, died: bool) -> str:
        """Hand a worker's items to others; return why the run must end, if too many workers died on one item.

        A worker that is only inactive has sent its request, and will not repeat it: its request stays.
        """
        if lost:
            self.requests.pop(worker, None)
            self.idle.discard(worker)
        self.active.pop(worker, None)
        work_item = queue.forget(worker) if queue is not None else None
        if work_item is None or not died:
            return ""
        self.deaths[work_item] = self.deaths.get(work_item, 0) + 1
        if self.deaths[work_item] < FATAL_DEATHS:
            return ""
        return f"{FATAL_DEATHS} workers died on the same batches (work item {work_item})"

    def due_at(self, queue: WorkQueue) -> float | None:
        """Return when a waiting worker may get a copy of an overdue item."""
        idle = [worker for worker in self.requests if worker in self.idle or not queue.has(worker)]
        return queue.next_due(idle) if idle else None


@dataclass
class RequestedWork:
    """Counts of what evaluations have requested so far."""

    evaluations: int = 0
    work_items: int = 0
    batches: int = 0
    last_batches: int = 0  # of the last evaluation

    def add(self, work_items: int, batches: int) -> None:
        self.evaluations += 1
        self.work_items += work_items
        self.batches, self.last_batches = self.batches + batches, batches


class FullBatchRun:
    """Implements the `CoordinatorApi` of a strategy, and runs its `coordinate`."""

    def __init__(
        self,
        coordinate: Coordinate,
        notes: list[events.AnyEvent] | None = None,
        journal: Journal | None = None,
        before_stop: Callable[[], list[To]] = list,
    ) -> None:
        """Each iteration is added to `notes`. `journal`: of a coordinator that this one replaces.

        `before_stop` is called before the strategy learns that it is to stop, and returns messages to send.
        """
        self.before_stop = before_stop
        self.coordinate = coordinate
        self.journal = journal or Journal()
        self.found = len(self.journal.entries)  # results of the previous coordinator
        self.nodes: EvaluationWorkers | None = None
        self.steps: Steps[None] | None = None
        self.pending: PendingCommand | None = None
        self.number = 0
        self.dispatch = ItemDispatch(self.journal.backups)
        self.outs: list[To] = []
        self.notes: list[events.AnyEvent] = [] if notes is None else notes
        self.now = 0.0
        self.over = False
        self.error = ""
        self.stopping = False
        self.cut_short = False  # stopped within an evaluation, and the strategy does not know it yet
        self.after_stop = 0  # commands
        self.samples = 0  # of complete evaluations
        self.requested = RequestedWork()

    @property
    def num_items(self) -> int:
        assert self.nodes is not None
        return self.nodes.plan.num_portions

    @property
    def seed(self) -> int:
        assert self.nodes is not None
        return self.nodes.seed

    def compute(self, *operations: Operation) -> Awaitable[tuple[float, ...]]:
        return Computed(self._command(operations, ()))

    def evaluate(self, *operations: Operation, work_items: Sequence[int] | None = None) -> Awaitable[Evaluation]:
        assert self.nodes is not None
        if self.stopping:
            self.outs += self.before_stop()
            raise Stop  # the workers have stopped computing
        chosen = tuple(range(self.num_items)) if work_items is None else tuple(sorted(set(work_items)))
        assert chosen, "an evaluation has at least one work item"
        self.requested.add(len(chosen), sum(map(self.nodes.plan.batches_in, chosen)))
        return Evaluating(self._command(operations, chosen))

    def report(self, iteration: int, loss: float, gradient_norm: float, step: float, end: End | None = None) -> None:
        if self.number <= self.found:
            return  # the previous coordinator has reported it
        self.notes.append(
            events.IterationDone(
                at_s=self.now,
                iteration=iteration,
                loss=loss,
                gradient_norm=gradient_norm,
                step=step,
                evaluations=self.requested.evaluations,
                work_items=self.requested.work_items,
                backups=self.dispatch.backups,
                end=end.text if end else "",
                end_cause=end.cause if end else None,
            )
        )

    def _command(self, operations: Sequence[Operation], work_items: tuple[int, ...]) -> PendingCommand:
        assert self.nodes is not None
        assert self.pending is None or self.pending.ready(), "await the command before giving another"
        self.after_stop += self.stopping
        if self.after_stop > MAX_AFTER_STOP:
            raise Stop  # it would never end by itself
        self.number += 1
        command = Command(self.journal.term, self.number, tuple(operations), len(work_items))
        self.pending = PendingCommand(command, self.nodes.servers, self.nodes.first, work_items)
        if self.number <= self.found:
            self._look_up(self.pending)
        else:
            self.outs += [(server, command) for server in self.nodes.servers]
        return self.pending

    def _look_up(self, pending: PendingCommand) -> None:
        known = self.journal.entries[self.number - 1]
        if known.command != digest(pending.command):
            raise RainbandError(
                f"the coordinator was restarted, and coordinate() gave another command {self.number} than before: "
                "it must depend only on its settings, the seed and the results it receives."
            )
        pending.known = known
        self.samples += known.samples

    def start(self, nodes: EvaluationWorkers, now: float) -> list[To]:
        self.nodes, self.now = nodes, now
        self.steps = Steps(self.coordinate(self))
        return self._go_on()

    def _go_on(self, thrown: BaseException | None = None) -> list[To]:
        """Run the coroutine until it waits for the servers."""
        assert self.steps is not None
        try:
            awaited = self.steps.go_on(thrown)
            self.over = self.steps.over
            if not self.over and (awaited is None or awaited is not self.pending):
                raise RainbandError(f"coordinate() may await only the last command it gave, not {awaited!r}")
        except Exception as error:
            self.over, self.error = True, f"{type(error).__name__}: {error}"
        outs, self.outs = self.outs, []
        return outs + self._hand_out()

    def stop(self) -> list[To]:
        """End early: the strategy may still give commands, but workers compute nothing more.

        Commands go on until the next evaluation is requested: what follows a search is part of its iteration.
        """
        if self.steps is None:
            self.over = True
        if self.over or self.stopping:
            return []
        self.stopping = True
        assert self.pending is not None
        if not self.pending.work_items:
            return []
        self.cut_short = True
        self.pending.work_items = ()  # wait only for the answers of the servers, not for the sum
        return self._throw_stop() if self.pending.ready() else []

    def _throw_stop(self) -> list[To]:
        self.cut_short = False
        self.outs += self.before_stop()
        return self._go_on(Stop())

    def position(self) -> CommandPosition | None:
        """Return how far the commands are, for a checkpoint; None if one is being executed, or is not an evaluation.

        An evaluation begins again in the run that continues: what it has summed is not used.
        """
        pending = self.pending
        if pending is None or self.over or pending.known is not None or len(pending.answers) < len(pending.servers):
            return None
        if pending.refused() or not (self.stopping or pending.work_items):
            return None
        is_open = len(self.journal.entries) < self.number
        step = self.requested.batches - (self.requested.last_batches if is_open else 0)
        return CommandPosition(
            self.number, pending.at_version, is_open, step, msgspec.msgpack.encode(self.journal.entries)
        )

    def receive(self, sender: Peer, message: Answer | Evaluated, now: float) -> list[To]:
        """Take a message of a server."""
        self.now = now
        pending = self.pending
        if pending is None or self.over or sender not in pending.servers:
            return []
        match message:
            case Answer() if (message.term, message.number) == (self.journal.term, pending.command.number):
                pending.answers[sender] = message
                if pending.work_items and len(pending.answers) == len(pending.servers) and pending.queue is None:
                    pending.queue = WorkQueue(pending.work_items, self.dispatch.pace)
            case Evaluated() if sender in pending.answers and message.at_version == pending.answers[sender].version:
                pending.evaluated[sender] = message
        if not pending.ready():
            return self._hand_out()
        if self.cut_short:
            return self._throw_stop()
        if not pending.refused():
            self.journal.entries.append(pending.entry())
            self.samples += self.journal.entries[-1].samples
        called_off = [] if pending.queue is None else self.dispatch.call_off(pending.queue, pending.at_version)
        return called_off + self._go_on()

    def want(self, worker: Peer, now: float, idle: bool = True) -> list[To]:
        """Take a worker's request for work items; unless `idle`, it still computes its last one."""
        self.now = now
        self.dispatch.request(worker, idle)
        return self._hand_out()

    def returned(self, worker: Peer, work_item: int, at_version: int, now: float, replica_size: int = 1) -> list[To]:
        """Take a worker's message that its blocks have a work item; its replica then has to deliver it no more."""
        self.now = now
        queue = self._open()
        outs: list[To] = []
        if queue is not None and self.pending is not None and at_version == self.pending.at_version:
            leader, rank = worker.index - worker.index % replica_size, worker.index % replica_size
            if queue.has_every_part(leader, rank, work_item, replica_size):
                outs = self.dispatch.delivered(queue, leader, work_item, at_version, now)
        return outs + self._hand_out()

    def forget(self, worker: int, gone: bool, died: bool) -> str:
        """Hand a worker's items to others; return why the run must end, if too many workers died on one item."""
        return self.dispatch.forget(self._open(), worker, gone, died)

    def tick(self, now: float) -> list[To]:
        """Send a command again to the servers that have not answered."""
        self.now = now
        pending = self.pending
        if pending is None or self.over or pending.ready():
            return []
        done = pending.evaluated if pending.work_items else pending.answers
        again: list[To] = [(server, pending.command) for server in pending.servers if server not in done]
        return again + self._hand_out()

    def look(self, now: float) -> list[To]:
        """Hand out copies of overdue items."""
        self.now = max(self.now, now)
        return self._hand_out()

    def has_items(self, worker: int) -> bool:
        queue = self._open()
        return queue is not None and queue.has(worker)

    def due_at(self) -> float | None:
        """Return when to call `look`, because a waiting worker may get a copy of an overdue item then."""
        queue = self._open()
        return None if queue is None else self.dispatch.due_at(queue)

    def waits_for(self) -> str:
        """Describe what it waits for, for reports of deadlocks."""
        pending = self.pending
        if pending is None:
            return "coordinates, and has not started"
        silent = [str(server) for server in pending.servers if server not in pending.answers]
        if silent or pending.queue is None:
            return f"waits for {', '.join(silent)} to answer command {pending.command.number}"
        held = [f"{item} (worker {w})" for w, held in pending.queue.held.items() for item in held.work_items]
        return (
            f"waits for work items {', '.join(held) or 'that no worker has'}; to be handed out: {pending.queue.fresh}"
        )

    def _open(self) -> WorkQueue | None:
        pending = self.pending
        return None if pending is None or self.over or pending.ready() else pending.queue

    def _hand_out(self) -> list[To]:
        queue = self._open()
        if queue is None or self.pending is None:
            return []
        outs = self.dispatch.hand_out(queue, self.pending.at_version, self.now)
        self.journal.backups = self.dispatch.backups
        return outs


class FullBatchDuty:
    """Connects a `FullBatchRun` to the run; when `coordinate` returns, the run ends."""

    def __init__(self, state: RunState, full_batch: FullBatchRun, shutdown: RunEnd) -> None:
        self.state = state
        self.full_batch = full_batch
        self.shutdown = shutdown

    def start(self, now: float) -> list[CoordinatorOutput]:
        """Start the coordinator part: all blocks have their initial values."""
        state = self.state
        assert state.plan and state.welcome
        servers = [state.servers[index] for index in sorted(state.servers)]
        journal = self.full_batch.journal
        journal.join, journal.plan, journal.welcome = state.join, state.plan, state.welcome
        journal.servers = tuple((server.peer, server.address) for server in servers)
        peers = tuple(server.peer for server in servers)
        first = peers[state.welcome.owners[0]]
        return self._to_send(
            self.full_batch.start(EvaluationWorkers(state.plan, peers, first, state.settings.seed), now)
        )

    def resume(self, now: float) -> list[CoordinatorOutput]:
        """Continue from the journal of the previous coordinator: the servers have the parameters."""
        state, journal = self.state, self.full_batch.journal
        state.join, state.plan, state.welcome = journal.join, journal.plan, journal.welcome
        state.servers = {peer.index: ServerState(peer, address, ready=True) for peer, address in journal.servers}
        state.enter(Phase.RUNNING)
        state.events.append(events.Returned(at_s=now, node="coordinator"))
        return self.start(now)

    def answered(self, server: Peer, message: Answer | Evaluated, now: float) -> list[CoordinatorOutput]:
        return self._to_send(self.full_batch.receive(server, message, now))

    def requested(self, worker: Peer, message: LeaseRequest, now: float) -> list[CoordinatorOutput]:
        return self._to_send(self.full_batch.want(worker, now, message.idle))

    def delivered(self, worker: Peer, message: Return, now: float) -> list[CoordinatorOutput]:
        size = self.state.settings.workers_per_replica
        return self._to_send(self.full_batch.returned(worker, message.portion, message.lease, now, size))

    def forget(self, worker: WorkerState, now: float, ended: bool = False) -> list[CoordinatorOutput]:
        """Hand what a worker has not delivered to others."""
        if self.state.phase is not Phase.RUNNING:
            return []
        gone = ended or not worker.connected
        if fatal := self.full_batch.forget(worker.peer.index, gone, died=not worker.connected):
            return self.shutdown.stop("failed", fatal, FailureCause.WORKERS_DIED)
        return self.look(now)

    def look(self, now: float) -> list[CoordinatorOutput]:
        return self._to_send(self.full_batch.look(now))

    def due_at(self) -> float | None:
        """Return when to call `look`, because a worker may be overdue then; None: never."""
        return self.full_batch.due_at() if self.state.phase is Phase.RUNNING else None

    def has_items(self, worker: WorkerState) -> bool:
        """Return whether a worker has work items of the evaluation that it has not delivered."""
        return self.state.phase is Phase.RUNNING and self.full_batch.has_items(worker.peer.index)

    def tick(self, now: float) -> list[CoordinatorOutput]:
        return self._to_send(self.full_batch.tick(now)) if self.state.phase in (Phase.RUNNING, Phase.FINISHING) else []

    def _to_send(self, sent: list[To]) -> list[CoordinatorOutput]:
        outs = [CoordinatorOutput(to, message) for to, message in sent]
        if not self.full_batch.over:
            return outs
        if self.state.phase is Phase.RUNNING and self.full_batch.error:
            return outs + self.shutdown.stop("failed", f"the strategy failed: {self.full_batch.error}")
        if self.state.phase is Phase.RUNNING:
            return outs + self.shutdown.flush()
        return outs + self.shutdown.when_all_ended()
