"""The contract of an update rule: decides, per block, when a gradient is applied and which reads must wait.

A rule is pure: no I/O, no clock. Each block has a rule object of its own, which is copied and saved with the block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from rainband.protocol.data_plan import num_batches

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.data_plan import DataPlan, PushId
    from rainband.protocol.messages import Pull, Push, RoundChosen, StalenessLimit
    from rainband.protocol.parameter_buffers import ParameterBuffer


class Rule:
    """An update rule that applies nothing and admits every reader.

    A new rule overrides `absorb` and what else it needs; the other methods do nothing. A subclass may replace a
    property by a class attribute, such as `clocked = True`.
    """

    @property
    def reads(self) -> Literal["any", "admitted", "round"]:
        """Readers: any worker without asking, those that the rule admits, or exactly the version of a round."""
        return "any"

    @property
    def clocked(self) -> bool:
        """True if it counts the pushes of each worker: then enter, tick, clock_of and holder are called."""
        return False

    @property
    def chooses(self) -> bool:
        """True if block 0 chooses the work items of a round, and all other blocks use the same."""
        return False

    @property
    def keeps_reads(self) -> bool:
        """True if it stores a copy of what each reader received."""
        return False

    @property
    def buffered(self) -> int:
        """Batches that were accepted and are not in the parameters yet."""
        return sum(num_batches(push.push_id) for push in self.waiting_pushes() if not push.skip)

    def waiting_pushes(self) -> Sequence[Push]:
        """Return the pushes that were accepted and are not in the parameters yet."""
        return ()

    @property
    def gradients_per_update(self) -> int | None:
        """Gradients averaged into the next update, for reports; None: not a fixed number."""
        return None

    @property
    def bound(self) -> int | None:
        """The staleness bound; None: there is no bound."""
        return None

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        """Take an accepted push (no gradient: its batches are skipped). The gradient is lent: copy it to keep it."""
        raise NotImplementedError

    def absorb_sum(self, block: RuleBlock, pushes: Sequence[Push], total: Tensor | None, absent: Sequence[int]) -> None:
        """Take accepted pushes of a tree of servers, whose gradients were added on the way, each times its samples.

        The total may be kept. `absent`: the parameters that have no gradient in any of them.
        """
        raise NotImplementedError

    def admits(self, block: RuleBlock, pull: Pull, reader: int) -> bool:
        """Return True if this reader may read now."""
        return True

    def forget(self, block: RuleBlock, worker: int) -> None:
        """Stop waiting for a worker; what it pushed stays."""

    def flush(self, block: RuleBlock) -> None:
        """Apply what is buffered: the run ends."""

    # ---- checkpoints ----

    def state(self, given: Mapping[str, Tensor | float] | None = None) -> dict[str, Tensor | float]:
        """Return what a checkpoint must have besides the block; tensors are as long as the block.

        `given`: continue with what an earlier object returned; what is missing there keeps its first value.
        """
        return {}

    # ---- bounded staleness ----

    def retune(self, bound: int) -> None:
        """Use another bound from now on."""

    def limit(self) -> StalenessLimit | None:
        """Return the bound and the largest staleness measured; None: this rule has no bound."""
        return None

    def enter(self, block: RuleBlock, worker: int, base: int) -> None:
        """Wait for a worker from now on, because it asks to read. It has pushed nothing before clock `base`."""

    def tick(self, block: RuleBlock, worker: int, clock: int) -> None:
        """A push of this worker was answered, whatever the answer."""

    def clock_of(self, worker: int) -> int:
        """Return the work items that this worker has pushed, as this block has counted them."""
        return -1

    def holder(self, block: RuleBlock, pull: Pull, reader: int) -> int | None:
        """Return the worker for which a reader that is not admitted waits; None: for its own pushes."""
        return None

    # ---- rounds in which block 0 chooses ----

    def take_chosen(self) -> list[RoundChosen]:
        """Return what this block, being block 0, has chosen since the last call."""
        return []

    def choose(self, block: RuleBlock, named: RoundChosen) -> None:
        """Use the work items that block 0 has chosen for a round."""

    # ---- copies of what readers received ----

    def give(self, block: RuleBlock, reader: int) -> None:
        """A reader is admitted, and computes with the block as it is now."""

    def copy_of(self, reader: int, version: int) -> Tensor | None:
        """Return the copy of what this reader received at this version, if the rule keeps one."""
        return None


class RuleBlock(Protocol):
    """A block, as its rule may use it."""

    index: int
    plan: DataPlan
    buffer: ParameterBuffer
    values: Tensor  # the parameters, in the precision in which they are kept
    version: int

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        """Make one optimizer step: these pushes are now in the parameters, and the version rises by one."""

    def advance(self, pushes: Sequence[Push]) -> None:
        """Go to the next version without a step: every work item of the round was skipped."""

    def accumulate(self, gradient: Tensor, push: Push) -> None:
        """Add to the sum of the current evaluation; the parameters stay as they are."""

    def drop(self, names: Sequence[PushId], reason: str) -> None:
        """Declare batches skipped, with a reason, whether their gradients have arrived or not."""
