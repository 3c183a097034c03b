"""The data plan, which divides the data of a run into batches and portions.

Batch k of a portion has the same samples, random numbers and learning rate on any worker. A portion is the unit of a
lease; portions are numbered through all epochs. There are two ways to divide an epoch into portions:

    free-running   a portion is `portion_batches` consecutive batches
    rounds         a round is `items_per_round` consecutive batches, each a work item; a portion is work item j
                   of `portion_batches` consecutive rounds, so that a lease spans many rounds
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

MAX_PORTION_BATCHES = 64  # a portion's marks are one machine word
OPEN_ENDED = 1 << 20  # epochs in the plan of custom loops without a number of epochs


class DataPlan(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: room for what is cached
    """The numbers that determine every batch of a run; workers compare them when they join."""

    fingerprint: str  # of the data
    layout: str  # digest of the model's layout
    num_samples: int
    batch_size: int
    epochs: int
    seed: int
    portion_batches: int
    batches_per_item: int = 1  # batches summed into one push
    items_per_round: int = 0  # work items of a round; 0 = no rounds
    drop_last: bool = False  # leave out an epoch's last batch if it is short
    coordinated: bool = False  # full-batch: each portion is one work item of every evaluation

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "epochs", "portion_batches", "batches_per_item"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.drop_last and self.num_samples < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size}: with drop_last, it must be at most {self.num_samples}, the samples of "
                "the data. Use a smaller one, or omit drop_last."
            )
        if self.portion_batches > MAX_PORTION_BATCHES:
            raise ValueError(f"portion_batches={self.portion_batches}: must be at most {MAX_PORTION_BATCHES}.")
        if self.portion_batches % self.batches_per_item:
            raise ValueError(
                f"portion_batches={self.portion_batches}: must be a multiple of "
                f"batches_per_item={self.batches_per_item}."
            )

    @cached_property
    def batches_per_epoch(self) -> int:
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    @cached_property
    def samples_per_epoch(self) -> int:
        return self.batches_per_epoch * self.batch_size if self.drop_last else self.num_samples

    @cached_property
    def num_batches(self) -> int:
        return self.batches_per_epoch * self.epochs

    @cached_property
    def rounds_per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.items_per_round) if self.items_per_round else 0

    @cached_property
    def portions_per_epoch(self) -> int:
        if self.items_per_round:
            return -(-self.rounds_per_epoch // self.portion_batches) * self.items_per_round
        return -(-self.batches_per_epoch // self.portion_batches)

    @cached_property
    def num_portions(self) -> int:
        return self.portions_per_epoch * self.epochs

    def epoch_of(self, portion: int) -> int:
        return portion // self.portions_per_epoch

    def batches_in(self, portion: int) -> int:
        """Return the number of batches in a portion; only an epoch's last may have fewer (in rounds even none)."""
        inside = portion % self.portions_per_epoch
        if not self.items_per_round:
            left = self.batches_per_epoch - inside * self.portion_batches
            return left if left < self.portion_batches else self.portion_batches
        group, position = divmod(inside, self.items_per_round)
        first = group * self.portion_batches
        with_this_column = -(-(self.batches_per_epoch - position) // self.items_per_round)
        return max(0, min(self.portion_batches, with_this_column - first))

    def batches_below(self, portion: int) -> int:
        """Return the number of batches in all portions before this one."""
        epochs, inside = divmod(portion, self.portions_per_epoch)
        return epochs * self.batches_per_epoch + sum(map(self.batches_in, range(inside)))

    def full(self, portion: int) -> int:
        """Return the mask of all batches of a portion."""
        return (1 << self.batches_in(portion)) - 1

    def number(self, portion: int, k: int) -> int:
        """Return the number within its epoch of batch k of a portion."""
        inside = portion % self.portions_per_epoch
        if not self.items_per_round:
            return inside * self.portion_batches + k
        group, position = divmod(inside, self.items_per_round)
        return (group * self.portion_batches + k) * self.items_per_round + position

    def samples_of(self, batches: int) -> int:
        """Return the samples of this many batches, taken epoch by epoch: the last batch of an epoch may be short."""
        epochs, left = divmod(batches, self.batches_per_epoch)
        return epochs * self.samples_per_epoch + min(left * self.batch_size, self.samples_per_epoch)

    def samples_in(self, portion: int, k: int) -> int:
        """Return the number of samples in a batch; only an epoch's last batch may have fewer."""
        left = self.num_samples - self.number(portion, k) * self.batch_size
        return left if left < self.batch_size else self.batch_size

    def round_of(self, portion: int, k: int) -> int:
        """Return the round, numbered through all epochs, of batch k of a portion."""
        inside = portion % self.portions_per_epoch
        return (
            self.epoch_of(portion) * self.rounds_per_epoch + inside // self.items_per_round * self.portion_batches + k
        )

    def position_of(self, portion: int) -> int:
        return portion % self.portions_per_epoch % self.items_per_round

    def items_in_round(self, round_: int) -> int:
        """Count the work items of a round; an epoch's last round may be short."""
        inside = round_ % self.rounds_per_epoch
        return min(self.items_per_round, self.batches_per_epoch - inside * self.items_per_round)

    def progress(self, portion: int, k: int) -> float:
        """Return the progress of the run at a batch, from 0 to 1, which determines the learning rate."""
        number = self.number(portion, k)
        if self.items_per_round:
            number -= number % self.items_per_round  # all work items of a round have one rate
        return (self.epoch_of(portion) * self.batches_per_epoch + number) / self.num_batches


class BatchRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive batches of one portion, with the lease under which they were computed."""

    portion: int
    first: int
    last: int  # exclusive
    lease: int

    @property
    def mask(self) -> int:
        return ((1 << (self.last - self.first)) - 1) << self.first

    def __len__(self) -> int:
        return self.last - self.first


PushId = tuple[BatchRange, ...]  # the set of batches a push sums


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the ones in a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def ranges(portion: int, batches: Iterable[int], lease: int) -> PushId:
    """Return the push ID of some batches of one portion."""
    result: list[BatchRange] = []
    for k in sorted(batches):
        if result and result[-1].last == k:
            result[-1] = BatchRange(portion, result[-1].first, k + 1, lease)
        else:
            result.append(BatchRange(portion, k, k + 1, lease))
    return tuple(result)


def num_batches(name: PushId) -> int:
    return sum(len(r) for r in name)


def validate_push_id(plan: DataPlan, name: PushId, at_version: int = -1) -> str | None:
    """Return what is wrong with a push ID, or None: data from the network is checked before it is used."""
    if len(name) == 1 and not plan.items_per_round:  # nearly always
        [r] = name
        if 0 <= r.portion < plan.num_portions and 0 <= r.first < r.last <= plan.batches_in(r.portion):
            return None
    if plan.items_per_round and len(name) != 1:
        return f"a push in rounds must have one work item, and this one has {len(name)} ranges of batches"
    seen: dict[int, int] = {}
    for r in name:
        if not 0 <= r.portion < plan.num_portions:
            return f"portion {r.portion} is not in the plan of {plan.num_portions}"
        if not 0 <= r.first < r.last <= plan.batches_in(r.portion):
            return f"batches {r.first}-{r.last} are not in portion {r.portion} of {plan.batches_in(r.portion)}"
        if seen.get(r.portion, 0) & r.mask:
            return f"batches of portion {r.portion} are named twice"
        if plan.items_per_round and (len(r) > 1 or plan.round_of(r.portion, r.first) != at_version):
            return f"batches {r.first}-{r.last} of portion {r.portion} are not a work item of round {at_version}"
        seen[r.portion] = seen.get(r.portion, 0) | r.mask
    return None


def work_items(groups_: Sequence[Sequence[int]], batches_per_item: int) -> list[tuple[int, ...]]:
    """Divide the groups of a lease into work items of at most `batches_per_item` batches, each of one group."""
    return [
        tuple(group[at : at + batches_per_item]) for group in groups_ for at in range(0, len(group), batches_per_item)
    ]


def choose_portion_batches(batches_per_epoch: int, num_workers: int, batches_per_item: int) -> int:
    """Choose about four portions per worker and epoch, of whole work items and at most 64 batches."""
    wanted = batches_per_epoch // (4 * max(1, num_workers))
    longest = MAX_PORTION_BATCHES // batches_per_item * batches_per_item
    return max(batches_per_item, min(longest, wanted // batches_per_item * batches_per_item))
