"""Who answers for a memory that all workers write to: the coordinator's questions, from the memory's own tables.

To the coordinator it is a server, but no gradient ever comes here: workers write in place, and it only reads what they
have noted. A state machine like the servers; it lives where the coordinator does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rainband.coordinator.coordinator import Coordinator, Out
from rainband.protocol.messages import (
    Address,
    Ask,
    Assign,
    Flush,
    Forget,
    Loaded,
    Message,
    Missed,
    Peer,
    Ready,
    Report,
    Revoke,
    ServerJoin,
    Sets,
    Skipped,
    Tally,
    Tune,
)
from rainband.runtimes.hogwild.memory import OneMemory, places_of

KEEPER = Peer("server", 0)
NOT_FINITE = "not finite"
FROM_WORKERS = (Ask, Loaded)  # what workers say to it, over their connection to the coordinator


class Keeper:
    """Makes the memory when its size is known, and says what is in its tables."""

    def __init__(self, make_room: Callable[[int], Any], guard: bool = False) -> None:
        """`make_room` gives so many writable bytes, all zero."""
        self.make_room = make_room
        self.guard = guard
        self.memory: OneMemory | None = None
        self.tuned = 0  # the last decision that was taken
        self.cut_short: set[int] = set()  # workers that were lost while they wrote

    def join(self, coordinator: Coordinator) -> None:
        """Take a server's place, before anyone else is there."""
        coordinator.receive(KEEPER, ServerJoin(Address("", 0)), 0.0)
        coordinator.events.clear()  # nobody has come

    def answered(self, coordinator: Coordinator, outs: Sequence[Out], now: float) -> list[Out]:
        """What is left to send when all that was meant for the keeper is answered."""
        waiting, left = deque(outs), list[Out]()
        while waiting:
            out = waiting.popleft()
            if out.to != KEEPER:
                left.append(out)
                continue
            for reply in self.receive(out.message):
                waiting += coordinator.receive(KEEPER, reply, now)
        return left

    def receive(self, message: Message) -> list[Message]:
        """Take one message; returns what to tell the coordinator."""
        if isinstance(message, Assign):
            num_bytes = places_of(message.blocks, message.plan, message.num_workers).num_bytes
            self.memory = OneMemory(self.make_room(num_bytes), message.blocks, message.plan, message.num_workers)
            return []
        memory = self.memory
        if memory is None:
            return []
        match message:
            case Loaded():
                return [Ready()]
            case Ask():
                return [self.report()]
            case Flush():
                return [self.report(flushed=True)]
            case Revoke():
                memory.fence(message.portion, message.lease)
                return [Sets(message.portion, message.lease, (memory.marks(message.portion),))]
            case Forget() if memory.is_writing(message.worker):
                self.cut_short.add(message.worker)
            case Tune() if message.number > self.tuned:
                self.tuned = message.number
                memory.lower(message.lr_factor)
        return []

    def report(self, flushed: bool = False) -> Report:
        """As a server's: the marks and the measurements."""
        assert self.memory is not None, "there is nothing to report before the run has begun"
        memory, marks = self.memory, self.memory.all_marks()
        full = marks == memory.full_marks
        low = int(np.argmin(full)) if not full.all() else len(full)
        begun = np.flatnonzero(marks).tolist()
        skipped = [(portion, mask) for portion in begun if (mask := memory.skipped_in(portion))]
        had = int(np.unpackbits(marks.view(np.uint8)).sum())
        staleness = memory.staleness()
        total: Counter[int] = sum(staleness.values(), Counter())
        updates = total.total()
        return Report(
            low=low,
            full=tuple((low + np.flatnonzero(full[low:])).tolist()),
            had=had,
            updates=updates,
            blocks=(Tally(had, updates, sum(mask.bit_count() for _, mask in skipped), 0),),
            skipped=tuple(Skipped(portion, mask, NOT_FINITE) for portion, mask in skipped),
            refused={"revoked": refused} if (refused := memory.refused()) else {},
            staleness={worker: dict(counts) for worker, counts in staleness.items()},
            flushed=flushed,
            missed=(Missed(0, updates, sum(n * times for n, times in total.items()), max(total, default=0)),),
            guard=self.guard,
            unlocked=True,
            cut_short=len(self.cut_short),
        )
