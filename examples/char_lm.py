"""Learn to write like Python's own help texts, one character at a time: a small GRU with tied weights and clipping.

    python examples/char_lm.py                                    one process
    rainband run --workers 2 examples/char_lm.py      two workers, which share each batch

The lines added for Rainband are marked.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics  # the text: what help("if") prints

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import rainband  # <-

LETTERS = "\n" + "".join(map(chr, range(32, 127)))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the same piece one letter further on."""

    def __init__(self, text: str, length: int) -> None:
        self.codes = torch.tensor([LETTERS.index(letter) for letter in text if letter in LETTERS])
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return self.codes[start : start + self.length], self.codes[start + 1 : start + self.length + 1]


class Writer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, len(LETTERS))
        self.guess.weight = self.embed.weight  # tied: one parameter, two uses

    def forward(self, codes: Tensor) -> Tensor:
        guesses: Tensor = self.guess(self.memory(self.embed(codes))[0])
        return guesses


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write like Python's help.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few seconds of work, to see that it runs")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = "".join(topics[name] for name in sorted(topics))[: 20_000 if args.tiny else 400_000]
    windows = Windows(text, length=64)
    model = Writer(width=32 if args.tiny else 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    with rainband.join(model, optimizer) as run:  # <-
        for _ in run.epochs(1 if args.tiny else args.epochs):  # <- instead of range(...)
            for codes, following in run.batches(windows, batch_size=32):  # <- instead of a DataLoader
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    if run.rank == 0:  # every worker runs this, with the same model
        print(repr(write(model, "The ", 60)))


@torch.no_grad()
def write(model: nn.Module, text: str, length: int) -> str:
    """Continue the text with the most likely character, repeatedly."""
    for _ in range(length):
        codes = torch.tensor([[LETTERS.index(letter) for letter in text]])
        text += LETTERS[int(model(codes)[0, -1].argmax())]
    return text


main()
