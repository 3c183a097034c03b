"""Models to split in benchmarks: a chain of equal layers, and two equal branches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData

CLASSES = 10


def layers(number: int, width: int) -> list[nn.Module]:
    return [module for _ in range(number) for module in (nn.Linear(width, width), nn.ReLU())]


@dataclass(frozen=True)
class Chain:
    """A chain of equal layers, so that two stages of half of them have equal work."""

    layers: int = 8
    width: int = 1024
    samples: int = 4096
    batch_size: int = 1024
    epochs: int = 1

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, self.width, generator=generator)
        return inputs, torch.randint(CLASSES, (self.samples,), generator=generator)

    def model(self) -> nn.Module:
        return nn.Sequential(*layers(self.layers, self.width), nn.Linear(self.width, CLASSES))

    def stages(self) -> tuple[nn.Module, nn.Module]:
        """Return the two stages as modules."""
        model = self.model()
        assert isinstance(model, nn.Sequential)
        return model[: self.layers], model[self.layers :]  # a layer is two modules

    def data(self) -> TensorData:
        return TensorData(*self._samples)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class TwoBranches(nn.Module):
    """Two chains that read the same input, and a layer that reads both."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(*layers(number, width))
        self.right = nn.Sequential(*layers(number, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        answer: Tensor = self.head(self.left(inputs) + self.right(inputs))
        return answer


@dataclass(frozen=True)
class Branches(Chain):
    """A task with half of the layers in each of two branches."""

    def model(self) -> nn.Module:
        return TwoBranches(self.layers // 2, self.width)
