"""A vector of all parameters of a model, with the arithmetic of the papers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ModelVector:
    """A vector: one tensor per parameter. Its operators return new vectors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def copy(self) -> ModelVector:
        return ModelVector([tensor.detach().clone() for tensor in self.tensors])

    def zeros(self) -> ModelVector:
        """Return a vector of zeros of the same shapes."""
        return ModelVector([torch.zeros_like(tensor) for tensor in self.tensors])

    def __len__(self) -> int:
        return len(self.tensors)

    def part(self, part: range) -> ModelVector:
        """Return the vector of some of the parameters."""
        return ModelVector([self.tensors[i] for i in part])

    def with_part(self, part: range, values: ModelVector) -> ModelVector:
        """Return this vector with other values of some of the parameters."""
        changed = dict(zip(part, values.tensors, strict=True))
        return ModelVector([changed.get(i, tensor) for i, tensor in enumerate(self.tensors)])

    def __add__(self, other: ModelVector) -> ModelVector:
        return ModelVector(torch._foreach_add(self.tensors, other.tensors) if self.tensors else [])

    def __sub__(self, other: ModelVector) -> ModelVector:
        return ModelVector(torch._foreach_sub(self.tensors, other.tensors) if self.tensors else [])

    def __mul__(self, factor: float) -> ModelVector:
        return ModelVector(torch._foreach_mul(self.tensors, factor) if self.tensors else [])

    __rmul__ = __mul__

    def square(self) -> float:
        """Return the squared length."""
        return sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in self.tensors)
