"""Handwritten digits: the 1,797 images of scikit-learn, 8 x 8 pixels each, and a small convolutional model.

The pixels are read from scikit-learn's file, because importing scikit-learn takes a second.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData, accuracy_and_loss

NUM_TRAIN = 1437  # of 1,797: four fifths
SPLIT_SEED = 0  # not a setting: accuracies are comparable only on the same split
MEAN, SPREAD = 4.88, 6.02  # of the pixels, which go from 0 to 16


@dataclass(frozen=True)
class Digits:
    batch_size: int = 32
    epochs: int = 15

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        """Return images and labels in the order of the split, the training samples first."""
        table = np.loadtxt(_csv_file(), delimiter=",", dtype=np.float32)
        table = table[np.random.default_rng(SPLIT_SEED).permutation(len(table))]
        images = torch.from_numpy((table[:, :64] - MEAN) / SPREAD).reshape(-1, 1, 8, 8)
        return images, torch.from_numpy(table[:, 64].astype(np.int64))

    def model(self) -> nn.Sequential:
        """Build a convolutional model with 38,282 parameters."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def data(self) -> TensorData:
        images, labels = self._samples
        return TensorData(images[:NUM_TRAIN], labels[:NUM_TRAIN])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images, labels = self._samples
        return accuracy_and_loss(model, images[NUM_TRAIN:], labels[NUM_TRAIN:])


def _csv_file() -> Path:
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return file
    raise ValueError("digits requires scikit-learn, which contains the images: type pip install 'rainband[data]'.")
