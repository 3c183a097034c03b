"""The interface between a training loop and the exchange of gradients in rounds of split batches.

A round is one batch of the script. It is cut into parts, one for each member; the k-th `mean` of a round averages the
k-th backward pass of all members. A loop does this, on every member alike:

    for epoch in ...:
        while True:
            where = exchange.begin(epoch)            # waits for the others; may give or receive the state
            if where.epoch > epoch:
                break                                # a joiner: this epoch was over before it came
            part = exchange.cut(batch)               # batch number where.batch of this epoch; None: there is none
            if part.is_over:
                break                                # no batch, and no samples were carried over
            ... forward and backward of part.samples ...
            outcome = exchange.mean(tensors)         # after each backward
            ... the user's optimizer.step(), then exchange.stepped()
    exchange.leave()

`begin(epoch)` also ends the round before: a member that had no `mean` in it counts as one that skipped it. Leaving an
epoch early (`break`) needs no call: `begin(epoch + 1)` waits until all members have left it. A member that missed a
step (`skip` while others averaged) receives the state of a member that did not, in one of its next calls of `begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from rainband.rounds.statistics import RoundStatistics


class RoundId(NamedTuple):
    """The number of a round: its epoch, and that of its batch in the epoch."""

    epoch: int
    batch: int


Trial = Literal["whole", "doubled", "idle", "verdict"]
"""In the first rounds, one member computes `whole` batches, as one process would, and the others wait (`idle`). In the
very first, one of these computes the batch twice (`doubled`), which shows whether the loss is a sum over samples. The
`verdict` is the round after them, in which all learn it."""


class Part(NamedTuple):
    """One member's part of a round's samples: those carried over from earlier rounds, then those of the batch."""

    samples: Sequence[int]  # what this member computes; never empty, unless the round is
    first: int = 0  # position of the first one among all samples of the round
    weight: int = 0  # samples that count: all of them, or 0 if another member has the same part
    total: int = 0  # samples of the round, over all members
    is_over: bool = False  # the epoch has no such round
    trial: Trial | None = None  # what this round is for, if it is one of the first
    batch_sizes: tuple[int, ...] = ()  # how many of the samples are of each batch, if the round has several

    @property
    def last(self) -> int:
        """Return the position after the last sample that counts."""
        return self.first + self.weight


class Outcome(NamedTuple):
    """The result of one exchange."""

    # False: this member was excluded, or has missed a step. Its tensors have no meaning, and must not be stepped on:
    # the loop sets its gradients to zero. One of the next calls of `begin` receives the state.
    took_part: bool
    weight: float = 0.0  # sum of the weights that were averaged; 0: all members skipped, the tensors are unchanged
    numbers: tuple[float, ...] = ()  # of the longest-serving member
    scalars: tuple[float, ...] = ()  # weighted means


class Differences(NamedTuple):
    """Differences between the members of a round."""

    apart: tuple[int, ...] = ()  # ranks that were at another place of the loop in the last exchange of numbers
    behind: tuple[int, ...] = ()  # that made fewer exchanges of gradients than this member in this round, and went on
    has_other_samples: bool = False  # this member's batch of the round is not that of the others


class StateHolder(Protocol):
    """The training state of one member, which another one may receive."""

    def collect(self) -> Any:
        """Return parameters, optimizer state and the rest as a pytree of tensors, numbers and strings."""

    def apply(self, state: Any) -> None:
        """Replace this member's state by what `collect` returned on another member."""

    def fingerprint(self) -> int:
        """Return a hash of the parameters, below 2**63. Called every 100 rounds, to notice members that differ."""

    def has_changed(self) -> bool:
        """Return True, once, if the loop itself has changed parameters: then the members compare theirs at once."""


class Exchange(Protocol):
    """One member's side of the exchange. All calls may wait for other members."""

    rank: int
    has_left: bool  # a member has ended an epoch while others computed gradients

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part in this round, in order."""

    @property
    def is_first(self) -> bool:
        """Return True on exactly one member: the longest-serving one."""

    @property
    def drifted(self) -> int:
        """Return how often a member has received the state because its parameters differed."""

    @property
    def batches(self) -> int:
        """Return the number of rounds so far that had samples."""

    @property
    def differences(self) -> Differences:
        """Return how the members differ, as the last exchange shows."""

    def begin(self, epoch: int) -> RoundId:
        """End the round before, and return the next one: of this epoch, or of a later one.

        It waits until the members of the round are known, and gives the state to those that need it, or receives it.
        Called again before `cut`, it returns the same round.
        """

    def cut(self, batch: Sequence[int] | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        """Return this member's part of the round's batch; with None, of what was carried over, if anything was.

        Every member passes the same batch: sample indices, or range(n) for n rows that the loop has drawn itself.
        The samples are compared, and `digest`: a checksum of rows that the loop has drawn.
        With `lengths`, it is several batches in one, and the part has samples of each: `weight` is that of all.
        """

    def cut_beside(self, batch: Sequence[int], is_sum: bool = False) -> Sequence[int]:
        """Return this member's part of another batch that the loop has drawn in this round.

        It has the proportions of the round's batch; if it cannot be cut so, it is the whole batch for all members.
        """

    def mean(
        self,
        tensors: list[Tensor | None],
        weight: float | None = None,
        numbers: Sequence[float] = (),
        scalars: Sequence[float] = (),
    ) -> Outcome:
        """Replace each tensor, in place, by its weighted mean over the members: sum of n_j t_j / sum of n_j.

        `tensors` has the shapes and order that the exchange was made with. None is no value: it counts as zero where
        others have one, and is then replaced in the list by a new tensor; it stays None where no member has a value.
        `weight` is the number of samples of the part, unless given; a duplicate part must have 0.
        """

    def mean_scalars(self, scalars: Sequence[float], weight: float | None = None) -> Outcome:
        """Average numbers without tensors. All members must call it at the same place of a round."""

    def statistics(self, weight: Callable[[], float]) -> RoundStatistics:
        """Return what exchanges statistics of layers; `weight` returns that of this member's gradients."""

    def skip(self, reason: str) -> None:
        """Take no part in this round: its samples count as skipped, and others average without this member."""

    def defer(self) -> None:
        """Add this round's gradient to that of the next `mean`, without an exchange now (gradient accumulation)."""

    def leave_out(self, samples: int) -> None:
        """Count samples of earlier rounds as skipped: their mean was not finite, and a GradScaler left out the step."""

    def stepped(self) -> None:
        """Note a step of the user's optimizer. A member with fewer steps than others receives the state."""

    def pause(self) -> None:
        """Let no other member wait for this one until its next `begin`, where it returns and receives the state."""

    def leave(self) -> None:
        """End this member's part in the run."""

    def abandon(self) -> None:
        """Let no other member wait for this one any more: its script has failed."""
