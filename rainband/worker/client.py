"""A worker's client of the servers and the coordinator.

A state machine: messages arrive through `receive` and leave through the ports and `tell`. The runtime waits on the
handles that the methods return.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.optimizer_state import State
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import BlockSpec
from rainband.protocol.messages import (
    Ack,
    AssignItems,
    Finish,
    Halt,
    ItemsDelivered,
    Lease,
    Message,
    NoWork,
    Params,
    Peer,
    Planned,
    PullDelayed,
    Revoke,
    StatePart,
)
from rainband.protocol.ports import Port
from rainband.protocol.steps import Handle, Look
from rainband.protocol.worker_stats import Stats
from rainband.strategy import WorkItem
from rainband.worker.leases import HeldLeases
from rainband.worker.pulls import PullHandle, Pulls
from rainband.worker.pushes import Pushes, PushHandle
from rainband.worker.server_blocks import ServerBlocks
from rainband.worker.state_transfer import StateHandle, StateTransfer
from rainband.worker.work_items import ItemsInHand, StillNeeded

if TYPE_CHECKING:
    from rainband.observer import Observer


@dataclass(eq=False, slots=True)
class StateChanged(Handle):
    """The next message from anywhere: it may change what there is to do."""

    changed: bool = False

    def ready(self) -> bool:
        return self.changed


class Refresh(Look):
    """A look at the parameters that have arrived."""

    __slots__ = ("client",)

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client

    def __await__(self) -> Generator[Handle, None, None]:
        yield from super().__await__()
        current = self.client.pulls.current
        if current is None or current.ready():
            self.client.pull()


# size: one method for each thing that a strategy, a runtime or a message asks of a worker's side of the servers
class Client:
    """Leases, pushes and pulls of one worker behind one interface; delivers each message to the part it is for."""

    __slots__ = (
        "items",
        "leases",
        "me",
        "others_have_opened",
        "pulls",
        "pushes",
        "servers",
        "tell",
        "transfer",
        "waiting_for_change",
    )

    def __init__(
        self,
        me: Peer,
        plan: DataPlan,
        flat: Flat | None,
        blocks: Sequence[BlockSpec],
        owners: Sequence[int],
        ports: Sequence[Port],
        tell: Callable[[Message], None],
        part: int = 0,
    ) -> None:
        """`owners`: the server of each block. `part`: the submodel that this worker holds; only its blocks are used."""
        self.me = me
        self.tell = tell  # sends a message to the coordinator
        self.servers = ServerBlocks(flat, blocks, owners, ports, part)
        self.leases = HeldLeases(plan, tell)
        self.items = ItemsInHand(tell)  # of a coordinated run, instead of leases
        self.pushes = Pushes(me.index, self.servers, self.leases)
        self.pulls = Pulls(self.servers, self.pushes, self.leases)
        self.transfer = StateTransfer(self.servers)
        self.waiting_for_change: list[StateChanged] = []
        self.others_have_opened: Callable[[int], bool] | None = None  # has a round opened for this worker's replica?

    def receive(self, message: Message, payload: Tensor | None = None) -> None:
        """Take one message from the coordinator or a server."""
        observer = self.servers.observer
        if observer is not None:
            observer.receiving(message)
        match message:
            case Ack():
                if self.pushes.answered(message):
                    self.pulls.answered(message)
            case Params():
                self.pulls.received(message, payload)
            case PullDelayed():
                self.pulls.delayed(message)
            case Lease():
                self.leases.add(message)
            case Revoke():
                self.leases.revoke(message)
            case AssignItems():
                self.items.take(message)
            case ItemsDelivered():
                self.items.leave_off(message)
            case StatePart():
                self.transfer.received(message, payload)
            case Planned():
                self.leases.plan = message.plan
            case NoWork():
                self.leases.no_work = True
            case Finish():
                self.leases.finished = True
            case Halt():
                self.leases.stop_reason, self.leases.leaving = message.reason, message.leave
        if self.waiting_for_change:
            self._changed()
        if observer is not None:
            observer.received(message)

    def state_changed(self) -> StateChanged:
        """Return a handle that the next message makes ready."""
        state_changed = StateChanged()
        self.waiting_for_change.append(state_changed)
        return state_changed

    def _changed(self) -> None:
        for state_changed in self.waiting_for_change:
            state_changed.changed = True
        self.waiting_for_change.clear()

    @property
    def plan(self) -> DataPlan:
        return self.leases.plan

    @property
    def flat(self) -> Flat:
        return self.servers.flat

    @property
    def stats(self) -> Stats:
        return self.servers.stats

    @property
    def observer(self) -> Observer | None:
        return self.servers.observer

    @property
    def finished(self) -> bool:
        """True when every batch of the run is done."""
        return self.leases.finished

    @property
    def stopping(self) -> bool:
        """True when the run ends early."""
        return self.leases.stopping

    def next_item(self) -> WorkItem | None:
        """Return the next work item to compute, in rounds one of the lowest round; None if there is none now."""
        leases = self.leases
        plan = leases.plan
        if plan.coordinated:
            return self.items.next(plan)
        with_work = leases.with_work()
        if not with_work:
            if self.pulls.entered and not leases.has_unsettled:
                self.rest()
            return None
        lease = leases.next_lease(with_work)
        if plan.items_per_round and not self._is_open(leases.next_round(lease)):
            return None
        return leases.begin(lease, len(with_work))

    def still_needed(self, work_item: WorkItem) -> StillNeeded:
        """Check whether a work item that was begun is still to be delivered by this worker."""
        return StillNeeded(self.items, work_item)

    def request_again(self) -> None:
        """Repeat requests for work: the coordinator was restarted, and the ones sent before are lost."""
        self.items.ask_again()
        self._changed()

    def rest(self) -> None:
        """Report to the servers that this worker is idle, so that no reader waits for it."""
        self.pulls.rest()

    def open_rounds_with(self, others_have_opened: Callable[[int], bool]) -> None:
        """Begin a round only when this function returns True for it, too."""
        self.others_have_opened = others_have_opened

    def _is_open(self, round_: int) -> bool:
        """Return True if all blocks have this round's version; request it if that was not done."""
        self.pulls.round(round_)
        return self.pulls.has_opened() and (self.others_have_opened is None or self.others_have_opened(round_))

    def is_through(self, round_: int) -> bool:
        """Return True if this round is over and in the model, or if this worker has more to do for it first."""
        if any(self.leases.next_round(lease) <= round_ for lease in self.leases.with_work()):
            return True
        return self.pulls.round(round_ + 1).ready()

    def push(self, gradient: Gradient) -> PushHandle:
        """Send a gradient to every block; it may be overwritten when this returns."""
        handle = self.pushes.send(gradient)
        if self.observer is not None:
            self.observer.pushed(handle)
        return handle

    def exchange(self, gradient: Gradient) -> PullHandle:
        """Push, and pull the updated parameters block by block, while later blocks are still being sent.

        Until the handle was awaited, the worker's parameters change.
        """
        pull = self.pulls.with_push()
        for port, views in self.servers.borrowers:
            port.lend(pull.sequence, views)
        handle = self.pushes.send(gradient, self.pulls.must_ask)
        if self.observer is not None:
            self.observer.pushed(handle)
        for port, _ in self.servers.borrowers:
            port.settle(pull)
        self.pulls.requested(pull)
        return pull

    def pull(self, round: int | None = None, ahead: int = 0) -> PullHandle:
        """Request the newest parameters, with this worker's own pushes applied, or exactly those of a round.

        `ahead`: they are for the work item after this many that are computed but not pushed.
        """
        if round is not None:
            return self.pulls.round(round)
        current = self.pulls.current
        assert current is None or current.ready(), "await the pull before starting another"
        return self.pulls.newest(self.pushes.clock + ahead)

    def refresh(self) -> Refresh:
        """Take the parameters that have arrived, and request newer ones if all have; never wait."""
        return Refresh(self)

    def pull_latest(self) -> PullHandle:
        """Request the newest parameters, not to compute with; replaces a pull under way."""
        return self.pulls.newest(clock=-1)

    async def final_parameters(self) -> None:
        """Pull the parameters at the end of a run; if it ended within a round, the last version of all blocks."""
        await self.pull_latest()
        versions = {self.pulls.versions[block.index] for block in self.servers.blocks}
        if (
            self.plan.items_per_round and len(versions) > 1
        ):  # they differ by one: a block keeps the version before its newest
            await self.pulls.round(min(versions), final=True)

    def load(self, state: State | None = None) -> None:
        """Send the servers this worker's parameters and optimizer state: the first values of the run."""
        self.transfer.load(state or State())

    def server_moved(self, server: int, port: Port) -> None:
        """Go on with the copy that has taken over a server: send again what was not answered."""
        self.servers.move(server, port)
        self.pulls.request_again(port)
        self.transfer.request_again(port)

    def fetch_state(self) -> StateHandle:
        """Request the state of the servers' optimizers."""
        return self.transfer.fetch()
