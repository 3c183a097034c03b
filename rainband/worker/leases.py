"""The leases of one worker: the batches that are its own to compute, and which of them are not settled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rainband.protocol.data_plan import DataPlan, PushId, work_items
from rainband.protocol.messages import Lease, LeaseEnd, LeaseRequest, Message, Return, Revoke
from rainband.strategy import Batch, WorkItem


@dataclass(slots=True)
class HeldLease:
    """A lease that this worker holds, on the batches of one portion."""

    portion: int
    number: int
    todo: deque[tuple[int, ...]]  # work items that are not begun
    unsettled: set[int]  # batches that at least one block has not answered
    partly_accepted: frozenset[int] = frozenset()  # by some block, under an earlier lease


class HeldLeases:
    """Requests leases from the coordinator, hands out their work items and returns them when they are settled."""

    __slots__ = ("finished", "held", "leaving", "no_work", "plan", "requested", "stop_reason", "tell")

    def __init__(self, plan: DataPlan, tell: Callable[[Message], None]) -> None:
        self.plan = plan
        self.tell = tell  # sends a message to the coordinator
        self.held: dict[int, HeldLease] = {}  # by portion
        self.requested = False
        self.no_work = False  # the coordinator had nothing to lease at the last request
        self.finished = False  # every batch of the run is done
        self.stop_reason: str | None = None  # the run ends early, for this reason
        self.leaving = False  # only this worker ends early

    def add(self, lease: Lease) -> None:
        self.requested = self.no_work = False
        held = self.held.get(lease.portion)
        if held is not None and held.number >= lease.lease:
            return  # a repeated message
        batches = {k for group in lease.groups for k in group}
        todo = deque(work_items(lease.groups, self.plan.batches_per_item))
        self.held[lease.portion] = HeldLease(
            lease.portion, lease.lease, todo, batches, frozenset(lease.partly_accepted)
        )

    def revoke(self, revoke: Revoke) -> None:
        """Drop a lease that another worker continues. (Servers reject its pushes from now on.)"""
        held = self.held.get(revoke.portion)
        if held is not None and held.number < revoke.lease:
            del self.held[revoke.portion]

    def with_work(self) -> list[HeldLease]:
        """Return the leases with work items that are not begun; request another one if they run low."""
        found = [lease for lease in self.held.values() if lease.todo]
        # One lease is kept in reserve. In rounds every worker requests always: the coordinator balances the leases.
        if (
            not self.requested
            and not self.finished
            and self.stop_reason is None
            and (self.plan.items_per_round or len(found) <= 1)
        ):
            self.requested = True
            self.tell(LeaseRequest())
        return found

    def next_lease(self, leases: Sequence[HeldLease]) -> HeldLease:
        """Return the lease to take a work item from: in rounds the one with the lowest round."""
        if not self.plan.items_per_round:
            return leases[0]
        return min(leases, key=lambda lease: (self.next_round(lease), lease.portion))

    def next_round(self, lease: HeldLease) -> int:
        return self.plan.round_of(lease.portion, lease.todo[0][0])

    def begin(self, lease: HeldLease, num_leases: int) -> WorkItem:
        """Take a lease's next work item; `num_leases` leases had work before."""
        ks = lease.todo.popleft()
        round_ = self.plan.round_of(lease.portion, ks[0]) if self.plan.items_per_round else -1
        more = bool(lease.todo) or num_leases > 1
        if len(ks) == 1:
            return WorkItem((Batch(lease.portion, ks[0], lease.number),), round_, more)
        return WorkItem(tuple([Batch(lease.portion, k, lease.number) for k in ks]), round_, more)

    def is_new_to_all(self, batch: Batch) -> bool:
        """Return True if no block has accepted this batch under an earlier lease."""
        held = self.held.get(batch.portion)
        known = held is not None and held.number == batch.lease and batch.k not in held.partly_accepted
        return batch.lease == 1 or known

    def request_again(self) -> None:
        """Forget that a lease was requested: the request is lost, or the leases were given up."""
        self.requested = False

    @property
    def run_stops(self) -> bool:
        """Return True if the run ends early, and not only this worker."""
        return self.stopping and not self.leaving

    @property
    def stopping(self) -> bool:
        """Return True if the run ends early."""
        return self.stop_reason is not None

    @property
    def has_unsettled(self) -> bool:
        return any(lease.unsettled for lease in self.held.values())

    def settle(self, name: PushId) -> None:
        """Note that every block has answered for these batches; return a lease that has no others."""
        if self.plan.coordinated:
            self.tell(Return(name[0].portion, name[0].lease, LeaseEnd.DONE))
        for r in name:
            lease = self.held.get(r.portion)
            if lease is None or lease.number != r.lease:
                continue
            if r.last - r.first == 1:
                lease.unsettled.discard(r.first)
            else:
                lease.unsettled.difference_update(range(r.first, r.last))
            if not lease.unsettled:
                self.give_back(r.portion, LeaseEnd.DONE)

    def may_end_with(self, name: PushId) -> bool:
        """Return True if settling these batches could complete a lease."""
        for r in name:
            lease = self.held.get(r.portion)
            if lease is not None and len(lease.unsettled) <= r.last - r.first:
                return True
        return False

    def give_back(self, portion: int, reason: LeaseEnd) -> None:
        lease = self.held.pop(portion)
        self.tell(Return(portion, lease.number, reason))

    def give_all_back(self, reason: LeaseEnd) -> None:
        for portion in list(self.held):
            self.give_back(portion, reason)

    def lose(self, name: PushId, reason: LeaseEnd) -> None:
        """Give back the leases under which these batches were computed, if they are still held."""
        for r in name:
            lease = self.held.get(r.portion)
            if lease is not None and lease.number == r.lease:
                self.give_back(r.portion, reason)

    def skip_rounds(self, last: int) -> None:
        """Drop the work of all rounds up to `last`: they are over."""
        for lease in list(self.held.values()):
            over = {k for k in lease.unsettled if self.plan.round_of(lease.portion, k) <= last}
            lease.unsettled -= over
            lease.todo = deque(work_item for work_item in lease.todo if not over & set(work_item))
            if not lease.unsettled:
                self.give_back(lease.portion, LeaseEnd.DONE)
