r"""Click prediction: sparse logistic regression on synthetic data, where each sample has a few of many features.

    p(click | sample) = 1 / (1 + exp(-b - sum of w_f over its features f))

The frequency of feature r is proportional to 1 / r^skew, as for words and clicks; a hidden w with noise determines the
labels. The gradient of a batch is sparse (nn.EmbeddingBag): it has rows for the features of its samples only, so two
workers seldom write to the same row. This is the use case of hogwild.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData, evaluating

HELD_OUT = 4096
NOISE = 0.5  # of the scores that determine the labels


class Weights(nn.Module):
    """One weight per feature, and a bias."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.of = nn.EmbeddingBag(features, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.of.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, samples: Tensor) -> Tensor:
        scores: Tensor = self.of(samples).squeeze(1) + self.bias
        return scores


@dataclass(frozen=True)
class Clicks:
    features: int = 100_000
    active: int = 20  # features of one sample
    skew: float = 0.8  # 0: all features are equally frequent
    samples: int = 32_768
    seed: int = 0  # of the samples
    batch_size: int = 32
    epochs: int = 3

    def __post_init__(self) -> None:
        for name in ("features", "active", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: {name} must be at least 1.")
        if self.skew < 0:
            raise ValueError(f"skew={self.skew}: skew must be at least 0, where all features are equally frequent.")

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        random, number = np.random.default_rng(self.seed), self.samples + HELD_OUT
        share = np.arange(1, self.features + 1, dtype=np.float64) ** -self.skew
        drawn = random.random((number, self.active))
        features = np.searchsorted(np.cumsum(share / share.sum()), drawn).clip(0, self.features - 1)
        hidden = random.standard_normal(self.features)
        scores = hidden[features].sum(1) + NOISE * np.sqrt(self.active) * random.standard_normal(number)
        return torch.from_numpy(features.astype(np.int64)), torch.from_numpy((scores > 0).astype(np.float32))

    def model(self) -> Weights:
        return Weights(self.features)

    def data(self) -> TensorData:
        features, labels = self._samples
        return TensorData(features[: self.samples], labels[: self.samples])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return functional.binary_cross_entropy_with_logits(model(features), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        features, labels = (part[self.samples :] for part in self._samples)
        with evaluating(model):
            scores = model(features)
            right = ((scores > 0) == (labels > 0.5)).float().mean()
            return {
                "accuracy": float(right),
                "loss": float(functional.binary_cross_entropy_with_logits(scores, labels)),
            }
