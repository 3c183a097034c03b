"""A multi-layer perceptron on synthetic data, for measuring speed: 784 inputs, hidden layers, 10 classes.

    parameters   hidden layers    exactly
    0.1M         128                 101,770
    0.7M         512, 512            669,706
    5.8M         2048, 2048        5,824,522
    20M          4096, 4096       20,037,642

Inputs are random; a label is the largest output of a fixed random linear map, so the model can learn it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData, accuracy_and_loss

INPUTS, CLASSES, HELD_OUT = 784, 10, 1000
HIDDEN = {"0.1M": (128,), "0.7M": (512, 512), "5.8M": (2048, 2048), "20M": (4096, 4096)}


@dataclass(frozen=True)
class Mlp:
    parameters: str = "0.7M"
    samples: int = 4096
    seed: int = 0  # of the samples
    batch_size: int = 64
    epochs: int = 1

    def __post_init__(self) -> None:
        if self.parameters not in HIDDEN:
            raise ValueError(f"parameters={self.parameters}: choose from {', '.join(HIDDEN)}.")
        if self.samples < 1:
            raise ValueError(f"samples={self.samples}: samples must be at least 1.")

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng(self.seed)
        labeller = random.standard_normal((INPUTS, CLASSES), dtype=np.float32)
        inputs = random.standard_normal((self.samples + HELD_OUT, INPUTS), dtype=np.float32)
        return torch.from_numpy(inputs), torch.from_numpy((inputs @ labeller).argmax(1))

    def model(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width, following in pairwise((INPUTS, *HIDDEN[self.parameters], CLASSES)):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self) -> TensorData:
        inputs, labels = self._samples
        return TensorData(inputs[: self.samples], labels[: self.samples])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs, labels = self._samples
        return accuracy_and_loss(model, inputs[self.samples :], labels[self.samples :])
