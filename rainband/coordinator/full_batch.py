"""Drives a strategy's third half, `lead`: its commands to the servers, its evaluations, its end. No I/O, no clock.

The coordinator hands in what comes from servers and workers; what goes out are pairs of a node and a message. One
command is under way at a time, and sent again until every server has answered it. What came of it is in the journal
before the next one leaves: `lead` can be run again from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from rainband.coordinator.journal import Journal, digest
from rainband.coordinator.pending_command import Computed, Evaluating, PendingCommand
from rainband.coordinator.work_queue import WorkerPace, WorkQueue
from rainband.coordinator_api import CoordinatorApi, Evaluation
from rainband.errors import RainbandError, Stop
from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Answer, AssignItems, Command, Evaluated, ItemsDelivered, Message, Peer
from rainband.protocol.steps import Steps
from rainband.protocol.vectors import Operation

FATAL_DEATHS = 3  # a cell that cost so many workers their lives ends the run
MOST_AFTER_STOP = 100  # commands of a strategy that was told to stop
To = tuple[Peer, Message]
Coordinate = Callable[[CoordinatorApi], Coroutine[Any, Any, None]]


class EvaluationWorkers(NamedTuple):
    """Who takes part: known when all blocks have their first values."""

    plan: DataPlan
    servers: tuple[Peer, ...]
    first: Peer  # the server that has block 0, and counts the loss
    seed: int


class FullBatchRun:
    """What a strategy's `lead` may touch, and who drives it."""

    def __init__(
        self, coordinate: Coordinate, notes: list[events.AnyEvent] | None = None, journal: Journal | None = None
    ) -> None:
        """Each iteration is added to `notes`. `journal`: that of a coordinator that came before."""
        self.coordinate = coordinate
        self.journal = journal or Journal()
        self.term = self.journal.term
        self.found = len(self.journal.entries)  # answers to commands of the coordinator that came before
        self.crew: EvaluationWorkers | None = None
        self.steps: Steps[None] | None = None
        self.pending: PendingCommand | None = None
        self.number = 0
        self.pace = WorkerPace()
        self.wanting: dict[int, Peer] = {}  # workers that asked for cells, longest first
        self.idle: set[int] = set()  # of these, who has nothing to do
        self.working: dict[int, Peer] = {}  # workers that have ever asked, and are here
        self.deaths: dict[int, int] = {}
        self.outs: list[To] = []
        self.notes: list[events.AnyEvent] = [] if notes is None else notes
        self.now = 0.0
        self.over = False
        self.error = ""
        self.stopping = False
        self.cut_short = False  # in the middle of an evaluation, and the strategy has yet to hear of it
        self.after_stop = 0  # commands
        self.samples = 0  # in evaluations that are over
        self.batches = self.work_items = self.evaluations = 0  # asked for so far
        self.backups = self.journal.backups

    # ---- what a strategy may do ------------------------------------------------------------------------------------

    @property
    def num_items(self) -> int:
        assert self.crew is not None
        return self.crew.plan.num_portions

    @property
    def seed(self) -> int:
        assert self.crew is not None
        return self.crew.seed

    def compute(self, *operations: Operation) -> Awaitable[tuple[float, ...]]:
        return Computed(self._command(operations, ()))

    def evaluate(self, *operations: Operation, work_items: Sequence[int] | None = None) -> Awaitable[Evaluation]:
        assert self.crew is not None
        if self.stopping:
            raise Stop  # nobody is left to compute it
        chosen = tuple(range(self.num_items)) if work_items is None else tuple(sorted(set(work_items)))
        assert chosen, "an evaluation has at least one cell"
        self.evaluations += 1
        self.work_items += len(chosen)
        self.batches += sum(map(self.crew.plan.batches_in, chosen))
        return Evaluating(self._command(operations, chosen))

    def report(self, iteration: int, loss: float, gradient_norm: float, step: float, end: str = "") -> None:
        if self.number <= self.found:
            return  # it was told by the coordinator that came before
        self.notes.append(
            events.IterationDone(
                at_s=self.now,
                iteration=iteration,
                loss=loss,
                gradient_norm=gradient_norm,
                step=step,
                evaluations=self.evaluations,
                work_items=self.work_items,
                backups=self.backups,
                end=end,
            )
        )

    def _command(self, operations: Sequence[Operation], work_items: tuple[int, ...]) -> PendingCommand:
        assert self.crew is not None
        assert self.pending is None or self.pending.ready(), "await the command before giving another"
        self.after_stop += self.stopping
        if self.after_stop > MOST_AFTER_STOP:
            raise Stop  # it would never end by itself
        self.number += 1
        command = Command(self.term, self.number, tuple(operations), len(work_items))
        self.pending = PendingCommand(command, self.crew.servers, self.crew.first, work_items)
        if self.number <= self.found:
            self._look_up(self.pending)
        else:
            self.outs += [(server, command) for server in self.crew.servers]
        return self.pending

    def _look_up(self, pending: PendingCommand) -> None:
        known = self.journal.entries[self.number - 1]
        if known.asked != digest(pending.command):
            raise RainbandError(
                f"the coordinator was started again, and lead asked for another command {self.number} than before: "
                "it must depend on nothing but its settings, the seed and what it is answered."
            )
        pending.known = known
        self.samples += known.samples

    # ---- driving it ------------------------------------------------------------------------------------------------

    def start(self, crew: EvaluationWorkers, now: float) -> list[To]:
        self.crew, self.now = crew, now
        self.steps = Steps(self.coordinate(self))
        return self._go_on()

    def _go_on(self, thrown: BaseException | None = None) -> list[To]:
        """Let the coroutine run until it waits for the servers."""
        assert self.steps is not None
        try:
            awaited = self.steps.go_on(thrown)
            self.over = self.steps.over
            if not self.over and (awaited is None or awaited is not self.pending):
                raise RainbandError(f"lead may only await what its coordinator gave last, not {awaited!r}")
        except Exception as error:
            self.over, self.error = True, f"{type(error).__name__}: {error}"
        outs, self.outs = self.outs, []
        return outs + self._hand_out()

    def stop(self) -> list[To]:
        """End early: the strategy may still give commands, but nobody computes for it.

        Arithmetic goes on until the next evaluation is asked for: what follows a search is part of its iteration.
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
        self.pending.work_items = ()  # the sum of an evaluation is not waited for, only what was sent to servers
        return self._throw_stop() if self.pending.ready() else []

    def _throw_stop(self) -> list[To]:
        self.cut_short = False
        return self._go_on(Stop())

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, sender: Peer, message: Answer | Evaluated, now: float) -> list[To]:
        """From a server."""
        self.now = now
        pending = self.pending
        if pending is None or self.over or sender not in pending.servers:
            return []
        match message:
            case Answer() if (message.term, message.number) == (self.term, pending.command.number):
                pending.answers[sender] = message
                if pending.work_items and len(pending.answers) == len(pending.servers) and pending.hand_out is None:
                    pending.hand_out = WorkQueue(pending.work_items, self.pace)
            case Evaluated() if sender in pending.answers and message.at_version == pending.answers[sender].version:
                pending.evaluated[sender] = message
        if not pending.ready():
            return self._hand_out()
        if self.cut_short:
            return self._throw_stop()
        if not pending.refused():
            self.journal.entries.append(pending.entry())
            self.samples += self.journal.entries[-1].samples
        return self._call_off(pending) + self._go_on()

    def _call_off(self, pending: PendingCommand) -> list[To]:
        """An evaluation is over: who still computes what others have delivered may leave off."""
        copied = pending.hand_out.copied() if pending.hand_out is not None else {}
        return [
            (self.working[w], ItemsDelivered(pending.at_version, work_items))
            for w, work_items in copied.items()
            if w in self.working
        ]

    def want(self, worker: Peer, now: float, idle: bool = True) -> list[To]:
        """A worker asks for cells; unless it is idle, while it computes its last one."""
        self.now = now
        self.working[worker.index] = self.wanting[worker.index] = worker
        if idle:
            self.idle.add(worker.index)
        return self._hand_out()

    def returned(self, worker: Peer, work_item: int, at_version: int, now: float) -> list[To]:
        """A worker has delivered a cell."""
        self.now = now
        hand_out = self._open()
        outs: list[To] = []
        if hand_out is not None and self.pending is not None and at_version == self.pending.at_version:
            others = hand_out.returned(worker.index, work_item, now)
            outs += [
                (self.working[other], ItemsDelivered(at_version, (work_item,)))
                for other in others
                if other in self.working
            ]
        return outs + self._hand_out()

    def forget(self, worker: int, gone: bool, died: bool) -> str:
        """A worker is late or gone; says so if what it was at has ended too many.

        Who is only late has asked, and does not ask again: it still gets what is left when it is its turn.
        """
        if gone:
            self.wanting.pop(worker, None)
            self.idle.discard(worker)
        self.working.pop(worker, None)
        hand_out = self._open()
        work_item = hand_out.forget(worker) if hand_out is not None else None
        if work_item is None or not died:
            return ""
        self.deaths[work_item] = self.deaths.get(work_item, 0) + 1
        return f"cell {work_item} ended {FATAL_DEATHS} workers" if self.deaths[work_item] >= FATAL_DEATHS else ""

    def tick(self, now: float) -> list[To]:
        """Say again what was not answered."""
        self.now = now
        pending = self.pending
        if pending is None or self.over or pending.ready():
            return []
        done = pending.evaluated if pending.work_items else pending.answers
        again: list[To] = [(server, pending.command) for server in pending.servers if server not in done]
        return again + self._hand_out()

    def look(self, now: float) -> list[To]:
        """Someone may be overdue by now."""
        self.now = max(self.now, now)
        return self._hand_out()

    def due_at(self) -> float | None:
        """When to look again, because somebody who waits may get a copy of what is overdue then."""
        hand_out = self._open()
        idle = [w for w in self.wanting if w in self.idle or not hand_out or not hand_out.has(w)]
        return hand_out.next_due(idle) if hand_out is not None and idle else None

    def waits_for(self) -> str:
        """In words, for who looks for a deadlock."""
        pending = self.pending
        if pending is None:
            return "leads, and has not begun"
        silent = [str(server) for server in pending.servers if server not in pending.answers]
        if silent or pending.hand_out is None:
            return f"waits for {', '.join(silent)} to answer command {pending.command.number}"
        held = [
            f"{work_item} (worker {w})" for w, held in pending.hand_out.held.items() for work_item in held.work_items
        ]
        return f"waits for cells {', '.join(held) or 'that nobody has'}; to be handed out: {pending.hand_out.fresh}"

    def _open(self) -> WorkQueue | None:
        pending = self.pending
        return None if pending is None or self.over or pending.ready() else pending.hand_out

    def _hand_out(self) -> list[To]:
        hand_out = self._open()
        if hand_out is None or self.pending is None:
            return []
        outs: list[To] = []
        before = hand_out.backups
        for index, peer in list(self.wanting.items()):
            if work_items := hand_out.give(index, len(self.working), self.now, index in self.idle):
                del self.wanting[index]
                self.idle.discard(index)
                outs.append((peer, AssignItems(self.pending.at_version, work_items)))
        self.backups += hand_out.backups - before
        self.journal.backups = self.backups
        return outs
