"""The sum of some batches' gradients: one tensor per parameter, None where there is no gradient."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from rainband.model.flat_parameters import BlockTensors, is_finite
from rainband.protocol.accounting import NOT_FINITE
from rainband.protocol.data_plan import BatchRange, PushId, ranges

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.model.flat_parameters import Flat
    from rainband.protocol.layout import BlockSpec
    from rainband.protocol.ports import BlockValues
    from rainband.strategy import Batch


class Gradient:
    """Gradients of a module's parameters, and the batches they were computed from."""

    def __init__(
        self,
        tensors: list[Tensor | None],
        batches: tuple[Batch, ...],
        samples: int,
        loss: float,
        weight: float | None = None,
    ) -> None:
        self.tensors = tensors
        self.batches = batches
        self.samples = samples
        self.loss = loss  # mean over the samples
        self.weight = samples if weight is None else weight  # in a mean with other parts of the batch
        self.left_out = ""  # why it is skipped, although nothing is wrong with it
        self.began: int | None = None  # the worker's clock when it began to compute it
        self.read: tuple[int, ...] | None = None  # the version of each block at which it was computed

    @cached_property
    def is_finite(self) -> bool:
        """Return True if the gradient is finite, checked once for the worker's own step and for the push."""
        return is_finite(self.tensors)

    @property
    def skip(self) -> str:
        """Return why its batches are skipped; empty: they are not."""
        return self.left_out or ("" if self.is_finite else NOT_FINITE)

    def block_values(self, flat: Flat, block: BlockSpec) -> BlockValues:
        """Return what is pushed to one block."""
        return BlockTensors(flat, block, self.tensors)

    def __add__(self, other: Gradient) -> Gradient:
        """Return the sum, in this gradient's memory: do not use the summands afterwards."""
        return self.plus(other)

    def plus(self, other: Gradient, times: float = 1.0) -> Gradient:
        """Add `times` another gradient in place: do not use either of them afterwards."""
        both = [(a, b) for a, b in zip(self.tensors, other.tensors, strict=True) if a is not None and b is not None]
        if both:
            torch._foreach_add_([a for a, _ in both], [b for _, b in both], alpha=times)
        pairs = zip(self.tensors, other.tensors, strict=True)
        tensors = [(None if b is None else b.mul_(times)) if a is None else a for a, b in pairs]
        samples = self.samples + other.samples
        weight = self.weight + other.weight
        loss = (self.loss * self.weight + other.loss * other.weight) / (weight or 1.0)
        total = Gradient(tensors, self.batches + other.batches, samples, loss, weight)
        total.began, total.read = self.began, self.read  # of the older one, which is the stalest
        return total

    def __mul__(self, factor: float) -> Gradient:
        """Multiply the gradient in place: do not use it afterwards."""
        present = [tensor for tensor in self.tensors if tensor is not None]
        if present:
            torch._foreach_mul_(present, factor)
        product = Gradient(self.tensors, self.batches, self.samples, self.loss, self.weight)
        product.began, product.read = self.began, self.read
        return product

    def divide(self, weight: float) -> None:
        """Divide the gradient and its loss by a weight, in place."""
        present = [tensor for tensor in self.tensors if tensor is not None]
        if present:
            torch._foreach_div_(present, weight)
        self.loss /= weight

    def push_id(self) -> PushId:
        """Return the set of batches, as ranges with their leases."""
        if len(self.batches) == 1:  # nearly always: nothing to sort
            batch = self.batches[0]
            return (BatchRange(batch.portion, batch.k, batch.k + 1, batch.lease),)
        ordered = sorted(self.batches, key=lambda b: (b.portion, b.lease, b.k))
        return tuple(
            r
            for (portion, lease), some in groupby(ordered, key=lambda b: (b.portion, b.lease))
            for r in ranges(portion, (b.k for b in some), lease)
        )
