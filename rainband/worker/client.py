"""A worker's half of the protocol: leases in, named pushes out, answers counted, pulls taken over.

A state machine like the servers: messages come in through `receive`, and go out through the ports. Whoever drives
the strategy waits on the handles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rainband.errors import Refused
from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.optimizer_state import Gathered, State
from rainband.protocol.data_plan import DataPlan, PushId, work_items
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Ack,
    AssignItems,
    FetchState,
    Finish,
    Halt,
    Idle,
    InitBlock,
    ItemsDelivered,
    Lease,
    LeaseEnd,
    LeaseRequest,
    Message,
    NoWork,
    Params,
    Peer,
    Planned,
    Pull,
    PullDelayed,
    Push,
    PushResult,
    Return,
    Revoke,
    StatePart,
)
from rainband.protocol.steps import Handle
from rainband.protocol.worker_stats import Stats
from rainband.strategy import Batch, BorrowingPort, Port, WorkItem
from rainband.worker.work_items import ItemsInHand

if TYPE_CHECKING:
    from rainband.observer import Observer


@dataclass(eq=False, slots=True)
class PushHandle(Handle):
    """A push on its way to every block."""

    name: PushId
    left: int  # blocks that have not answered
    sequence: int = 0
    clock: int = 0  # of the sender, with this push
    began: int = 0  # its clock when it began to compute it
    at_version: int = -1  # the round
    passed: int = 0  # blocks that went on without it
    passed_to: int = -1  # the lowest round that such a block is at

    def ready(self) -> bool:
        return self.left == 0

    def __await__(self) -> Generator[Handle, None, None]:
        return self._wait()


@dataclass(eq=False, slots=True)
class PullHandle(Handle):
    """Parameters on their way. They become the worker's parameters while it is awaited, block by block."""

    client: Client
    sequence: int
    at_version: int
    left: int  # blocks that are not taken over yet
    arrived: list[tuple[int, Tensor | None, int]] = field(default_factory=list)  # block, values, their version
    come: int = 0  # the blocks that have arrived: a mask
    asked: Pull | None = None  # what the servers were asked, where they must be
    late: bool = False
    eager: bool = False  # take a block over as soon as it is there: it is still in the cache

    def restart(self, sequence: int, num_blocks: int) -> None:
        """Ask anew, under another number; what has come counts for nothing."""
        self.sequence, self.left = sequence, num_blocks
        self.arrived.clear()
        self.come = 0

    def has(self, block: int) -> bool:
        return bool(self.come >> block & 1)

    def has_every(self) -> bool:
        """Have all blocks arrived?"""
        return self.come.bit_count() == len(self.client.blocks)

    def arrive(self, block: int, values: Tensor | None, version: int = 0) -> None:
        if self.has(block):
            return  # asked for twice, so it was answered twice
        self.come |= 1 << block
        self.arrived.append((block, values, version))
        if self.eager:
            self.ready()

    def ready(self) -> bool:
        while self.arrived and not self.late:
            self.client.take(self, *self.arrived.pop(0))
        return self.left == 0 or self.late

    def may_never_complete(self, stopping: bool) -> bool:
        return stopping

    def __await__(self) -> Generator[Handle, None, bool]:
        while not self.ready():
            yield self
        return not self.late


@dataclass(eq=False)
class StateHandle(Handle):
    """The state of the servers' optimizers on its way."""

    gathered: Gathered
    left: int  # blocks of which not all has come

    def ready(self) -> bool:
        return self.left == 0

    def __await__(self) -> Generator[Handle, None, None]:
        return self._wait()


@dataclass(eq=False, slots=True)
class StateChanged(Handle):
    """Anything that may change what there is to do."""

    come: bool = False

    def ready(self) -> bool:
        return self.come

    def __await__(self) -> Generator[Handle, None, None]:
        return self._wait()


@dataclass(eq=False, slots=True)
class StillNeeded(Handle):
    """Looks at what has come, without waiting for more: is a cell that was begun still ours to do?"""

    handed: ItemsInHand
    work_item: WorkItem
    looked: bool = False  # the world has

    def ready(self) -> bool:
        return self.looked

    def __await__(self) -> Generator[Handle, None, bool]:
        yield from self._wait()
        return self.handed.wants(self.work_item)


@dataclass(slots=True)
class HeldLease:
    """A portion that is ours to do."""

    portion: int
    number: int
    todo: deque[tuple[int, ...]]  # cells not begun
    unsettled: set[int]  # batches that not every block has answered


@cache
def _borrows(port: type) -> bool:
    """Asked for every port of every worker: to look for a protocol's methods takes long."""
    return hasattr(port, "lend")


class Client:
    """What a worker knows of the run: its leases, what is in flight, which versions it has read."""

    # Many, and often looked at: beyond thirty attributes a plain object becomes slow and large.
    __slots__ = (
        *(
            "asked",
            "asks",
            "base",
            "blocks",
            "borrowers",
            "clock",
            "direct_blocks",
            "dry",
            "entered",
            "fetching",
            "finished",
            "flat",
        ),
        *(
            "groups",
            "handed",
            "leases",
            "me",
            "num_bytes",
            "observer",
            "others_have_opened",
            "own_ports",
            "part",
            "plan",
            "port_of",
            "ports",
            "pulling",
        ),
        *("pushes", "sequence", "specs", "stats", "stopping", "tell", "term", "unanswered", "versions", "views"),
        *("waiting_for_news", "__dict__", "__weakref__"),
    )

    def __init__(
        self,
        me: Peer,
        plan: DataPlan,
        flat: Flat,
        blocks: Sequence[BlockSpec],
        owners: Sequence[int],
        ports: Sequence[Port],
        tell: Callable[[Message], None],
        part: int = 0,
    ) -> None:
        """`part`: of a model that several workers compute together, which is ours; only its blocks are."""
        self.me = me
        self.plan = plan
        self.flat = flat
        self.part = part
        self.specs = blocks  # all, by their index
        self.num_bytes = [block.num_bytes for block in blocks]
        self.blocks = [block for block in blocks if block.part == part]
        self.ports = ports
        self.tell = tell  # the coordinator
        self.port_of = [ports[owner] for owner in owners]
        self.own_ports = tuple(dict.fromkeys(self.port_of[block.index] for block in self.blocks)) if owners else ()
        self.direct_blocks = [block for block in self.blocks if self.port_of[block.index].direct] if owners else []
        self.borrowers = [
            port for port in dict.fromkeys(ports) if _borrows(type(port)) and isinstance(port, BorrowingPort)
        ]
        self.views = [flat.view(block) for block in blocks] if owners else []
        self.leases: dict[int, HeldLease] = {}
        self.handed = ItemsInHand(tell)
        self.asked = False
        self.finished = False  # every batch of the run is done
        self.stopping = False
        self.sequence = 0
        self.clock = 0  # cells pushed
        self.base = 0  # the clock at which we began, or began anew
        self.asks: bool | None = None  # must we ask before we read in place? The first answer says
        self.entered = False  # the servers wait for us
        self.term = 1
        self.versions = [0] * len(blocks)  # of each block, as read
        self.pushes: dict[int, PushHandle] = {}
        self.unanswered: list[list[int]] = [[] for _ in blocks]  # sequences of pushes in flight, per block
        self.pulling: PullHandle | None = None
        self.fetching: StateHandle | None = None
        self.groups: tuple[dict[str, Any], ...] = ()  # optimizer settings that the next push must tell
        self.no_work = False  # the coordinator had nothing to lease when it was asked last
        self.waiting_for_change: list[StateChanged] = []
        self.others_have_opened: Callable[[int], bool] | None = None  # of those who compute one model with us
        self.stats = Stats()
        self.observer: Observer | None = None

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, payload: Tensor | None = None) -> None:
        if self.observer is not None:
            self.observer.receiving(message)
        match message:
            case Ack():
                self._acked(message)
            case Params():
                self._params(message, payload)
            case PullDelayed() if self.pulling is not None and self.pulling.sequence == message.sequence:
                self.stats.held_by = message.worker
            case Lease():
                self._leased(message)
            case Revoke():
                self._taken_back(message)
            case AssignItems():
                self.handed.take(message)
            case ItemsDelivered():
                self.handed.leave_off(message)
            case StatePart():
                self._state_part(message, payload)
            case Planned():
                self.plan = message.plan
            case NoWork():
                self.no_work = True
            case Finish():
                self.finished = True
            case Halt():
                self.stopping = True
        if self.waiting_for_change:
            for state_changed in self.waiting_for_change:
                state_changed.come = True
            self.waiting_for_change.clear()
        if self.observer is not None:
            self.observer.received(message)

    def state_changed(self) -> StateChanged:
        state_changed = StateChanged()
        self.waiting_for_change.append(state_changed)
        return state_changed

    # ---- leases ----------------------------------------------------------------------------------------------------

    def _leased(self, lease: Lease) -> None:
        self.asked = self.no_work = False
        held = self.leases.get(lease.portion)
        if held is not None and held.number >= lease.lease:
            return  # it has come before
        batches = {k for group in lease.groups for k in group}
        todo = deque(work_items(lease.groups, self.plan.batches_per_item))
        self.leases[lease.portion] = HeldLease(lease.portion, lease.lease, todo, batches)

    def _taken_back(self, revoke: Revoke) -> None:
        """Somebody else does the rest of it. (The servers know, too: they would refuse it.)"""
        held = self.leases.get(revoke.portion)
        if held is not None and held.number < revoke.lease:
            del self.leases[revoke.portion]

    def next_item(self) -> WorkItem | None:
        """The next cell to compute, in rounds the one of the lowest round; None: there is none now."""
        if self.plan.coordinated:
            return self.handed.next(self.plan)
        held = [lease for lease in self.leases.values() if lease.todo]
        self._ask_for_more(len(held))
        if not held:
            self._rest()
            return None
        if not self.plan.items_per_round:
            return self._work_item(held[0], held[0].todo.popleft(), more=bool(held[0].todo) or len(held) > 1)
        lease = min(held, key=lambda h: (self.plan.round_of(h.portion, h.todo[0][0]), h.portion))
        if not self._is_open(self.plan.round_of(lease.portion, lease.todo[0][0])):
            return None
        ks = lease.todo.popleft()
        return self._work_item(lease, ks, more=bool(lease.todo) or len(held) > 1)

    def ask_again(self) -> None:
        """The coordinator was started again: what we had asked the one before for was lost with it."""
        self.handed.ask_again()
        for state_changed in self.waiting_for_change:
            state_changed.come = True
        self.waiting_for_change.clear()

    def still_needed(self, work_item: WorkItem) -> StillNeeded:
        """Look whether others have delivered a cell meanwhile, or its evaluation is over."""
        return StillNeeded(self.handed, work_item)

    def _rest(self) -> None:
        """With nothing to do, be waited for by nobody: others might wait for us, and we for what they have."""
        if self.entered and not any(lease.unsettled for lease in self.leases.values()):
            self.rest()

    def rest(self) -> None:
        self.entered = False
        for port in self.own_ports:
            self._send(port, Idle())

    def _work_item(self, lease: HeldLease, ks: tuple[int, ...], more: bool) -> WorkItem:
        round_ = self.plan.round_of(lease.portion, ks[0]) if self.plan.items_per_round else -1
        if len(ks) == 1:
            return WorkItem((Batch(lease.portion, ks[0], lease.number),), round_, more)
        return WorkItem(tuple([Batch(lease.portion, k, lease.number) for k in ks]), round_, more)

    def _ask_for_more(self, ahead: int) -> None:
        """Keep one lease ahead; in rounds always ask, the coordinator shares the columns out."""
        if not self.asked and not self.finished and not self.stopping and (self.plan.items_per_round or ahead <= 1):
            self.asked = True
            self.tell(LeaseRequest())

    def settle(self, name: PushId) -> None:
        """Every block has answered for these batches."""
        if self.plan.coordinated:
            self.tell(Return(name[0].portion, name[0].lease, LeaseEnd.DONE))
        for r in name:
            lease = self.leases.get(r.portion)
            if lease is None or lease.number != r.lease:
                continue
            if r.last - r.first == 1:
                lease.unsettled.discard(r.first)
            else:
                lease.unsettled.difference_update(range(r.first, r.last))
            if not lease.unsettled:
                self.give_back(r.portion, LeaseEnd.DONE)

    def settles_lease(self, ack: Ack) -> bool:
        """Would a lease be done with when this answer is taken?"""
        handle = self.pushes.get(ack.sequence)
        if handle is None or handle.left > 1 or self.plan.coordinated:
            return handle is not None
        for r in handle.name:
            lease = self.leases.get(r.portion)
            if lease is not None and len(lease.unsettled) <= r.last - r.first:
                return True
        return False

    def give_back(self, portion: int, reason: LeaseEnd) -> None:
        lease = self.leases.pop(portion)
        self.tell(Return(portion, lease.number, reason))

    def give_all_back(self, reason: LeaseEnd) -> None:
        for portion in list(self.leases):
            self.give_back(portion, reason)

    def _lose(self, name: PushId, reason: LeaseEnd) -> None:
        for r in name:
            lease = self.leases.get(r.portion)
            if lease is not None and lease.number == r.lease:
                self.give_back(r.portion, reason)

    # ---- pushing ---------------------------------------------------------------------------------------------------

    def push(self, gradient: Gradient) -> PushHandle:
        """Send a gradient to every block; it may be overwritten when this returns."""
        handle = self._push(gradient, want=False)
        if self.observer is not None:
            self.observer.pushed(handle)
        return handle

    def exchange(self, gradient: Gradient) -> PullHandle:
        """Push, and pull what comes of it, block by block: a block is read while the next ones are on their way.

        From now on until the handle was awaited the worker's parameters change under its hands.
        """
        asked = Pull(self.sequence + 1, self.clock + 1, base=self.base, part=self.part)  # by the push itself
        pull = self.pulling = PullHandle(self, asked.sequence, -1, len(self.blocks), asked=asked, eager=True)
        for port in self.borrowers:
            mine = [block for block in self.blocks if self.port_of[block.index] is port]
            pieces = {block.index: self.flat.contiguous_slice(block, gradient.tensors) for block in mine}
            lent = {index: piece for index, piece in pieces.items() if piece is not None}
            port.lend(pull.sequence, lent, {block.index: self.views[block.index] for block in mine})
        self._push(gradient, want=True)
        for port in self.borrowers:
            port.settle(pull)
        if self.observer is not None:
            self.observer.pulled(pull)
        return pull

    def _push(self, gradient: Gradient, want: bool) -> PushHandle:
        if not gradient.is_finite:  # before the first byte leaves: otherwise some blocks would have it
            return self.skip(gradient, "not finite", want)
        observer = self.observer
        if observer is not None:
            observer.began("push")
        handle = self._begin(gradient)
        absent = self.flat.absent(gradient.tensors)
        read = self.versions if gradient.read is None else gradient.read
        for block in self.blocks:
            message = Push(
                block.index,
                self.me.index,
                handle.sequence,  # not ours: while a port waits for room, answers come, and we may ask for more
                handle.name,
                gradient.samples,
                handle.clock,
                self.term,
                read[block.index],
                block.dtype,
                block.numel,
                handle.at_version,
                absent,
                want=want and self._must_ask(block.index),
                groups=self.groups,
                began=handle.began,
                loss=gradient.loss if self.plan.coordinated else 0.0,
            )
            self.unanswered[block.index].append(handle.sequence)
            self.port_of[block.index].push(message, self._filler(block, gradient))
            self.stats.pushed_bytes += self.num_bytes[block.index]
            if observer is not None:
                observer.sent(message)
        self.groups = ()
        if observer is not None:
            observer.ended("push")
        return handle

    def _filler(self, block: BlockSpec, gradient: Gradient) -> Callable[[Tensor], None]:
        return lambda out: self.flat.write(block, gradient.tensors, out)

    def skip(self, gradient: Gradient, reason: str, want: bool = False) -> PushHandle:
        """Mark the gradient's batches on every block, without a gradient."""
        handle = self._begin(gradient)
        for block in self.blocks:
            self._skip_block(block, handle, reason, want)
        return handle

    def _begin(self, gradient: Gradient) -> PushHandle:
        self.sequence += 1
        self.clock += 1
        name = gradient.push_id()
        at_version = self.plan.round_of(name[0].portion, name[0].first) if self.plan.items_per_round else -1
        if self.plan.coordinated:
            at_version = name[0].lease  # of an evaluation: a cell was handed out for it
        began = self.clock - 1 if gradient.began is None else gradient.began
        handle = PushHandle(name, len(self.blocks), self.sequence, self.clock, began, at_version)
        if self.blocks:
            self.pushes[self.sequence] = handle
        else:  # a share of a model without parameters: there is nobody to answer
            self.stats.acked += 1
            self.settle(name)
        return handle

    def _skip_block(self, block: BlockSpec, handle: PushHandle, reason: str, want: bool = False) -> None:
        self.unanswered[block.index].append(handle.sequence)
        self._send(
            self.port_of[block.index],
            Push(
                block.index,
                self.me.index,
                handle.sequence,
                handle.name,
                0,
                handle.clock,
                self.term,
                self.versions[block.index],
                block.dtype,
                block.numel,
                handle.at_version,
                skip=reason,
                want=want and self._must_ask(block.index),
                began=handle.began,
            ),
        )

    def _acked(self, ack: Ack) -> None:
        unanswered = self.unanswered[ack.block]
        handle = self.pushes.get(ack.sequence)
        if handle is None or ack.sequence not in unanswered:
            return  # answered before
        unanswered.remove(ack.sequence)
        match ack.result:
            case PushResult.ACCEPTED | PushResult.DUPLICATE:
                pass
            case PushResult.REVOKED:
                self._lose(handle.name, LeaseEnd.REVOKED)
            case PushResult.OVERLAPS:
                self._lose(handle.name, LeaseEnd.OVERLAPS)
            case PushResult.BAD:  # the server's own check: the batches must not stay open on this block
                self._skip_block(self.specs[ack.block], handle, f"refused: {ack.reason}")
                return
            case PushResult.LATE:
                handle.passed_to = ack.version if not handle.passed else min(handle.passed_to, ack.version)
                handle.passed += 1
            case PushResult.WRONG_SERVER | PushResult.EARLY:
                raise Refused(f"block {ack.block} answered {ack.result.name} {ack.reason}")
        handle.left -= 1
        if handle.left == 0:
            del self.pushes[ack.sequence]
            self.stats.acked += 1
            self.settle(handle.name)
            if handle.passed == len(self.blocks):
                self.skip_rounds(handle.passed_to - 1)
        pull = self.pulling
        if pull is None or pull.at_version >= 0 or not self.direct_blocks or self._must_ask(ack.block):
            return
        if self._own_pushes_in(pull, ack):
            pull.arrive(ack.block, None)

    def _own_pushes_in(self, pull: PullHandle, ack: Ack) -> bool:
        """Was this the last answer that the pull of this block was waiting for?"""
        unanswered = self.unanswered[ack.block]
        return ack.sequence <= pull.sequence and (not unanswered or unanswered[0] > pull.sequence)

    # ---- pulling ---------------------------------------------------------------------------------------------------

    def pull(self, round_: int | None = None, ahead: int = 0) -> PullHandle:
        """Ask for the parameters: as they are, with one's own pushes in; or exactly those of a round.

        `ahead`: for the cell after so many that are not pushed yet.
        """
        if round_ is not None:
            self.ask_round(round_)
            assert self.pulling is not None
            return self.pulling
        assert self.pulling is None or self.pulling.ready(), "await the pull before starting another"
        return self._ask(PullHandle(self, 0, -1, 0), self.clock + ahead)

    def pull_latest(self) -> PullHandle:
        """The parameters as they are, whatever was asked for before: nobody computes with them."""
        return self._ask(PullHandle(self, 0, -1, 0), clock=-1)

    async def final_parameters(self) -> None:
        """The parameters at the end of a run; where that came within a round, of the last that all blocks have."""
        await self.pull_latest()
        versions = {self.versions[block.index] for block in self.blocks}
        if (
            self.plan.items_per_round and len(versions) > 1
        ):  # by one: a block keeps a version until the next round begins
            await self.pull(min(versions))

    def _ask(self, pull: PullHandle, clock: int) -> PullHandle:
        self.sequence += 1  # a number of its own: answers to an older question are not this one's
        pull.restart(self.sequence, len(self.blocks))
        pull.asked = Pull(self.sequence, clock, base=self.base, part=self.part)
        self.pulling, self.stats.held_by = pull, None
        for port in self.own_ports:
            if not port.direct or self.asks is not False:
                self._send(port, pull.asked)
        if self.direct_blocks:
            self._read_in_place(pull)
        if self.observer is not None:
            self.observer.pulled(pull)
        return pull

    def _send(self, port: Port, message: Message) -> None:
        port.send(message)
        if self.observer is not None:
            self.observer.sent(message)

    def _learn(self, asks: bool, pull: PullHandle) -> None:
        """The first answer says whether the rule must be asked; if not, shared memory can be read without."""
        self.asks = asks
        if pull.at_version < 0:
            self._read_in_place(pull)

    def _read_in_place(self, pull: PullHandle) -> None:
        for block in self.direct_blocks:  # once one's own pushes are in
            if not self._must_ask(block.index) and not self.unanswered[block.index]:
                pull.arrive(block.index, None)

    def _must_ask(self, block: int) -> bool:
        """Must the server of this block be asked for it? Not where it can be read in place, and the rule lets us."""
        return not self.port_of[block].direct or self.asks is not False

    def ask_round(self, round_: int) -> None:
        if self.pulling is not None and self.pulling.at_version == round_:
            return
        self.sequence += 1  # a number of its own: answers to an older question are not this one's
        asked = Pull(self.sequence, self.clock, round_, part=self.part)
        self.pulling = PullHandle(self, self.sequence, round_, len(self.blocks), asked=asked)
        for port in self.own_ports:
            self._send(port, asked)
        if self.observer is not None:
            self.observer.pulled(self.pulling)

    def _is_open(self, round_: int) -> bool:
        """Have all blocks the version of this round? Asks them, if they have not been asked."""
        self.ask_round(round_)
        return self.has_opened() and (self.others_have_opened is None or self.others_have_opened(round_))

    def has_opened(self) -> bool:
        """Have all blocks the version that was asked for, or gone beyond it?"""
        assert self.pulling is not None
        return self.pulling.has_every() or self.pulling.late

    def is_through(self, round_: int) -> bool:
        """Is this round over and in our parameters? True also if there is more to do for it here first."""
        held = [lease for lease in self.leases.values() if lease.todo]
        self._ask_for_more(len(held))
        if any(self.plan.round_of(lease.portion, lease.todo[0][0]) <= round_ for lease in held):
            return True
        self.ask_round(round_ + 1)
        assert self.pulling is not None
        return self.pulling.ready()

    def _params(self, params: Params, payload: Tensor | None) -> None:
        pull = self.pulling
        if pull is None or pull.sequence != params.sequence or pull.has(params.block):
            return
        if params.round_over:
            self._round_is_over(pull)
            return
        if self.asks is None:
            self._learn(params.asks, pull)
        self.term = params.term
        self.entered = params.asks and params.clock >= 0
        if params.clock > self.clock:  # we are new, or were given up meanwhile, and begin anew beside the slowest
            not_pushed = 0 if pull.asked is None else max(0, pull.asked.clock - self.clock)
            self.clock = self.base = params.clock
            self._ask(pull, self.clock + not_pushed)
            return
        pull.arrive(params.block, payload, params.version)

    def take(self, pull: PullHandle, block: int, values: Tensor | None, version: int) -> None:
        """A block becomes the worker's parameters. Only ever called while the strategy awaits, between two steps."""
        if self.observer is not None:
            self.observer.began("read")
        out = self.views[block]
        if values is None:
            read = self.port_of[block].read(self.specs[block], pull.at_version, out)
            if read is None:
                self._round_is_over(pull)
                if self.observer is not None:
                    self.observer.ended("read")
                return
            version = read
        elif values is not out and values.data_ptr() != out.data_ptr():  # otherwise it was received where it belongs
            out.copy_(values.view(out.dtype))
        self.versions[block] = version
        pull.left -= 1
        self.stats.pulled_bytes += self.num_bytes[block]
        if self.observer is not None:
            self.observer.ended("read")

    def _round_is_over(self, pull: PullHandle) -> None:
        """Others have done this round's cells and gone on: nothing of it is ours to do any more."""
        pull.late = True
        self.skip_rounds(pull.at_version)

    def skip_rounds(self, last: int) -> None:
        """All rounds up to this one are over."""
        for lease in list(self.leases.values()):
            over = {k for k in lease.unsettled if self.plan.round_of(lease.portion, k) <= last}
            lease.unsettled -= over
            lease.todo = deque(work_item for work_item in lease.todo if not over & set(work_item))
            if not lease.unsettled:
                self.give_back(lease.portion, LeaseEnd.DONE)

    # ---- first values ----------------------------------------------------------------------------------------------

    def load(self, state: State | None = None) -> None:
        """Send the servers this worker's parameters, with its optimizer's state: the first values of the run."""
        state = state or State()
        for block in self.blocks:
            for part, tensors in state.tensors.items():
                absent = self.flat.absent(tensors)
                message = InitBlock(block.index, block.dtype, block.numel, part=part, absent=absent)
                self.port_of[block.index].push(message, self._state_writer(block, tensors))
            message = InitBlock(block.index, block.dtype, block.numel, numbers=state.numbers)
            self.port_of[block.index].push(message, self._copier(block))

    def _state_writer(self, block: BlockSpec, tensors: Sequence[Tensor | None]) -> Callable[[Tensor], None]:
        return lambda out: self.flat.write(block, tensors, out)

    def fetch_state(self) -> StateHandle:
        """Ask for the state of the servers' optimizers."""
        self.fetching = StateHandle(Gathered(self.flat.parameters), len(self.blocks))
        for port in self.own_ports:
            self._send(port, FetchState())
        return self.fetching

    def _state_part(self, message: StatePart, payload: Tensor | None) -> None:
        assert self.fetching is not None, "nobody asked for it"
        block, gathered = self.specs[message.block], self.fetching.gathered
        if message.part:
            assert payload is not None, "a part with a name has values"
            gathered.add(block, message.part, message.absent, payload.view(self.views[message.block].dtype))
            return
        gathered.add_numbers(message.numbers)
        self.fetching.left -= 1

    def _copier(self, block: BlockSpec) -> Callable[[Tensor], None]:
        def fill(out: Tensor) -> None:
            out.copy_(self.views[block.index])

        return fill
