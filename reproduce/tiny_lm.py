"""A language model in miniature: a small GRU that predicts the next letter of Python's own help texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
LENGTH, NUM_LETTERS, NUM_TEST = 32, 200_000, 500  # of a window; of the text; windows that only test


class Writer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, len(LETTERS))

    def forward(self, codes: Tensor) -> Tensor:
        guesses: Tensor = self.guess(self.memory(self.embed(codes))[0])
        return guesses


@dataclass(frozen=True)
class TinyLm:
    batch_size: int = 16
    epochs: int = 6
    width: int = 48

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor]:
        text = "".join(topics[name] for name in sorted(topics))[:NUM_LETTERS]
        codes = torch.tensor([LETTERS.index(letter) for letter in text if letter in LETTERS])
        starts = torch.arange(0, len(codes) - LENGTH - 1, LENGTH)
        starts = starts[torch.randperm(len(starts), generator=torch.Generator().manual_seed(0))]
        windows = starts[:, None] + torch.arange(LENGTH)
        return codes[windows], codes[windows + 1]

    def model(self) -> Writer:
        return Writer(self.width)

    def data(self) -> TensorData:
        codes, following = self._windows
        return TensorData(codes[NUM_TEST:], following[NUM_TEST:])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        codes, following = batch
        return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        codes, following = (part[:NUM_TEST] for part in self._windows)
        with torch.no_grad():
            guesses = model(codes).flatten(0, 1)
        right = (guesses.argmax(1) == following.flatten()).float().mean()
        return {
            "accuracy": right.item(),
            "loss": functional.cross_entropy(guesses, following.flatten()).item(),
        }
