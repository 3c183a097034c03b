r"""A slope of whole numbers: after any order of updates the parameters are known to the last bit.

    f(w) = mean_i  w . x_i          x_ij in {1, ..., 8}

The gradient of a batch, the mean of its x_i, does not depend on w. Batch sizes are powers of two, so it is
exact in float32; with plain SGD and a learning rate that is a power of two so is every sum of updates. One
batch lost or applied twice then shows as a wrong bit. (A mean over workers stays exact when their number is a
power of two.) There is no lowest point: this task is for counting, not for learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from rainband.tasks.task import TensorData

LARGEST = 8
EXACT_INTEGERS = 2**24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class Linear:
    dimension: int = 16
    samples: int = 1024
    seed: int = 0  # of the samples
    batch_size: int = 4
    epochs: int = 2

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size & (self.batch_size - 1):
            raise ValueError(f"batch_size={self.batch_size} would round the gradients: choose a power of two.")
        if self.samples < 1 or self.samples % self.batch_size:
            raise ValueError(
                f"{self.samples} samples leave a short last batch, which would round its gradient: "
                f"choose a multiple of batch_size={self.batch_size}."
            )
        if LARGEST * self.samples * self.epochs > EXACT_INTEGERS:
            raise ValueError(
                f"{self.samples} samples x {self.epochs} epochs outgrow what float32 holds exactly: "
                f"choose at most {EXACT_INTEGERS // LARGEST} in all."
            )

    @cached_property
    def _x(self) -> Tensor:
        random = np.random.default_rng(self.seed)
        whole = random.integers(1, LARGEST, (self.samples, self.dimension), endpoint=True)
        return torch.from_numpy(whole.astype(np.float32))

    def model(self) -> nn.Linear:
        model = nn.Linear(self.dimension, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self) -> TensorData:
        return TensorData(self._x)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        dots: Tensor = model(batch[0])
        return dots.mean()

    def after(self, lr: float, epochs: int | None = None) -> Tensor:
        """Return the weights when SGD has applied every batch once per epoch, from the start at 0."""
        total = self._x.sum(0, dtype=torch.float64) * (self.epochs if epochs is None else epochs)
        return (-lr * total / self.batch_size).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        with torch.no_grad():
            return {"loss": float(self.loss(model, (self._x.to(device),)))}
