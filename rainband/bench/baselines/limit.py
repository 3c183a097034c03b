"""The physical limit of a push, an apply and a pull: the same apply and copy inside one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rainband.model.block_optimizer import build
from rainband.protocol.optimizer_spec import OptimizerSpec


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class PhysicalLimit:
    """One optimizer step over a vector and one copy of it."""

    def __init__(self, num_elements: int, spec: OptimizerSpec) -> None:
        self.values, self.copy = torch.zeros(num_elements), torch.zeros(num_elements)
        self.gradient = torch.full((num_elements,), 1e-3)
        self.optimizer = build(spec, [self.values])

    def apply_and_copy(self) -> None:
        self.values.grad = self.gradient
        self.optimizer.step()
        self.copy.copy_(self.values)
