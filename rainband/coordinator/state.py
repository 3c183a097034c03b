"""State of the run: nodes, data plan, phase. Read by every class of the coordinator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Address, Dataset, Heartbeat, Join, Message, Peer, Report, Welcome
from rainband.protocol.saved_state import Restore
from rainband.server import tree

if TYPE_CHECKING:
    from rainband.coordinator.full_batch import FullBatchRun


class CoordinatorOutput(NamedTuple):
    """A message to send, and the bytes that go with it."""

    to: Peer
    message: Message
    body: bytes | None = None


class Target(msgspec.Struct, frozen=True):
    """The value of a metric at which a run ends."""

    metric: str
    value: float

    @property
    def is_upper(self) -> bool:
        """Return True if smaller values are better."""
        return any(word in self.metric.lower() for word in ("loss", "error", "perplexity"))

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the last measured metrics reach it; NaN reaches nothing."""
        measured = metrics.get(self.metric, math.nan)
        return measured <= self.value if self.is_upper else measured >= self.value

    def __str__(self) -> str:
        return f"{self.metric} of at {'most' if self.is_upper else 'least'} {self.value:g}"


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run that the coordinator must know."""

    num_workers: int
    num_servers: int
    seed: int = 0
    failure_timeout_s: float = 5.0
    stuck_timeout_s: float = 600.0  # where workers share each batch: how long others wait for one with heartbeats
    model_path: str = ""
    optimizers: tuple[str, ...] = ()  # module:Class of optimizers that servers may import besides torch's own
    workers_per_replica: int = 1  # with consecutive ranks; the first of them has the leases
    num_local: int | None = None  # workers of the run's own machine, with the lowest ranks; None: all
    joinable: bool = False  # more workers may join from other machines
    restarts: bool = False  # the runtime starts lost workers of replicas again
    checkpoint_every_s: float = 0.0  # 0: no checkpoints
    restore: Restore | None = None  # the checkpoint from which the run continues
    target: Target | None = None  # at which the run ends
    min_workers: int = 0  # workers that must have joined before the run begins
    tree_arity: int = 0  # of a tree of servers, of which the first one has all blocks; 0: there is no tree
    copies: int = 1  # of each server
    bounded_events: bool = True  # per second; a simulation, whose seconds are virtual, bounds their number itself

    @property
    def local_ranks(self) -> range:
        """Return the ranks of the workers that the run's own machine starts."""
        return range(self.num_workers if self.num_local is None else self.num_local)

    @property
    def num_replicas(self) -> int:
        return self.num_workers // self.workers_per_replica

    @property
    def num_owners(self) -> int:
        """Return the number of servers that own blocks: the first ones."""
        return min(1, self.num_servers) if self.tree_arity else self.num_servers

    def via(self, worker: int) -> int:
        """Return the server of a tree that a worker uses; -1: the owners of the blocks."""
        in_tree = self.tree_arity and self.num_servers
        return tree.server_of(worker, self.num_servers, self.tree_arity) if in_tree else -1


class Phase(StrEnum):
    """The phases of a run. The names are those of events and files."""

    FORMING = "forming"  # nodes join
    LOADING = "loading"  # a worker sends the servers the initial parameters
    RUNNING = "running"
    FLUSHING = "flushing"  # the servers apply what is buffered
    FINISHING = "finishing"  # the workers' strategies return
    CONCLUDING = "concluding"  # a worker evaluates and saves the model
    OVER = "over"
    REPLACED = "replaced"  # another coordinator continues the run from the journal


BEFORE_THE_END = (Phase.FORMING, Phase.LOADING, Phase.RUNNING)


class FailureCause(Enum):
    """The cause of a failure, for programs; `RunState.reason` is the text for people."""

    OTHER = auto()
    NO_WORKER_LEFT = auto()
    WORKERS_DIED = auto()  # several, on the same batches
    SERVER_LOST = auto()
    COORDINATOR_LOST = auto()
    BOUND_EXCEEDED = auto()
    NOT_BALANCED = auto()


NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.LOADING, Phase.RUNNING, Phase.OVER}),  # running: there are no servers, or a journal
    Phase.LOADING: frozenset({Phase.RUNNING, Phase.OVER}),
    Phase.RUNNING: frozenset({Phase.FLUSHING, Phase.FINISHING, Phase.OVER, Phase.REPLACED}),  # finishing: stopped
    Phase.FLUSHING: frozenset({Phase.FINISHING, Phase.OVER}),
    Phase.FINISHING: frozenset({Phase.CONCLUDING, Phase.OVER}),
    Phase.CONCLUDING: frozenset({Phase.FINISHING, Phase.OVER}),  # finishing: every worker that could save was lost
    Phase.OVER: frozenset(),
    Phase.REPLACED: frozenset(),
}


@dataclass(slots=True)
class WorkerState:
    """The state of one worker."""

    peer: Peer
    address: Address | None = None  # where the other workers of its replica reach it
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    heartbeat_at: float = 0.0
    worked_at: float = 0.0  # when its acknowledged pushes last grew
    slowest_s: float = 0.0  # the longest interval between two pushes, while it worked
    first_s: float = 0.0  # the time to its first push; 0: there was none yet
    connected: bool = True
    active: bool = True  # alive and making progress; no worker waits for an inactive one
    held: tuple[int | None, int] = (None, 0)  # the worker that it waits for, and its own steps
    held_since: float = 0.0
    reported_stuck: bool = False  # others wait long for it
    described: bool = False  # its loop's data
    late: bool = False  # inactive by itself; the others of its replica are then inactive because of it
    ended: bool = False
    paused: bool = False  # by its own message: the run does not end without it
    leaving: bool = False  # it finishes its work item, and is then dismissed
    leases: dict[int, int] = field(default_factory=dict)  # portion -> lease number
    heartbeats: list[tuple[float, Heartbeat]] = field(default_factory=list)  # the last few, and when they arrived


@dataclass
class ServerState:
    """The state of one server."""

    peer: Peer
    address: Address
    ready: bool = False
    flushed: bool = False  # it has applied all that its update rules had buffered
    flushing: bool = False  # it was asked to, and has not answered
    report: Report | None = None
    full: frozenset[int] = frozenset()  # the complete portions of the report
    silent_s: float = 0.0  # since its last message
    reported_silent: bool = False
    cpu_s: float = 0.0  # of the processor, used so far
    memory_bytes: int = 0  # of the process, in use now

    def begins_to_flush(self) -> bool:
        """Return True if it is to be asked: its answer is not awaited."""
        begins = not self.flushing
        self.flushing = True
        return begins

    def has_flushed(self) -> None:
        self.flushed, self.flushing = True, False


class RunState:
    """The state of a run. It answers questions; the other classes of this package change it."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.full_batch: FullBatchRun | None = None  # of a strategy with a coordinator part
        self.phase = Phase.FORMING
        self.outcome = "finished"
        self.reason = ""
        self.cause: FailureCause | None = None
        self.join: Join | None = None  # of the first worker: the others must fit
        self.plan: DataPlan | None = None
        self.welcome: Welcome | None = None
        self.dataset: Dataset | None = None  # of custom training loops
        self.planning: set[int] = set()  # servers that do not know it yet
        self.workers: dict[int, WorkerState] = {}
        self.servers: dict[int, ServerState] = {}
        self.missing: set[int] = set()  # workers that will never join
        self.live: int | None = None  # active replicas; None: count again
        self.last_loss = ""
        self.refused: list[str] = []  # why workers were sent away that do not fit this run
        self.lost_after: int | None = None  # batches that every block had accepted when a server was lost
        self.reassigned = 0
        self.events: list[events.AnyEvent] = []

    def enter(self, phase: Phase) -> None:
        """Go to a phase; it may be the current one."""
        assert phase is self.phase or phase in NEXT[self.phase], f"a run does not go from {self.phase} to {phase}"
        self.phase = phase

    def fail(self, reason: str, cause: FailureCause = FailureCause.OTHER) -> None:
        self.outcome, self.reason, self.cause = "failed", reason, cause

    def fail_if_finished(self, reason: str, cause: FailureCause) -> None:
        """Let a run fail that would count as finished; one that was stopped keeps its outcome."""
        if self.outcome == "finished":
            self.fail(reason, cause)

    def take_events(self) -> list[events.AnyEvent]:
        """Return the events since the last call."""
        taken = self.events[:]
        self.events.clear()  # the same list: others add to it
        return taken

    def connected(self) -> list[WorkerState]:
        return [w for w in self.workers.values() if w.connected]

    def awaits_workers(self) -> bool:
        """Return whether a run without workers goes on: others may join from other machines, or are started again."""
        settings = self.settings
        firsts = range(0, settings.num_workers, settings.workers_per_replica)
        starts = settings.restarts and any(self.missing.isdisjoint(self.replica_indices(first)) for first in firsts)
        return (settings.joinable or starts) and self.outcome == "finished" and self.phase in BEFORE_THE_END

    def num_live(self) -> int:
        """Count the active replicas that have not ended."""
        if self.live is None:
            size = self.settings.workers_per_replica  # a replica has the rank of its first worker
            self.live = sum(w.active and not w.ended and i % size == 0 for i, w in self.workers.items())
        return self.live

    def all_have_ended(self) -> bool:
        """Return whether all workers that are waited for have ended: the active and the paused ones."""
        return not self.num_live() and all(
            w.ended for w in self.workers.values() if w.connected and (w.active or w.paused)
        )

    def report_loss(self, peer: Peer, now: float, why: str, state: events.Absence = "lost") -> None:
        self.last_loss = f"{peer} was the last ({why})"
        self.events.append(events.Lost(at_s=now, node=str(peer), why=why, state=state))

    # ---- replicas: several workers that compute one model together, under one lease ---------------------------------

    def rank_in_replica(self, worker: int) -> int:
        """Return a worker's rank in its replica; the one with rank 0 has the leases."""
        return worker % self.settings.workers_per_replica

    def replica_indices(self, worker: int) -> range:
        """Return the ranks of the workers that compute one model together with this one, itself included."""
        first = worker - self.rank_in_replica(worker)
        return range(first, first + self.settings.workers_per_replica)

    def replica_of(self, worker: int) -> list[WorkerState]:
        return [self.workers[i] for i in self.replica_indices(worker) if i in self.workers]

    def replica_peers(self, worker: int) -> list[WorkerState]:
        if self.settings.workers_per_replica == 1:
            return []
        return [other for other in self.replica_of(worker) if other.peer.index != worker]

    def leases_of(self, worker: WorkerState) -> dict[int, int]:
        """Return the leases that it works on: those of its replica."""
        first = self.workers.get(worker.peer.index - self.rank_in_replica(worker.peer.index))
        return {} if first is None else first.leases

    def is_complete(self, worker: int) -> bool:
        """Return whether its whole replica is connected: the workers of a replica start and go on only together."""
        replica = self.replica_of(worker)
        return len(replica) == self.settings.workers_per_replica and all(other.connected for other in replica)

    def addresses(self, worker: int) -> tuple[Address, ...]:
        return tuple(other.address for other in self.replica_of(worker) if other.address is not None)

    def is_custom_loop(self) -> bool:
        return self.join is not None and self.join.custom_loop

    def shares_batches(self) -> bool:
        """Return whether custom loops share each batch: their workers agree among themselves who computes what."""
        return self.join is not None and self.join.custom_loop and self.join.shares_batches

    def has_data(self) -> bool:
        return not self.is_custom_loop() or (self.dataset is not None and not self.planning)

    def knows_its_end(self) -> bool:
        """Return whether the number of batches is known: not of full-batch runs or loops without a number of epochs."""
        endless = self.dataset is not None and self.dataset.epochs == 0
        return self.has_data() and self.full_batch is None and not endless

    def reports(self) -> list[Report]:
        return [s.report for s in self.servers.values() if s.report is not None]

    def is_bounded(self) -> bool:
        """Return whether workers wait for those that have done less."""
        return any(report.limit is not None for report in self.reports())

    def is_done(self, portion: int) -> bool:
        """Return whether every block has accepted all batches of a portion."""
        for server in self.servers.values():
            report = server.report
            if report is None or (report.blocks and portion >= report.first_open and portion not in server.full):
                return False
        return bool(self.servers)

    def batches_done(self) -> int:
        """Count the batches that every block has accepted."""
        if self.lost_after is not None:
            return self.lost_after
        reports = [r for r in self.reports() if r.blocks]
        holders = len(self.servers) if self.settings.num_servers else self.settings.workers_per_replica
        return min((r.accepted for r in reports), default=0) if len(self.reports()) >= holders else 0
