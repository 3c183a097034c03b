"""Models whose batches are shared in benchmarks: perceptrons, a convolutional network and a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PERCEPTRONS = {"MLP 0.1M": (256, 128), "MLP 1M": (1024, 704), "MLP 6M": (2048, 2560)}
MODELS = (*PERCEPTRONS, "CNN", "LM 1M")


class Workload(NamedTuple):
    """A model, some batches, and its loss."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


class LanguageModel(nn.Module):
    """Five transformer layers that predict the next of 65 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(65, 128), nn.Parameter(torch.randn(64, 128) * 0.02)
        layer = [nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True) for _ in range(5)]
        self.layers, self.out = nn.ModuleList(layer), nn.Linear(128, 65)
        self.register_buffer("mask", torch.triu(torch.full((64, 64), float("-inf")), 1), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.embed(codes) + self.position
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        out: Tensor = self.out(h)
        return out


def workload(name: str, batches: int = 16) -> Workload:
    """Return the model of a name, with equal values in every process."""
    torch.manual_seed(0)
    if name == "LM 1M":
        codes = torch.randint(65, (batches * 16, 65))
        model: nn.Module = LanguageModel()
        return Workload(model, _batches(codes[:, :-1].contiguous(), codes[:, 1:].contiguous(), 16), _over_characters)
    if name == "CNN":
        model = nn.Sequential(
            *(*_block(3, 32), nn.MaxPool2d(2), *_block(32, 64), nn.MaxPool2d(2), *_block(64, 128), nn.Flatten()),
            *(nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
        inputs = torch.randn(batches * 64, 3, 16, 16)
    else:
        first, second = PERCEPTRONS[name]
        linear = nn.Linear(256, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 10)
        model, inputs = nn.Sequential(*linear), torch.randn(batches * 64, 256)
    return Workload(model, _batches(inputs, torch.randint(10, (len(inputs),)), 64), _over_samples)


def _block(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]


def _batches(inputs: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))


def _over_samples(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), targets)


def _over_characters(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
