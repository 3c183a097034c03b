r"""A linear loss with whole numbers: after updates in any order, the parameters are known exactly.

    f(w) = mean_i  w . x_i          x_ij in {1, ..., 8}

The gradient of a batch, the mean of its x_i, does not depend on w. Batch sizes are powers of two, so it is exact in
float32; with plain SGD and a learning rate that is a power of two, so is every sum of updates. A batch that is lost or
applied twice then changes the result. (A mean over workers is exact if their number is a power of two.) The loss has
no minimum: this task is for counting updates, not for learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from rainband.tasks.task import TensorData

LARGEST = 8
EXACT_INTEGERS = 2**24  # float32 represents every whole number up to here


@dataclass(frozen=True)
class Linear:
    dimension: int = 16
    samples: int = 1024
    seed: int = 0  # of the samples
    batch_size: int = 4
    epochs: int = 2

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size & (self.batch_size - 1):
            raise ValueError(f"batch_size={self.batch_size} would round gradients: choose a power of two.")
        if self.samples < 1 or self.samples % self.batch_size:
            raise ValueError(
                f"samples={self.samples} leaves a short last batch, whose gradient would be rounded: "
                f"choose a multiple of batch_size={self.batch_size}."
            )
        if LARGEST * self.samples * self.epochs > EXACT_INTEGERS:
            raise ValueError(
                f"{self.samples} samples x {self.epochs} epochs exceed the exact range of float32: "
                f"choose at most {EXACT_INTEGERS // LARGEST} in total."
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
        """Return the weights after SGD has applied every batch once per epoch, starting at 0."""
        total = self._x.sum(0, dtype=torch.float64) * (self.epochs if epochs is None else epochs)
        return (-lr * total / self.batch_size).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        with torch.no_grad():
            return {"loss": float(self.loss(model, (self._x.to(device),)))}
