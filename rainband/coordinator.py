"""The coordinator: who is there, which portions are leased to whom, what is done. A state machine, like the servers.

It stands in no data path. Time enters as an argument. Done is what the current owners' marks say, never what a
worker says. To take a lease back the portion is fenced at every owner; each answers with its sets, and only what
some block lacks is leased again, grouped by which blocks have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rainband import events
from rainband.blocks import Layout, cut, deal
from rainband.books import Books, Staleness, balance, balance_led, staleness_of
from rainband.buffers import BufferMean
from rainband.guard import Decision, Guard, Look
from rainband.leader import Crew, Lead, Leader, To
from rainband.messages import (
    Address,
    Answer,
    Ask,
    Assign,
    Away,
    Beat,
    Bye,
    Conclude,
    Concluded,
    Dataset,
    Dry,
    Ended,
    Evaluated,
    Failed,
    Finish,
    Flush,
    Forget,
    Go,
    Halt,
    Join,
    Lease,
    Message,
    Named,
    Peer,
    Planned,
    Ready,
    Report,
    Return,
    Revoke,
    ServerJoin,
    Sets,
    Tune,
    Want,
    Welcome,
)
from rainband.portions import Plan, choose_portion_batches, groups

FATAL_DEATHS = 3  # a portion that cost so many workers their lives ends the run
RATE_FROM_S, RATE_FROM = 0.25, 0.01  # a rate needs so long a time, or so much of the whole time, to be one
OPEN_ENDED = 1 << 20  # epochs in the plan of loops that have not said how many passes they make


class Out(NamedTuple):
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


@dataclass
class WorkerState:
    """What is known of one worker."""

    peer: Peer
    beat: Beat = field(default_factory=Beat)
    beat_at: float = 0.0
    worked_at: float = 0.0  # when its acknowledged pushes last grew
    slowest_s: float = 0.0  # the longest it took between two, while it worked
    connected: bool = True
    here: bool = True  # alive and working in time; otherwise it is not waited for
    ended: bool = False
    excused: bool = False  # not here by its own word: the run does not end without it
    leases: dict[int, int] = field(default_factory=dict)  # portion -> lease number
    beats: list[tuple[float, Beat]] = field(default_factory=list)  # the last few, and when they came


@dataclass
class ServerState:
    """What is known of one server."""

    peer: Peer
    address: Address
    ready: bool = False
    flushed: bool = False
    report: Report | None = None
    full: frozenset[int] = frozenset()  # of the report


class Coordinator:
    """Leads one run from the first join to the last goodbye."""

    def __init__(self, settings: RunSettings, lead: Lead | None = None) -> None:
        """`lead` is the third half of a strategy that has one."""
        self.settings = settings
        self.leader = None if lead is None else Leader(lead)
        self.phase = "forming"  # forming, loading, running, flushing, finishing, concluding, over
        self.outcome = "finished"
        self.reason = ""
        self.plan: Plan | None = None
        self.layout: Layout | None = None
        self.join: Join | None = None
        self.workers: dict[int, WorkerState] = {}
        self.servers: dict[int, ServerState] = {}
        self.waiting_joins: list[tuple[Peer, Join]] = []
        self.welcome: Welcome | None = None
        self.pool: list[int] = []  # fresh portions that may be leased now, in order
        self.next_fresh = 0
        self.numbers: dict[int, int] = {}  # portion -> its last lease number
        self.again: dict[int, tuple[tuple[int, ...], ...]] = {}  # portion -> groups to do again
        self.gathering: dict[int, dict[int, tuple[int, ...]]] = {}  # portion -> server -> its sets
        self.taken_from: dict[int, int] = {}  # portion -> the worker it was taken from last
        self.unconfirmed: dict[int, float] = {}  # returned as done, the marks do not say so yet
        self.last_loss = ""
        self.missing: set[int] = set()  # workers that will not come
        self.wanting: dict[int, None] = {}  # workers that asked for a lease, longest first
        self.live: int | None = None  # workers that are here; None: count again
        self.deaths: dict[int, int] = {}
        self.leased_again = 0
        self.metrics: dict[str, float] = {}
        self.buffers = BufferMean()
        self.concluder: int | None = None
        self.saved = False  # the concluder has answered
        self.last_reports: set[int] = set()  # servers whose last marks, with every push in, have yet to come
        self.last_pulls: set[int] = set()  # workers of own loops that have yet to take over the final parameters
        self.dataset: Dataset | None = None  # what own loops draw from
        self.planning: set[int] = set()  # servers that have yet to hear of it
        self.guard = Guard()
        self.decisions = 0
        self.lr_factor = 1.0
        self.seen = (0, 0)  # batches done, and of these not finite, at the guard's last look
        self.events: list[events.AnyEvent] = []

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, sender: Peer, message: Message, now: float, body: Any = None) -> list[Out]:
        """Take one message; returns what to send."""
        if not isinstance(message, Beat | Want | Return | Report | Ended):
            self.live = None
        match message:
            case ServerJoin():
                return self._server_joins(sender, message, now)
            case Join():
                return self._worker_joins(sender, message, now)
            case Ready():
                return self._server_ready(sender, now)
            case Report():
                return self._reported(sender, message, now)
            case Sets():
                return self._sets(sender, message, now)
            case Failed():
                return self._failed(sender, message, now)
            case Named() if sender.role == "server":
                return [Out(s.peer, message) for s in self.servers.values() if s.peer != sender]
            case Answer() | Evaluated() if self.leader is not None and sender.role == "server":
                return self._led(self.leader.receive(sender, message, now))
        worker = self.workers.get(sender.index)
        if sender.role != "worker" or worker is None or worker.peer != sender:
            return []  # not a worker of this run, or an earlier life of one
        match message:
            case Beat():
                return self._beat(worker, message, now)
            case Want():
                self._is_here(worker, now)
                if self.leader is not None:
                    return self._led(self.leader.want(sender, now))
                self.wanting.setdefault(sender.index)
                return self._lease(now, sender.index) or self._dry(worker)
            case Return():
                return self._returned(worker, message, now)
            case Ended():
                self._is_here(worker, now)
                others = self._forget_while_others_work(worker) + self._forget_cells_of(worker, now, ended=True)
                return others + self._ended(worker, message, body)
            case Concluded():
                return self._concluded(worker, message)
            case Dataset():
                return self._draws_from(worker, message, now)
            case Away():
                worker.excused = True
                return self._give_up(worker, now, "away, by its own word")
        return []

    def _failed(self, sender: Peer, failed: Failed, now: float) -> list[Out]:
        """The user's code raised on a worker: the first time it is shown, and the run ends."""
        if self.outcome == "failed" or self.phase == "over":
            return []
        if not failed.traceback:  # not the user's code: its way to a server is broken, say; the others go on
            return self.lost(sender, now, failed.error)
        self.events.append(
            events.UserError(
                at_s=now,
                worker=sender.index,
                step=failed.step,
                error=failed.error,
                traceback=failed.traceback,
            )
        )
        where = f"{sender} failed at step {failed.step}" if failed.step else f"{sender} could not start"
        self.outcome, self.reason = "failed", f"{where}: {failed.error}"
        return self._over()  # at whatever point: others may be waiting for it

    def lost(self, peer: Peer, now: float, why: str = "its connection closed") -> list[Out]:
        """A node's connection is gone, or its process has ended."""
        self.live = None
        if self.phase == "over":
            return []
        if peer.role == "server":
            return self._server_lost(peer, now, why)
        worker = self.workers.get(peer.index)
        if worker is None or worker.peer != peer or not worker.connected:
            return []
        worker.connected = False
        outs = [] if worker.ended else self._give_up(worker, now, why)
        worker.ended, self.live = True, None
        if peer.index == self.concluder:
            self.concluder = None
        self.last_pulls.discard(peer.index)
        return outs + self._after_loss()

    def never_comes(self, peer: Peer, now: float, why: str) -> list[Out]:
        """A worker's process has ended before it joined, and nobody starts it again."""
        if self.phase == "over" or peer.index in self.workers or peer.index in self.missing:
            return []
        self.missing.add(peer.index)
        self._note_loss(peer, now, f"before it joined: {why}")
        return self._after_loss()

    def tick(self, now: float) -> list[Out]:
        """Called about every fifth of the failure timeout."""
        self.live = None
        outs: list[Out] = []
        for index, worker in self.workers.items():
            waited_for = not worker.ended or index == self.concluder or index in self.last_pulls
            if worker.connected and worker.here and waited_for and self.phase not in ("forming", "loading", "over"):
                late = self._why_late(worker, now)
                if late:
                    self.concluder = None if index == self.concluder else self.concluder
                    self.last_pulls.discard(index)
                    outs += self._give_up(worker, now, late) + self._after_loss()
        for portion, since in list(self.unconfirmed.items()):
            if self._is_done(portion):
                del self.unconfirmed[portion]
            elif now - since > self.settings.failure_timeout_s:
                outs += self._gather(portion)
        if self.leader is not None and self.phase in ("running", "finishing"):
            outs += self._led(self.leader.tick(now))
        if self.leader is not None and self.phase == "running":
            self.note_progress(now)
        elif self.phase in ("running", "flushing"):
            outs += [Out(s.peer, Ask()) for s in self.servers.values()] + self._forget_the_idle()
            for portion, answers in self.gathering.items():  # an answer may have been lost
                revoke = Revoke(portion, self.numbers[portion])
                outs += [Out(s.peer, revoke) for i, s in self.servers.items() if i not in answers]
            self.note_progress(now)
            outs += self._guard(now)
        if self.phase == "concluding":
            outs += [Out(self.servers[index].peer, Ask()) for index in sorted(self.last_reports)]
        return outs + self._lease(now)

    def stop(self, outcome: str, reason: str) -> list[Out]:
        """End early: workers finish the cell at hand and give their leases back."""
        if self.phase == "over" or (self.phase in ("finishing", "concluding") and outcome != "failed"):
            return []
        self.outcome, self.reason = outcome, reason
        if self.phase in ("forming", "loading") or outcome == "failed":
            return self._over()  # no model comes of it: there is nothing to wait for
        self.phase = "finishing"
        halts = [Out(w.peer, Halt(reason)) for w in self.workers.values() if w.connected]
        led = [] if self.leader is None else self._led(self.leader.stop())
        return halts + led + self._after_loss()

    # ---- forming ---------------------------------------------------------------------------------------------------

    def _server_joins(self, sender: Peer, message: ServerJoin, now: float) -> list[Out]:
        if sender.role != "server":
            return []
        self.servers[sender.index] = ServerState(sender, message.address)
        self.events.append(events.Joined(at_s=now, node=str(sender)))
        return self._form(now)

    def _worker_joins(self, sender: Peer, join: Join, now: float) -> list[Out]:
        if sender.role != "worker":
            return []
        if self.phase in ("flushing", "finishing", "concluding", "over"):
            return [Out(sender, Bye("the run is at its end: there is nothing left to do."))]
        if join.optimizer is not None and not self._may_run(join.optimizer.name):
            why = f"the servers may not import {join.optimizer.name}: allow it with --optimizer."
            return self._turn_away(sender, now, why)
        if join.rounds and join.cell_batches != 1:
            why = (
                f"a strategy with rounds pushes one batch at a time, and this one wants cells of {join.cell_batches}: "
                "leave cell_batches at 1, and give a larger batch size instead (--batch-size)."
            )
            return self._turn_away(sender, now, why)
        known = self.workers.get(sender.index)
        if known is not None and sender.incarnation < known.peer.incarnation:
            return []  # it has been started again since
        outs: list[Out] = []
        if known is not None and known.peer != sender:  # started again, before we knew that it had ended
            known.connected = False
            outs = [] if known.ended else self._give_up(known, now, "it was started again")
            self.wanting.pop(sender.index, None)
        if known is None or known.peer != sender:
            self.workers[sender.index] = WorkerState(sender, beat_at=now, worked_at=now)
        self.events.append(events.Joined(at_s=now, node=str(sender)))
        self.waiting_joins.append((sender, join))
        return outs + self._form(now)

    def _form(self, now: float) -> list[Out]:
        if len(self.servers) < self.settings.num_servers or not self.waiting_joins:
            return []
        if self.waiting_joins[0][1].own_loop and len(self.workers) < self.settings.num_workers:
            return []  # own loops begin together: who comes late might find that the others have left
        outs = [] if self.plan else self._make_plan(self.waiting_joins[0][1], now)
        for sender, join in self.waiting_joins:
            outs += self._welcome(sender, join, now)
        self.waiting_joins = []
        return outs

    def _make_plan(self, join: Join, now: float) -> list[Out]:
        settings = self.settings
        self.join, self.layout = join, join.layout
        # An own loop tells what it draws from when it draws; until then there is one batch that nobody is given.
        data = Dataset("", 1, 1, 1) if join.own_loop else _data_of(join)
        self.plan = self._plan_for(data)
        blocks = cut(join.layout, max(1, settings.num_servers))
        dealt = deal(blocks, settings.num_servers) if settings.num_servers else ()
        owners = {block: server for server, mine in enumerate(dealt) for block in mine}
        self.welcome = Welcome(
            plan=self.plan,
            servers=tuple(self.servers[i].address for i in sorted(self.servers)),
            owners=tuple(owners[block.index] for block in blocks) if dealt else (),
            blocks=blocks,
        )
        if self._has_data():
            self._note_plan(now)
        self.phase = "loading" if dealt else "running"
        return [
            Out(
                self.servers[server].peer,
                Assign(
                    self.plan,
                    tuple(blocks[b] for b in mine),
                    join.layout.groups,
                    settings.num_workers,
                    optimizer=join.optimizer,
                ),
            )
            for server, mine in enumerate(dealt)
        ]

    def _plan_for(self, data: Dataset) -> Plan:
        assert self.join
        join, num_workers = self.join, self.settings.num_workers
        per_epoch = -(-data.num_samples // data.batch_size)
        columns = min(num_workers, per_epoch) if join.rounds else 0
        return Plan(
            fingerprint=data.fingerprint,
            layout=join.layout.digest(),
            num_samples=data.num_samples,
            batch_size=data.batch_size,
            epochs=1 if join.led else data.epochs or OPEN_ENDED,
            seed=self.settings.seed,
            portion_batches=_portion_batches(join, columns, per_epoch, num_workers),
            cell_batches=join.cell_batches,
            columns=columns,
            led=join.led,
        )

    def _note_plan(self, now: float) -> None:
        assert self.plan and self.join and self.welcome
        known = self.leader is None and (self.dataset is None or self.dataset.epochs > 0)  # or it is told as 0
        self.events.append(
            events.PlanMade(
                at_s=now,
                num_samples=self.plan.num_samples,
                num_batches=self.plan.num_batches if known else 0,
                num_portions=self.plan.num_portions if known else 0,
                num_parameters=sum(p.numel for p in self.join.layout.parameters),
                num_blocks=len(self.welcome.blocks),
                batch_size=self.plan.batch_size,
                epochs=self.plan.epochs if known else 0,
            )
        )

    def _turn_away(self, sender: Peer, now: float, why: str) -> list[Out]:
        """A worker cannot take part: it is told why, and so are those who watch."""
        self.workers.pop(sender.index, None)
        self.missing.add(sender.index)
        self._note_loss(sender, now, why)
        ended = self.stop("failed", why) if self.phase == "forming" else self._after_loss()
        return [Out(sender, Bye(why)), *ended]

    def _welcome(self, sender: Peer, join: Join, now: float) -> list[Out]:
        assert self.plan and self.welcome
        differs = self._difference(join)
        if differs:
            return self._turn_away(sender, now, f"{sender} does not fit this run: {differs}.")
        founder = self.phase == "loading" and not any(w.peer < sender for w in self.workers.values() if w.connected)
        welcome = msgspec.structs.replace(self.welcome, load=founder)
        return [Out(sender, welcome), *([Out(sender, Go())] if self.phase == "running" else [])]

    def _difference(self, join: Join) -> str:
        assert self.plan and self.join
        pairs: dict[str, tuple[object, object]] = {
            "the data": (join.fingerprint, self.plan.fingerprint),
            "the number of samples": (join.num_samples, self.plan.num_samples),
            "the model": (join.layout.digest(), self.plan.layout),
            "the batch size": (join.batch_size, self.plan.batch_size),
            "the strategy": ((join.cell_batches, join.rounds), (self.join.cell_batches, self.join.rounds)),
            "the optimizer": (_optimizer_of(join), _optimizer_of(self.join)),
        }
        if join.own_loop:  # it says later what it draws from
            for later in ("the data", "the number of samples", "the batch size"):
                del pairs[later]
        return "; ".join(f"{what} is {mine}, not {ours}" for what, (mine, ours) in pairs.items() if mine != ours)

    def _server_ready(self, sender: Peer, now: float) -> list[Out]:
        server = self.servers.get(sender.index)
        if self.planning:
            return self._server_planned(sender)
        if server is None or server.peer != sender or self.phase != "loading":
            return []
        server.ready = True
        if not all(s.ready for s in self.servers.values()):
            return []
        self.phase = "running"
        for worker in self.workers.values():
            worker.worked_at = now
        return [Out(w.peer, Go()) for w in self.workers.values() if w.connected] + self._begin_to_lead(now)

    # ---- strategies that are led from here ---------------------------------------------------------------------------

    def _begin_to_lead(self, now: float) -> list[Out]:
        if self.leader is None:
            return []
        assert self.plan and self.welcome
        servers = {index: self.servers[index].peer for index in sorted(self.servers)}
        first = servers[self.welcome.owners[0]]
        crew = Crew(self.plan, tuple(servers.values()), first, self.settings.seed)
        return self._led(self.leader.start(crew, now))

    def _led(self, led: list[To]) -> list[Out]:
        """What the leader has to say; and when it is at its end, so is the run."""
        assert self.leader is not None
        self.events += self.leader.notes
        self.leader.notes = []
        outs = [Out(to, message) for to, message in led]
        if not self.leader.over:
            return outs
        if self.phase == "running" and self.leader.error:
            return outs + self.stop("failed", f"the strategy could not go on: {self.leader.error}")
        if self.phase == "running":
            return outs + self._flush()
        return outs + (self._conclude_when_ended() if self.phase == "finishing" else [])

    def due_at(self) -> float | None:
        """When to call `look`: someone may be late by then; None: nobody waits for that."""
        return self.leader.due_at() if self.leader is not None and self.phase == "running" else None

    def look(self, now: float) -> list[Out]:
        return [] if self.leader is None else self._led(self.leader.look(now))

    # ---- own loops: their data comes later, and they end when they like ----------------------------------------------

    def _is_own_loop(self) -> bool:
        return self.join is not None and self.join.own_loop

    def _has_data(self) -> bool:
        return not self._is_own_loop() or (self.dataset is not None and not self.planning)

    def _knows_its_end(self) -> bool:
        return self._has_data() and self.leader is None and not (self.dataset is not None and self.dataset.epochs == 0)

    def _may_run(self, optimizer: str) -> bool:
        """What a server imports is named by who started the run, never by a message alone."""
        return ":" not in optimizer or optimizer in self.settings.optimizers

    def _draws_from(self, worker: WorkerState, dataset: Dataset, now: float) -> list[Out]:
        """A loop asks for its first batch. The first to say what it draws from makes the plan."""
        assert self.plan and self.welcome
        if self.dataset is not None:
            if dataset != self.dataset:
                what = f"draws from {_described(dataset)}, the others from {_described(self.dataset)}"
                return [Out(worker.peer, Bye(f"{worker.peer} {what}."))]
            return [] if self.planning else [Out(worker.peer, Planned(self.plan))]
        self.dataset = dataset
        self.plan = self._plan_for(dataset)
        self.welcome = msgspec.structs.replace(self.welcome, plan=self.plan)
        self._note_plan(now)
        self.planning = {index for index, server in self.servers.items() if server.peer.role == "server"}
        if not self.planning:
            return self._tell_plan()
        return [Out(self.servers[index].peer, Planned(self.plan)) for index in sorted(self.planning)]

    def _server_planned(self, server: Peer) -> list[Out]:
        self.planning.discard(server.index)
        return [] if self.planning else self._tell_plan()

    def _tell_plan(self) -> list[Out]:
        assert self.plan
        return [Out(w.peer, Planned(self.plan)) for w in self.workers.values() if w.connected]

    def _dry(self, worker: WorkerState) -> list[Out]:
        """A loop that has batches it has not stepped on must not wait for more: its own may be the last."""
        return [Out(worker.peer, Dry())] if self._is_own_loop() and not self._has_more() else []

    def _flush_when_all_left(self) -> list[Out]:
        if self.phase != "running" or not self._is_own_loop():
            return []
        waited_for = [w for w in self.workers.values() if w.connected and (w.here or w.excused)]
        return self._flush() if waited_for and all(w.ended for w in waited_for) else []

    # ---- leases ----------------------------------------------------------------------------------------------------

    def _lease(self, now: float, only: int | None = None) -> list[Out]:
        """Give waiting workers what may be leased now; or only one, where nothing has changed for the others."""
        if self.phase != "running" or not self._has_more():
            return []
        outs = []
        for index in list(self.wanting) if only is None else [only] if only in self.wanting else []:
            worker = self.workers[index]
            if not worker.connected or worker.ended:
                del self.wanting[index]
                continue
            portion = self._choose(worker)
            if portion is None:
                continue
            del self.wanting[index]
            outs.append(self._give(worker, portion, now))
        return outs

    def _has_more(self) -> bool:
        if not self._has_data():
            return False
        self._refill()
        return bool(self.again or self.pool)

    def _choose(self, worker: WorkerState) -> int | None:
        assert self.plan
        if not worker.here or not self._may_start(worker):
            return None
        if self.again:
            return min(self.again)
        self._refill()
        if not self.pool:
            return None
        if self.plan.columns:
            return self._choose_column(worker, self._num_live())
        left = self.plan.num_portions - self.next_fresh + len(self.pool)
        scarce = left <= len(self.workers) and left <= self._num_live()
        if worker.leases and scarce and not self._is_own_loop():  # whose last batches may wait to be accumulated
            return None  # the last portions go to those who have nothing to do
        return self.pool[0]

    def _num_live(self) -> int:
        if self.live is None:
            self.live = sum(w.here and not w.ended for w in self.workers.values())
        return self.live

    def _choose_column(self, worker: WorkerState, num_live: int) -> int | None:
        """Columns of a group of rounds are shared evenly; a group that nobody has asked for yet comes later."""
        assert self.plan
        columns = self.plan.columns
        share = -(-columns // max(1, num_live))
        # One group ahead, no more: the rounds after it belong to whoever is here then.
        last = min((r.low for r in self._reports() if r.blocks), default=0) // columns + 1
        for portion in self.pool:
            group = portion // columns
            if group <= last and sum(p // columns == group for p in worker.leases) < share:
                return portion
        return None

    def _refill(self) -> None:
        assert self.plan
        window = max(1, 2 * self.plan.columns)
        while len(self.pool) < window and self.next_fresh < self.plan.num_portions:
            if self.plan.batches_in(self.next_fresh):
                self.pool.append(self.next_fresh)
            self.next_fresh += 1

    def _may_start(self, worker: WorkerState) -> bool:
        """Warm start: one worker alone until so many batches are in."""
        assert self.join
        if not self.join.warm_batches or self.batches_done() >= self.join.warm_batches:
            return True
        first = min(w.peer.index for w in self.workers.values() if w.here and not w.ended)
        return worker.peer.index == first and (not worker.leases or self._is_own_loop())

    def _give(self, worker: WorkerState, portion: int, now: float) -> Out:
        assert self.plan
        if portion in self.again:
            groups_ = self.again.pop(portion)
        else:
            self.pool.remove(portion)
            groups_ = (tuple(range(self.plan.batches_in(portion))),)
            self.numbers[portion] = 1
        if not worker.leases:
            worker.worked_at = now
        worker.leases[portion] = self.numbers[portion]
        return Out(worker.peer, Lease(portion, self.numbers[portion], groups_))

    def _returned(self, worker: WorkerState, message: Return, now: float) -> list[Out]:
        self._is_here(worker, now)
        if self.leader is not None:
            return self._led(self.leader.returned(worker.peer, message.portion, message.lease, now))
        if worker.leases.get(message.portion) != message.lease:
            return []  # it was taken back before
        del worker.leases[message.portion]
        if message.reason == "done":
            if not self._is_done(message.portion):
                self.unconfirmed[message.portion] = now
            # The last portions go to those who have nothing to do: it may be one now.
            return self._lease(now, worker.peer.index)
        if self.phase != "running":
            return []
        if message.reason == "unused" and message.lease == 1:
            assert self.plan
            self.numbers[message.portion] += 1
            self.again[message.portion] = (tuple(range(self.plan.batches_in(message.portion))),)
            return self._lease(now)
        return self._gather(message.portion, worker.peer.index)

    def _gather(self, portion: int, from_worker: int = -1) -> list[Out]:
        """Fence a portion at every owner and ask for its sets."""
        self.unconfirmed.pop(portion, None)
        self.taken_from[portion] = from_worker
        if self._is_done(portion):
            return []
        self.numbers[portion] = self.numbers.get(portion, 0) + 1
        self.gathering[portion] = {}
        return [Out(s.peer, Revoke(portion, self.numbers[portion])) for s in self.servers.values()]

    def _sets(self, sender: Peer, sets: Sets, now: float) -> list[Out]:
        answers = self.gathering.get(sets.portion)
        if answers is None or sets.lease != self.numbers[sets.portion] or sender.role != "server":
            return []
        answers[sender.index] = sets.masks
        if len(answers) < len(self.servers):
            return []
        assert self.plan
        del self.gathering[sets.portion]
        masks = [mask for index in sorted(answers) for mask in answers[index]]
        missing = groups(self.plan.full(sets.portion), masks)
        if missing:
            self.again[sets.portion] = missing
            self.leased_again += 1
            self.events.append(
                events.LeasedAgain(
                    at_s=now,
                    portion=sets.portion,
                    batches=sum(map(len, missing)),
                    from_worker=self.taken_from[sets.portion],
                )
            )
        return self._lease(now) + self._check_done()

    # ---- who is here -----------------------------------------------------------------------------------------------

    def _beat(self, worker: WorkerState, beat: Beat, now: float) -> list[Out]:
        if beat.steps and not any(w.beat.steps for w in self.workers.values()):
            self.events.append(events.FirstStep(at_s=now, worker=worker.peer.index))
        works = beat.acked > worker.beat.acked
        if works or beat.waiting or not worker.leases:
            if worker.leases and not worker.beat.waiting:
                worker.slowest_s = max(worker.slowest_s * 0.98, now - worker.worked_at)
            worker.worked_at = now
        worker.beat, worker.beat_at = beat, now
        worker.beats = [*worker.beats[-5:], (now, beat)]
        if not worker.here and (works or beat.waiting):
            self._is_here(worker, now)
            return self._lease(now)
        return []

    def _why_late(self, worker: WorkerState, now: float) -> str:
        """A heartbeat says alive, acknowledged pushes say working; deadlines are learnt from what was seen."""
        timeout = self.settings.failure_timeout_s
        if now - worker.beat_at > timeout:
            return f"not heard of for {now - worker.beat_at:.1f} s"
        idle_s = now - worker.worked_at
        if not worker.leases or not worker.slowest_s or idle_s <= 2 * timeout:
            return ""
        usual = max(w.slowest_s for w in self.workers.values())
        if idle_s > 2 * timeout + 10 * usual:
            return f"away: alive, but no push for {idle_s:.1f} s"
        return ""

    def _is_here(self, worker: WorkerState, now: float) -> None:
        worker.beat_at = worker.worked_at = now
        worker.excused = False
        if not worker.here:
            worker.here, self.live = True, None
            self.events.append(events.Returned(at_s=now, node=str(worker.peer)))

    def _give_up(self, worker: WorkerState, now: float, why: str) -> list[Out]:
        """Do not wait for a worker; what it had leased is fenced, and what is missing of it leased again."""
        worker.here, self.live = False, None
        self._note_loss(worker.peer, now, why)
        outs = [Out(s.peer, Forget(worker.peer.index)) for s in self.servers.values()]
        at_work = self._at_work(worker)
        for portion in sorted(worker.leases):
            if not worker.connected and portion in at_work:
                self.deaths[portion] = self.deaths.get(portion, 0) + 1
                if self.deaths[portion] >= FATAL_DEATHS:
                    return outs + self.stop("failed", f"portion {portion} ended {FATAL_DEATHS} workers")
            if self.phase == "running":
                outs += self._gather(portion, worker.peer.index)
        worker.leases.clear()
        return outs + self._forget_cells_of(worker, now)

    def _forget_cells_of(self, worker: WorkerState, now: float, ended: bool = False) -> list[Out]:
        """Where cells are handed out from here: what a worker has not delivered is for others."""
        if self.leader is None or self.phase != "running":
            return []
        gone = ended or not worker.connected
        if fatal := self.leader.forget(worker.peer.index, gone, died=not worker.connected):
            return self.stop("failed", fatal)
        return self._led(self.leader.look(now))

    def _forget_while_others_work(self, worker: WorkerState) -> list[Out]:
        """A worker that has come to its end is not waited for: of own loops one may end before the others."""
        return [Out(s.peer, Forget(worker.peer.index)) for s in self.servers.values() if self.phase == "running"]

    def _forget_the_idle(self) -> list[Out]:
        """Who has nothing to do must hold up nobody who has. It tells the servers itself; that may have been lost."""
        idle = [index for index in self.wanting if not self.workers[index].leases]
        held_up = [s.peer for s in self.servers.values() if s.report is not None and s.report.limit is not None]
        return [Out(server, Forget(index)) for index in idle for server in held_up]

    def _note_loss(self, peer: Peer, now: float, why: str) -> None:
        self.last_loss = f"{peer} was the last ({why})"
        self.events.append(events.Lost(at_s=now, node=str(peer), why=why))

    def _at_work(self, worker: WorkerState) -> set[int]:
        """The portions a worker may have begun: the one it got first, or its columns of the first group of rounds."""
        if not self.plan or not self.plan.columns:
            return set([portion for portion in worker.leases if not self._is_done(portion)][:1])
        group = min(worker.leases, default=0) // self.plan.columns
        return {portion for portion in worker.leases if portion // self.plan.columns == group}

    def _after_loss(self) -> list[Out]:
        """A node is gone: is anyone left, and was it the one we were waiting for?"""
        left = [w for w in self.workers.values() if w.connected]
        if self.phase == "loading":
            founder = min((w.peer for w in left), default=None)
            if founder is not None and self.welcome is not None:
                return [Out(founder, msgspec.structs.replace(self.welcome, load=True))]
        if not left and len(self.missing | self.workers.keys()) >= self.settings.num_workers:
            if self.outcome == "finished":
                self.outcome, self.reason = "failed", f"no worker is left: {self.last_loss}"
            return self._over()
        if self.phase == "finishing":
            return self._conclude_when_ended()
        if self.phase == "concluding" and self.concluder is None and not self.saved:
            return self._conclude()
        return self._flush_when_all_left() + self._over_when_concluded()

    def _server_lost(self, peer: Peer, now: float, why: str) -> list[Out]:
        server = self.servers.pop(peer.index, None)
        if server is None:
            return []
        self.events.append(events.Lost(at_s=now, node=str(peer), why=why))
        held = f"{len(server.report.blocks)} blocks" if server.report else "its blocks"
        self.outcome = "failed"
        self.reason = (
            f"{peer} was lost ({why}). It held the only copy of {held}, with {self.batches_done()} batches applied: "
            "these parameters are gone, and no model was saved."
        )
        return self._over()

    # ---- divergence ------------------------------------------------------------------------------------------------

    def _guard(self, now: float) -> list[Out]:
        """Let the guard look at what has come since its last look, and tell the servers what it decides."""
        reports = self._reports()
        if self.phase != "running" or not any(report.guard for report in reports):
            return []
        beats = [w.beat for w in self.workers.values() if w.beat.loss_samples]
        samples = sum(beat.loss_samples for beat in beats)
        done, books = self.batches_done(), balance(self._plan_so_far(), reports, 0)
        not_finite = books.skipped.get("not finite", 0)
        look = Look(
            loss=sum(b.loss * b.loss_samples for b in beats) / samples if samples else None,
            batches=done - self.seen[0],
            not_finite=not_finite - self.seen[1],
            staleness_mean=self.staleness().mean,
            num_workers=self._num_live(),
        )
        self.seen = done, not_finite
        bounds = [report.bound for report in reports if report.bound is not None]
        decision = self.guard.look(look, min(bounds, default=None), reports[0].adapt)
        return [] if decision is None else self._tune(decision, min(bounds, default=None), now)

    def _tune(self, decision: Decision, bound: int | None, now: float) -> list[Out]:
        self.decisions += 1
        self.lr_factor *= decision.lr_factor
        bound = bound if decision.bound is None else decision.bound
        self.events.append(events.Guarded(at_s=now, why=decision.why, lr_factor=self.lr_factor, bound=bound))
        tune = Tune(self.decisions, decision.lr_factor, decision.bound)
        return [Out(s.peer, tune) for s in self.servers.values()]

    # ---- done ------------------------------------------------------------------------------------------------------

    def _reports(self) -> list[Report]:
        return [s.report for s in self.servers.values() if s.report is not None]

    def _is_done(self, portion: int) -> bool:
        reports = self._reports()
        enough = len(reports) >= max(1, len(self.servers))
        return enough and all(
            s.report is None or not s.report.blocks or portion < s.report.low or portion in s.full
            for s in self.servers.values()
        )

    def batches_done(self) -> int:
        """How far it is: what every block has had."""
        reports = [r for r in self._reports() if r.blocks]
        return min((r.had for r in reports), default=0) if len(self._reports()) >= len(self.servers) else 0

    def _reported(self, sender: Peer, report: Report, now: float) -> list[Out]:
        if sender.role == "worker" and not self.settings.num_servers:
            self.servers.setdefault(0, ServerState(sender, Address("", 0)))  # it holds the parameters itself
        server = self.servers.get(sender.index)
        if server is None or server.peer != sender:
            return []
        if not report.measured and server.report is not None:
            last = server.report
            report = msgspec.structs.replace(report, staleness=last.staleness, missed=last.missed, limit=last.limit)
        server.report, server.full = report, frozenset(report.full)
        server.flushed |= report.flushed  # kept here: a report that was asked for meanwhile does not say so
        if report.flushed and self.phase == "flushing" and all(s.flushed for s in self.servers.values()):
            self.phase = "finishing"
            return [Out(w.peer, Finish()) for w in self.workers.values() if w.connected] + self._after_loss()
        if report.flushed and self.phase == "finishing":
            return self._conclude_when_ended()
        if report.measured and self.phase == "concluding":
            self.last_reports.discard(sender.index)
            return self._over_when_concluded()
        may_free = self.join and (self.join.warm_batches or self.join.rounds)  # may those who wait begin something now?
        return self._check_done() + (self._lease(now) if may_free else [])

    def _check_done(self) -> list[Out]:
        assert self.plan
        if self.phase != "running" or not self._has_data() or self.leader is not None:
            return []
        return self._flush() if self.batches_done() >= self.plan.num_batches else []

    def _flush(self) -> list[Out]:
        self.phase = "flushing"
        if not self.settings.num_servers:
            self.phase = "finishing"
            finish = [Out(w.peer, Finish()) for w in self.workers.values() if w.connected]
            return finish + self._conclude_when_ended()
        return [Out(s.peer, Flush()) for s in self.servers.values()]

    def _ended(self, worker: WorkerState, message: Ended, body: Any) -> list[Out]:
        if self.live is not None and worker.here and not worker.ended:
            self.live -= 1
        worker.ended = True
        worker.leases.clear()
        if self.phase == "concluding" and self._is_own_loop():  # given up before, and now it is here all the same
            self.last_pulls.add(worker.peer.index)
            return [Out(worker.peer, Conclude(""), self.buffers.mean())]
        self.buffers.add(body, message.samples)
        if self.phase == "running" and self._all_have_ended():
            return self._flush()  # own loops end when they like; a strategy that returns early is not waited for
        return self._conclude_when_ended()

    def _all_have_ended(self) -> bool:
        """All who are waited for: those who are here, and those who are away by their own word."""
        return not self._num_live() and all(
            w.ended for w in self.workers.values() if w.connected and (w.here or w.excused)
        )

    def _conclude_when_ended(self) -> list[Out]:
        # Those who are not here are not waited for; they are told when they come back.
        if self.phase != "finishing" or not self._all_have_ended():
            return []
        if self.leader is not None and not self.leader.over and self.outcome != "failed":
            return []  # it was stopped in the middle of an iteration, and goes back to where that began
        if self.outcome == "failed":
            return self._over()
        unflushed = [s.peer for s in self.servers.values() if s.peer.role == "server" and not s.flushed]
        if unflushed:  # a run that was stopped: what rules have gathered so far is part of its model
            return [Out(server, Flush()) for server in unflushed]
        return self._conclude()

    def _conclude(self) -> list[Out]:
        ended = [w for w in self.workers.values() if w.connected and w.ended]
        ready = [w for w in ended if w.here] or ended
        if not ready and any(w.connected for w in self.workers.values()):
            self.phase = "finishing"  # they are not here, but their connections stand: wait until they end or are lost
            return []
        self.phase = "concluding"
        if not ready:
            if self.outcome == "finished":
                self.outcome, self.reason = "failed", "no worker is left to save the model"
            return self._over()
        chosen = min(ready, key=lambda w: w.peer)
        self.concluder = chosen.peer.index
        self.last_reports = {index for index, s in self.servers.items() if s.peer.role == "server"}
        asks = [Out(self.servers[index].peer, Ask()) for index in sorted(self.last_reports)]
        buffers = self.buffers.mean()
        others = [w for w in ready if w is not chosen] if self._is_own_loop() else []
        self.last_pulls = {w.peer.index for w in others}
        pulls = [Out(w.peer, Conclude(""), buffers) for w in others]
        return [*asks, Out(chosen.peer, Conclude(self.settings.model_path), buffers), *pulls]

    def _concluded(self, worker: WorkerState, message: Concluded) -> list[Out]:
        if worker.peer.index == self.concluder:
            self.metrics, self.saved = message.metrics, True
        self.last_pulls.discard(worker.peer.index)
        return self._over_when_concluded()

    def _over_when_concluded(self) -> list[Out]:
        told = self.saved and not self.last_pulls and not self.last_reports
        if self.phase != "concluding" or not told:
            return []
        broken = self.staleness().broken
        if broken and self.outcome == "finished":
            self.outcome, self.reason = "failed", f"the strategy did not keep its promise: {broken}"
        return self._over()

    def _over(self) -> list[Out]:
        self.phase = "over"
        peers = [w.peer for w in self.workers.values() if w.connected] + [
            s.peer for s in self.servers.values() if s.peer.role == "server"
        ]
        return [Out(peer, Bye(self.reason)) for peer in peers]

    # ---- what is known ---------------------------------------------------------------------------------------------

    def books(self) -> Books | None:
        if self.plan is None:
            return None
        books = balance(self._plan_so_far(), self._reports(), self.leased_again)
        if self.leader is not None:
            return balance_led(books, self._reports(), self.leader.batches)
        return books if self._has_data() else msgspec.structs.replace(books, batches=0, not_done=0)

    def _plan_so_far(self) -> Plan:
        """The plan; of loops that have not said how many passes they make, the passes they have begun."""
        assert self.plan
        if self._knows_its_end() or not self._has_data():
            return self.plan
        begun = -(-self.batches_done() // self.plan.batches_per_epoch)
        return msgspec.structs.replace(self.plan, epochs=max(1, begun))

    def staleness(self) -> Staleness:
        """What gradients missed, what readers may miss, and who waited for whom so that they do not miss more."""
        waited_for = {i: w.beat.waited_for for i, w in sorted(self.workers.items()) if w.beat.waited_for}
        return msgspec.structs.replace(staleness_of(self._reports()), waited_for=waited_for)

    def samples_done(self) -> int:
        if not self.plan or not self._has_data():
            return 0
        if self.leader is not None:
            return self.leader.samples
        return min(self.batches_done() * self.plan.batch_size, self.plan.num_samples * self.plan.epochs)

    def _batches_or_steps(self) -> int:
        assert self.plan
        if self.leader is not None:
            return self.leader.batches
        return self.batches_done() if self._has_data() else balance(self.plan, self._reports(), 0).extras

    def note_progress(self, now: float) -> None:
        """Add what is known to the events; called at every tick, and once more when the data is done."""
        assert self.plan
        beats = [w.beat for w in self.workers.values() if w.beat.loss_samples]
        weight = sum(b.loss_samples for b in beats)
        staleness = self.staleness()
        known = self._knows_its_end()  # otherwise how much there is to do is told as 0
        connected = {i: w for i, w in sorted(self.workers.items()) if w.connected}
        self.events.append(
            events.Progress(
                at_s=now,
                batches_done=self._batches_or_steps(),
                batches=self.plan.num_batches if known else 0,
                samples_done=self.samples_done(),
                samples=self.plan.num_samples * self.plan.epochs if known else 0,
                loss=sum(b.loss * b.loss_samples for b in beats) / weight if weight else None,
                samples_per_s={i: _rate([(t, b.samples) for t, b in w.beats], now) for i, w in connected.items()},
                steps_per_s={i: _rate([(t, b.steps) for t, b in w.beats], now) for i, w in connected.items()},
                staleness_mean=staleness.mean,
                staleness_max=staleness.max,
                staleness_bound=staleness.bound,
                staleness_unit=staleness.unit,
                waited_s={i: w.beat.waited_s for i, w in connected.items()},
                metrics=next((w.beat.metrics for w in connected.values() if w.beat.metrics), {}),
            )
        )


def _data_of(join: Join) -> Dataset:
    return Dataset(join.fingerprint, join.num_samples, join.batch_size, join.epochs)


def _portion_batches(join: Join, columns: int, per_epoch: int, num_workers: int) -> int:
    if join.led:
        return join.cell_batches  # a portion is what is handed out: one cell
    return 16 if columns else choose_portion_batches(per_epoch, num_workers, join.cell_batches)


def _described(dataset: Dataset) -> str:
    passes = f"{dataset.epochs} passes over " if dataset.epochs else ""
    return f"{passes}{dataset.num_samples} samples {dataset.fingerprint} in batches of {dataset.batch_size}"


def _optimizer_of(join: Join) -> str:
    return join.optimizer.name if join.optimizer else ""


def _rate(counted: list[tuple[float, int]], now: float) -> float:
    """So many a second; 0 where two beats that came at once would make any number of it."""
    if len(counted) < 2:
        return 0.0
    (t0, n0), (t1, n1) = counted[0], counted[-1]
    return (n1 - n0) / (t1 - t0) if t1 - t0 >= min(RATE_FROM_S, RATE_FROM * now) and t1 > t0 else 0.0
