r"""A quadratic loss with a known minimum, which shows errors in a strategy's arithmetic as a distance from it.

    f(w) = mean_i  1/2 sum_j h_j (w_j - x_ij)^2          so   w* = mean_i x_i

with curvatures h_j evenly spaced on a log scale from 1 down to 1 / condition. Training starts at w = 0. There is no
held-out data: distance and loss are those of all training samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log10

import numpy as np
import torch
from torch import Tensor, nn

from rainband.tasks.task import TensorData


class Offset(nn.Module):
    """The parameters w; the output is their difference from each sample."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimension))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


@dataclass(frozen=True)
class Quadratic:
    dimension: int = 32
    samples: int = 1024
    condition: float = 10.0  # largest / smallest curvature; with 1, the gradient is w - mean(batch)
    noise: float = 1.0  # spread of the samples around their center; 0: all batches are equal
    seed: int = 0  # of the samples
    batch_size: int = 32
    epochs: int = 10

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.samples < 1:
            raise ValueError(f"dimension={self.dimension} samples={self.samples}: both must be at least 1.")
        if self.condition < 1 or self.noise < 0:
            raise ValueError(
                f"condition={self.condition} noise={self.noise}: condition must be at least 1, noise at least 0."
            )

    @cached_property
    def _x(self) -> Tensor:
        random = np.random.default_rng(self.seed)
        center = random.standard_normal(self.dimension, dtype=np.float32)
        spread = random.standard_normal((self.samples, self.dimension), dtype=np.float32)
        return torch.from_numpy(center + np.float32(self.noise) * spread)

    @cached_property
    def _curvature(self) -> Tensor:
        return torch.logspace(0.0, -log10(self.condition), self.dimension)

    def model(self) -> Offset:
        return Offset(self.dimension)

    def data(self) -> TensorData:
        return TensorData(self._x)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        offset: Tensor = model(batch[0])
        return 0.5 * (self._curvature.to(offset.device) * offset.square()).sum(1).mean()

    def optimum(self) -> Tensor:
        """Return w*, the parameters with the lowest loss."""
        return self._x.mean(0, dtype=torch.float64).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        w = next(model.parameters()).detach()
        with torch.no_grad():
            loss = self.loss(model, (self._x.to(w.device),))
        return {"distance": float(torch.linalg.vector_norm(w.cpu() - self.optimum())), "loss": float(loss)}
