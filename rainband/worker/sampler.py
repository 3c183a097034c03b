"""The samples of a batch: those of an epoch in random order, the same order on every worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rainband.protocol.data_plan import DataPlan
    from rainband.strategy import Batch

MOST_LISTED = 1 << 20  # samples whose order is kept in memory (8 MB); the order of more is computed batch by batch
ROUNDS = 6  # an even number; four are enough if the function of each is random


class Sampler:
    """Returns the samples of a batch, the same on every worker."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self.epoch = -1
        self.order: Order

    def indices(self, batch: Batch) -> NDArray[np.int64]:
        epoch = self.plan.epoch_of(batch.portion)
        if epoch != self.epoch:
            listed = self.plan.num_samples <= MOST_LISTED
            self.epoch, self.order = epoch, (ListedOrder if listed else ComputedOrder)(self.plan, epoch)
        start = self.plan.number(batch.portion, batch.k) * self.plan.batch_size
        return self.order.at(start, min(start + self.plan.batch_size, self.plan.num_samples))


class Order:
    """A random order of all samples, which depends on the seed and the epoch."""

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        self.num_samples = plan.num_samples
        self.generator = np.random.Generator(np.random.PCG64([plan.seed, epoch]))

    def at(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the samples at some positions of the order."""
        raise NotImplementedError


class ListedOrder(Order):
    """An order that is kept in memory."""

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        super().__init__(plan, epoch)
        self.samples = self.generator.permutation(plan.num_samples)

    def at(self, first: int, end: int) -> NDArray[np.int64]:
        return self.samples[first:end]


class ComputedOrder(Order):
    """An order that is computed where it is needed, by a Feistel network: it takes no memory, and no time to begin.

    The network permutes all numbers below a power of two, the smallest that is large enough. A number that is no sample
    is permuted again until it is one, which gives a permutation of the samples.
    """

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        super().__init__(plan, epoch)
        bits = (self.num_samples - 1).bit_length()
        self.right_bits = np.uint64(bits // 2)
        self.masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << bits // 2) - 1)  # of left and right
        self.keys = self.generator.integers(0, 1 << 64, ROUNDS, dtype=np.uint64)

    def at(self, first: int, end: int) -> NDArray[np.int64]:
        numbers = self._permuted(np.arange(first, end, dtype=np.uint64))
        while (outside := numbers >= self.num_samples).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers.astype(np.int64)

    def _permuted(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self.right_bits, numbers & self.masks[1]
        for at, key in enumerate(self.keys):  # the halves change places each time
            left, right = right, left ^ (_hashed(right ^ key) & self.masks[at % 2])
        return (left << self.right_bits) | right


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers (the finalizer of MurmurHash3)."""
    for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
        numbers = (numbers ^ (numbers >> np.uint64(33))) * factor
    return numbers ^ (numbers >> np.uint64(33))
