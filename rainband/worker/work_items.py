"""Work items of a full-batch evaluation that are assigned to one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import AssignItems, ItemsDelivered, LeaseRequest, Message
from rainband.protocol.steps import Handle, Look
from rainband.strategy import Batch, WorkItem


class ItemsInHand:
    """Requests more work items while the last one is computed, and reports when it has none."""

    __slots__ = ("at_version", "has_requested", "said_idle", "spare", "tell", "work_items")

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self.tell = tell  # sends a message to the coordinator
        self.at_version = -1  # of the current evaluation
        self.work_items: deque[int] = deque()  # that are not begun
        self.spare: set[int] = set()  # delivered by other workers
        self.has_requested = False
        self.said_idle = False

    def take(self, message: AssignItems) -> None:
        """Add assigned work items; those of earlier evaluations are dropped."""
        self._advance_to(message.at_version)
        if message.at_version == self.at_version:
            self.has_requested = self.said_idle = False
            self.work_items += [work_item for work_item in message.work_items if work_item not in self.work_items]
            self.spare.difference_update(message.work_items)

    def leave_off(self, message: ItemsDelivered) -> None:
        """Drop work items that other workers have delivered."""
        self._advance_to(message.at_version)
        if message.at_version == self.at_version:
            self.spare.update(message.work_items)
            self.work_items = deque(work_item for work_item in self.work_items if work_item not in self.spare)

    def ask_again(self) -> None:
        self.has_requested = self.said_idle = False

    def _advance_to(self, at_version: int) -> None:
        if at_version > self.at_version:
            self.at_version = at_version
            self.work_items.clear()
            self.spare.clear()

    def next(self, plan: DataPlan) -> WorkItem | None:
        """Return the next work item to compute; None if there is none now."""
        idle = not self.work_items
        if (len(self.work_items) <= 1 and not self.has_requested) or (idle and not self.said_idle):
            self.has_requested, self.said_idle = True, idle
            self.tell(LeaseRequest(idle))
        if idle:
            return None
        work_item = self.work_items.popleft()
        batches = tuple(Batch(work_item, k, self.at_version) for k in range(plan.batches_in(work_item)))
        return WorkItem(batches, self.at_version, bool(self.work_items))

    def after(self, batch: Batch, plan: DataPlan) -> Batch | None:
        """Return the batch that will be computed after this one, if it is known."""
        if batch.k + 1 < plan.batches_in(batch.portion):
            return Batch(batch.portion, batch.k + 1, batch.lease)
        return Batch(self.work_items[0], 0, self.at_version) if self.work_items else None

    def wants(self, work_item: WorkItem) -> bool:
        """Return True if this worker should still deliver a work item that was begun."""
        return work_item.round == self.at_version and work_item.batches[0].portion not in self.spare


class StillNeeded(Look):
    """A check, after the messages that have arrived, whether a work item that was begun is still to be delivered."""

    __slots__ = ("items", "work_item")

    def __init__(self, items: ItemsInHand, work_item: WorkItem) -> None:
        super().__init__()
        self.items = items
        self.work_item = work_item

    def __await__(self) -> Generator[Handle, None, bool]:
        yield from super().__await__()
        return self.items.wants(self.work_item)
