"""One module for many simulated workers: each has its own parameters, and attaches them to compute.

Forward and backward happen in one event, so the parameters of another worker are never attached between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rainband.model.flat_parameters import Flat, is_finite
from rainband.model.gradient import Gradient
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import BlockSpec, cut
from rainband.strategy import Batch
from rainband.worker.sampler import Sampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rainband.protocol.ports import BlockValues

NOTHING = torch.empty(0)
KEPT_EPOCHS = 8


class WorkerMemory:
    """The parameters and buffers of one worker."""

    def __init__(self, flat: Flat, buffers: list[Tensor]) -> None:
        self.flat = flat
        self.module: nn.Module = flat.module
        self.buffers = [buffer.clone() for buffer in buffers]


class SharedModule:
    """The module of all workers, and the worker whose parameters are attached."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.buffers = list(flat.module.buffers())
        self.first_buffers = [buffer.clone() for buffer in self.buffers]
        self.wholes = cut(flat.layout, block_bytes=1 << 60)  # every vector as one block
        self.microbatches = 1  # of each batch
        self.owner: WorkerMemory | None = None
        self.samplers: dict[DataPlan, SharedSampler] = {}

    def memory(self) -> WorkerMemory:
        """Return memory for one more worker, with the initial values."""
        return WorkerMemory(self.flat.twin(), self.first_buffers)

    def attach(self, memory: WorkerMemory) -> None:
        """Attach a worker's parameters and buffers to the module."""
        if self.owner is memory:
            return
        self.owner = memory
        memory.flat.attach()
        for buffer, own in zip(self.buffers, memory.buffers, strict=True):
            buffer.data = own

    def sampler(self, plan: DataPlan) -> SharedSampler:
        return self.samplers.setdefault(plan, SharedSampler(plan))


class WrittenGradient(Gradient):
    """A gradient that is written into one vector per dtype: its blocks are views, not copies."""

    def __init__(self, gradient: Gradient, flat: Flat, wholes: Sequence[BlockSpec]) -> None:
        super().__init__(gradient.tensors, gradient.batches, gradient.samples, gradient.loss, gradient.weight)
        self.flat = flat
        self.wholes = wholes

    @cached_property
    def vectors(self) -> list[Tensor]:
        vectors = [torch.empty(whole.numel, dtype=getattr(torch, whole.dtype)) for whole in self.wholes]
        for whole, vector in zip(self.wholes, vectors, strict=True):
            self.flat.write(whole, self.tensors, vector)
        return vectors

    def block_values(self, flat: Flat, block: BlockSpec) -> BlockValues:
        if flat.absent(block, self.tensors):  # the payload leaves these parameters out
            return super().block_values(flat, block)
        return WrittenValues(self.vectors[block.vector][block.start : block.stop])

    @cached_property
    def is_finite(self) -> bool:
        return all(isfinite(vector.sum().item()) for vector in self.vectors) or is_finite(self.tensors)


class WrittenValues:
    """Values that are never written to again: a port need not copy them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def write(self, out: Tensor) -> None:
        out.copy_(self.tensor)

    def contiguous(self) -> Tensor | None:
        return self.tensor


class SharedSampler(Sampler):
    """One sampler for all workers; it stores the sample orders of several epochs, because workers may be apart."""

    def __init__(self, plan: DataPlan) -> None:
        super().__init__(plan)
        self.of_epoch: dict[int, Sampler] = {}

    def indices(self, batch: Batch) -> NDArray[np.int64]:
        epoch = self.plan.epoch_of(batch.portion)
        if epoch not in self.of_epoch:
            self.of_epoch[epoch] = Sampler(self.plan)
            self.of_epoch.pop(epoch - KEPT_EPOCHS, None)
        return self.of_epoch[epoch].indices(batch)


class EmptyFlat:
    """Stands in for a Flat in timing-only runs, as far as pushes, pulls and a worker's own step use one."""

    vectors: tuple[Tensor, ...] = ()
    parameters: tuple[Tensor, ...] = ()

    def view(self, block: BlockSpec) -> Tensor:
        return NOTHING

    def write(self, block: BlockSpec, tensors: list[Tensor | None], out: Tensor) -> None:
        """Write nothing."""

    def absent(self, block: BlockSpec, tensors: list[Tensor | None]) -> tuple[int, ...]:
        return ()

    def add_(self, tensors: list[Tensor | None], alpha: float) -> None:
        """Add nothing."""


def hollow(spec: BlockSpec) -> BlockSpec:
    """Return a copy of a block without elements: state machines treat it like any other, and compute nothing."""
    return BlockSpec(spec.index, spec.vector, spec.dtype, spec.start, spec.start, (), spec.part)
