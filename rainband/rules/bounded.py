"""Bounded staleness: a worker that is too far ahead of the slowest waits with its next read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from rainband.protocol.data_plan import num_batches
from rainband.protocol.messages import StalenessLimit
from rainband.rules.clocks import Clocks
from rainband.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.messages import Pull, Push
    from rainband.rules.rule import RuleBlock


# size: it inherits every hook of a rule
class Bounded(Rule):
    """Apply gradients on arrival, and measure how far ahead of the slowest worker their senders were.

    Staleness is measured when a gradient arrives, from the version it was computed at. It is compared with the bound
    that held when its reader was admitted. Subclasses decide who may read.
    """

    reads: Literal["admitted"] = "admitted"
    clocked = True
    bound: int = 0
    unit = ""

    def __init__(self, bound: int, last: int | None = None) -> None:
        self.first = self.bound = bound
        self.last = bound if last is None else last  # the bound moves there linearly over the run
        self.set_first, self.set_last = self.first, self.last  # by the strategy's settings
        self.clocks = Clocks()
        self.done = 0  # batches that have arrived
        self.granted: dict[tuple[int, int], int] = {}  # (reader, its clock) -> the bound under which it was admitted
        self.largest = 0  # the farthest that a reader was ahead of the slowest
        self.exceeded = 0  # gradients from readers beyond the bound

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._measure(push)
        self.done += num_batches(push.push_id)
        if self.last != self.first:
            self.bound = round(self.first + (self.last - self.first) * min(1.0, self.done / block.plan.num_batches))
        if gradient is not None:
            block.apply(gradient, [push], push.absent)

    def _measure(self, push: Push) -> None:
        began = push.began if push.began >= 0 else push.clock - 1
        ahead = began - self.clocks.slowest_at(push.version)
        self.largest = max(self.largest, ahead)
        self.exceeded += ahead > self.granted.pop((push.worker, began), self.bound)

    def retune(self, bound: int) -> None:
        """Use another bound from now on."""
        self.first = self.last = self.bound = bound

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        if pull.clock < 0:
            return True  # it does not compute with what it reads
        if not self._may_read(pull.clock, reader):
            return False
        before = self.granted.get((reader, pull.clock), 0)  # a request may be repeated, and the first reply used
        self.granted[reader, pull.clock] = max(before, self.bound)
        return True

    def _may_read(self, clock: int, reader: int) -> bool:
        raise AssertionError("subclasses implement _may_read")

    def holder(self, block: RuleBlock, pull: Pull, reader: int) -> int | None:
        return self.clocks.laggard(but=reader)

    def enter(self, block: RuleBlock, worker: int, base: int) -> None:
        self.clocks.enter(worker, base, block.version)

    def tick(self, block: RuleBlock, worker: int, clock: int) -> None:
        self.granted.pop((worker, clock - 1), None)  # of a push that was skipped or rejected
        self.clocks.tick(worker, clock, block.version)

    def clock_of(self, worker: int) -> int:
        return self.clocks.of.get(worker, 0)

    def forget(self, block: RuleBlock, worker: int) -> None:
        self.clocks.leave(worker, block.version)

    def state(self, given: Mapping[str, Tensor | float] | None = None) -> dict[str, Tensor | float]:
        """Return the bound and the part of the run that is done; the clocks of new workers begin anew.

        A bound of other settings is not continued: the run was forced to go on with new ones.
        """
        numbers = {name: int(value) for name, value in (given or {}).items() if not hasattr(value, "numel")}
        self.done = numbers.get("done", self.done)
        own = {"set_first": self.set_first, "set_last": self.set_last}
        if all(numbers.get(name, value) == value for name, value in own.items()):
            self.first, self.last = numbers.get("first", self.first), numbers.get("last", self.last)
            self.bound = numbers.get("bound", self.bound)
        return {"first": self.first, "last": self.last, "bound": self.bound, "done": self.done, **own}

    def limit(self) -> StalenessLimit:
        return StalenessLimit(max(self.first, self.last), self.unit, self.largest, self.exceeded)


# size: it inherits every hook of a rule
class StalenessBound(Bounded):
    """A reader at clock c waits until every worker has done c - bound work items, and itself all c.

    So it has read all pushes of all workers up to clock c - bound, and its own.
    """

    unit = "clocks"

    def _may_read(self, clock: int, reader: int) -> bool:
        clocks = self.clocks
        return clocks.of.get(reader, 0) >= clock and (not clocks.members or clock - clocks.slowest <= self.bound)


# size: it inherits every hook of a rule
class TaskBound(Bounded):
    """A worker starts its task number t when every worker has finished all its tasks before t - bound.

    A task starts with its read. So up to `bound` tasks of one worker may be under way, and with a bound of 1 or more
    the parameters for a task can be fetched while the one before it is computed.
    """

    unit = "tasks"

    def _may_read(self, clock: int, reader: int) -> bool:
        clocks = self.clocks
        return not clocks.members or clock - min(clocks.slowest, clocks.of.get(reader, 0)) <= self.bound
