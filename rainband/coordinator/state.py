"""What the coordinator knows of its run: the nodes, the plan, how far it is. Shared by all its duties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rainband.protocol import events
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Address, Dataset, Heartbeat, Join, Message, Peer, Report, Welcome

if TYPE_CHECKING:
    from rainband.coordinator.full_batch import FullBatchRun


class CoordinatorOutput(NamedTuple):
    """A message to send, and the bytes that go with it."""

    to: Peer
    message: Message
    body: bytes | None = None


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator must know from the command line."""

    num_workers: int
    num_servers: int
    seed: int = 0
    failure_timeout_s: float = 5.0
    model_path: str = ""
    optimizers: tuple[str, ...] = ()  # module:Class of optimizers that servers may import besides torch's own
    workers_per_replica: int = (
        1  # workers that compute one model together, in the order of their numbers; the first leads
    )

    @property
    def num_replicas(self) -> int:
        return self.num_workers // self.workers_per_replica


@dataclass
class WorkerState:
    """What is known of one worker."""

    peer: Peer
    address: Address | None = None  # where the others of its team reach it
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    heartbeat_at: float = 0.0
    worked_at: float = 0.0  # when its acknowledged pushes last grew
    slowest_s: float = 0.0  # the longest it took between two, while it worked
    first_s: float = 0.0  # how long it took to the first; 0: it has not come to that
    connected: bool = True
    here: bool = True  # alive and working in time; otherwise it is not waited for
    ended: bool = False
    excused: bool = False  # not here by its own word: the run does not end without it
    leases: dict[int, int] = field(default_factory=dict)  # portion -> lease number
    heartbeats: list[tuple[float, Heartbeat]] = field(default_factory=list)  # the last few, and when they came


@dataclass
class ServerState:
    """What is known of one server."""

    peer: Peer
    address: Address
    ready: bool = False
    flushed: bool = False
    report: Report | None = None
    full: frozenset[int] = frozenset()  # of the report
    silent_ticks: int = 0  # since it was heard of


class RunState:
    """What is known. Who changes what is said in the duties; here are only questions."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.full_batch: FullBatchRun | None = None  # drives the third half of a strategy that has one
        self.phase = "forming"  # forming, loading, running, flushing, finishing, concluding, over
        self.outcome = "finished"
        self.reason = ""
        self.join: Join | None = None  # of the worker that came first: the others must fit
        self.plan: DataPlan | None = None
        self.welcome: Welcome | None = None
        self.dataset: Dataset | None = None  # what own loops draw from
        self.planning: set[int] = set()  # servers that have yet to hear of it
        self.workers: dict[int, WorkerState] = {}
        self.servers: dict[int, ServerState] = {}
        self.missing: set[int] = set()  # workers that will not come
        self.live: int | None = None  # workers that are here; None: count again
        self.last_loss = ""
        self.reassigned = 0
        self.events: list[events.AnyEvent] = []

    # ---- the workers -----------------------------------------------------------------------------------------------

    def connected(self) -> list[WorkerState]:
        return [w for w in self.workers.values() if w.connected]

    def num_live(self) -> int:
        if self.live is None:
            self.live = sum(w.here and not w.ended and not self.rank_in_replica(i) for i, w in self.workers.items())
        return self.live

    def all_have_ended(self) -> bool:
        """All who are waited for: those who are here, and those who are away by their own word."""
        return not self.num_live() and all(
            w.ended for w in self.workers.values() if w.connected and (w.here or w.excused)
        )

    # ---- teams: several workers that compute one model together, under one lease -------------------------------------

    def rank_in_replica(self, worker: int) -> int:
        """A worker's place in its team; 0: it leads, and has the leases."""
        return worker % self.settings.workers_per_replica

    def replica_of(self, worker: int) -> list[WorkerState]:
        return [self.workers[i] for i in self.replica_indices(worker) if i in self.workers]

    def replica_indices(self, worker: int) -> range:
        """Return the numbers of the workers that compute one model together with this one, itself included."""
        first = worker - self.rank_in_replica(worker)
        return range(first, first + self.settings.workers_per_replica)

    def replica_peers(self, worker: int) -> list[WorkerState]:
        if self.settings.workers_per_replica == 1:
            return []
        return [peer_state for peer_state in self.replica_of(worker) if peer_state.peer.index != worker]

    def is_complete(self, worker: int) -> bool:
        """Are all of its team connected? They can begin, and go on, only together."""
        return sum(peer_state.connected for peer_state in self.replica_of(worker)) == self.settings.workers_per_replica

    def addresses(self, worker: int) -> tuple[Address, ...]:
        return tuple(peer_state.address for peer_state in self.replica_of(worker) if peer_state.address is not None)

    def note_loss(self, peer: Peer, now: float, why: str) -> None:
        self.last_loss = f"{peer} was the last ({why})"
        self.events.append(events.Lost(at_s=now, node=str(peer), why=why))

    # ---- the data --------------------------------------------------------------------------------------------------

    def is_custom_loop(self) -> bool:
        return self.join is not None and self.join.custom_loop

    def has_data(self) -> bool:
        return not self.is_custom_loop() or (self.dataset is not None and not self.planning)

    def knows_its_end(self) -> bool:
        return (
            self.has_data() and self.full_batch is None and not (self.dataset is not None and self.dataset.epochs == 0)
        )

    # ---- the marks -------------------------------------------------------------------------------------------------

    def reports(self) -> list[Report]:
        return [s.report for s in self.servers.values() if s.report is not None]

    def is_done(self, portion: int) -> bool:
        """Whether the marks of every block say so."""
        enough = len(self.reports()) >= max(1, len(self.servers))
        return enough and all(
            s.report is None or not s.report.blocks or portion < s.report.first_open or portion in s.full
            for s in self.servers.values()
        )

    def batches_done(self) -> int:
        """How far it is: what every block has had."""
        reports = [r for r in self.reports() if r.blocks]
        holders = len(self.servers) if self.settings.num_servers else self.settings.workers_per_replica
        return min((r.accepted for r in reports), default=0) if len(self.reports()) >= holders else 0
