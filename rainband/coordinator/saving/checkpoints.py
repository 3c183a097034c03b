"""Decides when a checkpoint is written, and collects what the nodes have written for it.

Servers write their blocks, and one worker what only workers have: its buffers, or, where workers have the optimizer,
the whole state at the end of a round. The runtime makes a checkpoint of the files, and reports when it is there.
Training goes on meanwhile; a checkpoint that fails costs nothing but a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rainband.coordinator.journal import CommandPosition
from rainband.coordinator.state import CoordinatorOutput, Phase, RunState, WorkerState
from rainband.protocol import events
from rainband.protocol.messages import Peer, Saved, TakeSnapshot
from rainband.protocol.saved_state import SavedBlock, SavedFile, name_of
from rainband.strategy import Requirements

NEVER_S = 1e12
RETRY_S = 30.0  # after a failure; not more often than checkpoints are written anyway
MARGIN_ROUNDS = 2  # of the first try: rounds from now until the one at which blocks are copied
MAX_MARGIN_ROUNDS = 1 << 16


@dataclass
class Collected:
    """A checkpoint under way."""

    number: int
    folder: str
    began_at: float
    final: bool  # the run is stopped, and ends with it
    waiting: set[Peer]  # nodes that have not written their part
    files: list[SavedFile] = field(default_factory=list)
    blocks: list[SavedBlock] = field(default_factory=list)
    step: int = 0
    position: CommandPosition | None = None  # of a full-batch strategy


class Checkpoints:
    """The checkpoints of a run. One is written at a time."""

    def __init__(self, state: RunState, requires: Requirements) -> None:
        self.state = state
        self.every_s = state.settings.checkpoint_every_s
        self.in_rounds = requires.waits == "rounds" and requires.servers
        self.by_workers = not requires.servers and not requires.shared_memory  # which one server writes
        self.now = 0.0  # of the last tick
        self.number = 0
        self.next_at: float | None = None  # None: the run has not begun
        self.margin = MARGIN_ROUNDS
        self.requested = False  # one is wanted as soon as possible
        self.current: Collected | None = None
        self.complete: Collected | None = None  # all parts are written: the runtime makes a checkpoint of it
        self.failed: dict[int, str] = {}  # number -> folder; others may still write their part
        self.left: list[str] = []  # folders of those: the runtime removes the files
        self.last_step = -1  # of the last checkpoint
        self.done_before = 0  # batches, when the last one began
        self.last_name = ""  # its folder
        self.last_blocks: tuple[SavedBlock, ...] = ()  # in it
        self.over = False  # the final one was written, or could not be

    # ---- when ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[CoordinatorOutput]:
        """Begin a checkpoint if one is due."""
        self.now = now
        if self.state.phase is not Phase.RUNNING or not (self.every_s or self.requested):
            return []
        if self.next_at is None:
            self.next_at = now + (self.every_s or NEVER_S)
        if self.current is not None or self.complete is not None or not (self.requested or now >= self.next_at):
            return []
        if self._done() == self.done_before:
            return []  # nothing has changed
        return self._begin(now)

    def look(self, now: float) -> list[CoordinatorOutput]:
        """Begin a checkpoint that is due: a full-batch run has come to a moment at which that is possible."""
        return self.tick(now) if self.next_at is not None and now >= self.next_at else []

    def request(self, now: float) -> list[CoordinatorOutput]:
        """Begin a checkpoint now, or after the one that is being written."""
        self.requested = True
        return self.tick(now)

    def before_the_end(self, worker: WorkerState | None = None) -> list[CoordinatorOutput]:
        """Begin the checkpoint of a run that is stopped: nothing is under way any more.

        Of a full-batch run, the moment is the one at which its strategy learns that it is to stop: what it does then
        is not part of the training.
        """
        if self.state.full_batch is not None and worker is not None:
            self.over = self.over or not self.is_awaited
            return []
        if self.over or self.is_awaited:
            return []
        if not self.every_s or self.state.outcome != "stopped" or not self._done():
            self.over = True
            return []
        self.current = None  # what was under way is replaced
        return self._begin(self.now, final=True, worker=worker)

    def before_the_last_flush(self, worker: WorkerState) -> list[CoordinatorOutput]:
        """Begin the checkpoint of a run in rounds that is stopped: a flush applies part of a round."""
        return self.before_the_end(worker) if self.in_rounds else []

    def under_way(self) -> str:
        """Return the folder of the checkpoint that the nodes are writing; "" if there is none."""
        return "" if self.current is None else self.current.folder

    @property
    def is_awaited(self) -> bool:
        """True while the run must not end, because its last checkpoint is being written."""
        return not self.over and self.current is not None and self.current.final

    def _begin(self, now: float, final: bool = False, worker: WorkerState | None = None) -> list[CoordinatorOutput]:
        state = self.state
        worker = worker or self._worker()
        if worker is None:
            return []  # none has joined again yet
        at_version, position, done = -1, None, self._done()
        if state.full_batch is not None:
            position = state.full_batch.position()
            if position is None:
                return []  # at the next evaluation
            at_version, done = position.version, position.step
        if self.in_rounds and not final:
            at_version = self._newest_round() + self.margin
            if at_version >= self._num_rounds():
                self.next_at, self.requested = now + (self.every_s or NEVER_S), False
                return []  # the run is over before
        self.number += 1
        servers = [] if self.by_workers else [s.peer for s in state.servers.values()]
        self.done_before = done
        name = name_of(done)
        workers = [other.peer for other in state.replica_of(worker.peer.index)]  # each has a part of the model
        self.current = Collected(self.number, name, now, final, {*workers, *servers}, step=done, position=position)
        snapshot = TakeSnapshot(self.number, name, at_version, at_once=final and self.in_rounds)
        return [CoordinatorOutput(peer, snapshot) for peer in (*servers, *workers)]

    def _done(self) -> int:
        """Return the batches that are done, about, where only the workers know."""
        if self.state.full_batch is not None:
            return self.state.full_batch.requested.batches
        if not self.state.shares_batches():
            return self.state.batches_done() if self.state.has_data() else 0
        restored = self.state.settings.restore
        steps = max((worker.heartbeat.steps for worker in self.state.workers.values()), default=0)
        return steps + (restored.step if restored and steps else 0)

    def _worker(self) -> WorkerState | None:
        """Return the worker that writes: the first of this machine, whose disk is the one of the run."""
        state = self.state
        local = state.settings.local_ranks
        ready = [w for w in state.connected() if w.active and not w.ended and state.is_complete(w.peer.index)]
        return min(ready, key=lambda w: (w.peer.index not in local, w.peer.index), default=None)

    def _newest_round(self) -> int:
        reports = [report for report in self.state.reports() if report.blocks]
        return max((-(-report.updates // len(report.blocks)) for report in reports), default=0)

    def _num_rounds(self) -> int:
        assert self.state.plan
        return self.state.plan.rounds_per_epoch * self.state.plan.epochs

    # ---- what the nodes have written ----------------------------------------------------------------------------

    def saved(self, sender: Peer, message: Saved, now: float) -> list[CoordinatorOutput]:
        """Take the part that a node has written."""
        current = self.current
        if message.number in self.failed:
            self.left.append(self.failed[message.number])
        if current is None or message.number != current.number or sender not in current.waiting:
            return []
        if message.newest >= 0 and current.position is not None:
            self._failed("a server has passed the evaluation at which it began", now)
            return []
        if message.newest >= 0:
            return self._later(message.newest, now)
        if message.error:
            self._failed(message.error, now)
            return []
        current.files += message.files
        current.blocks += message.blocks
        current.step = max(current.step, message.step)
        if not message.more:
            current.waiting.discard(sender)
        if not current.waiting:
            self._all_written(now)
        return []

    def _later(self, newest: int, now: float) -> list[CoordinatorOutput]:
        """Try again at a later round: the blocks were faster than the message."""
        assert self.current is not None
        self.margin = min(2 * self.margin, MAX_MARGIN_ROUNDS)
        at_version, self.number = newest + self.margin, self.number + 1
        if at_version >= self._num_rounds():
            self.current = None
            self.next_at, self.requested = now + (self.every_s or NEVER_S), False
            return []
        self.current = Collected(
            self.number, self.current.folder, self.current.began_at, False, {*self._servers(), *self._workers()}
        )
        snapshot = TakeSnapshot(self.number, self.current.folder, at_version)
        return [CoordinatorOutput(peer, snapshot) for peer in self.current.waiting]

    def _servers(self) -> Iterable[Peer]:
        return [server.peer for server in self.state.servers.values()]

    def _workers(self) -> Iterable[Peer]:
        worker = self._worker()
        return [] if worker is None else [other.peer for other in self.state.replica_of(worker.peer.index)]

    def _all_written(self, now: float) -> None:
        current, plan = self.current, self.state.plan
        assert current is not None and plan is not None
        versions = {block.version for block in current.blocks}
        if self.in_rounds and len(versions) > 1:
            self._failed("the servers' blocks are not at one round, because a worker was lost", now)
            return
        if current.position is not None:
            self.complete, self.current = current, current if current.final else None
            return
        counts = [block.accepted_set(plan).count for block in current.blocks]
        current.step = min(counts, default=current.step)
        self.complete, self.current = current, current if current.final else None

    def lost(self, peer: Peer, now: float) -> None:
        """Give a checkpoint up, part of which was to be written by a node that is lost."""
        if self.current is not None and peer in self.current.waiting:
            self._failed(f"{peer} was lost while it wrote its part", now)

    def give_up(self, now: float) -> None:
        """Give up what is under way: its nodes are lost."""
        if self.current is not None:
            self._failed("its workers were lost", now)
        self.done_before = max(0, self.last_step)

    # ---- what the runtime has made of it ------------------------------------------------------------------------

    def committed(self, collected: Collected, name: str, now: float, error: str = "") -> None:
        """Note that the checkpoint is there, under this name, or why it is not."""
        if self.complete is collected:  # the final one may be complete already
            self.complete = None
        if error:
            self._leave(collected)
            self._failed(error, now)
            return
        self.last_step, self.last_name, self.last_blocks = collected.step, name, tuple(collected.blocks)
        self.next_at, self.requested = now + (self.every_s or NEVER_S), False
        self.state.events.append(
            events.CheckpointWritten(
                at_s=now,
                name=name,
                step=collected.step,
                num_bytes=sum(file.num_bytes for file in collected.files),
                seconds=now - collected.began_at,
            )
        )
        self._end(collected)

    def _failed(self, why: str, now: float) -> None:
        failed, self.current = self.current, None
        earlier = f"The last one is that of step {self.last_step}." if self.last_name else "There is none yet."
        self.state.events.append(
            events.Warned(at_s=now, text=f"a checkpoint was not written: {why.rstrip('.')}. {earlier}")
        )
        self.next_at, self.requested = now + min(self.every_s or NEVER_S, RETRY_S), False
        if failed is not None:
            self._leave(failed)
            self._end(failed)

    def _leave(self, failed: Collected) -> None:
        self.failed[failed.number] = failed.folder
        self.left.append(failed.folder)

    def _end(self, collected: Collected) -> None:
        if collected.final:
            self.current, self.over = None, True
