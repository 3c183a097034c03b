"""Small models of every shape that is cut in tests, and one thread to run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch on busy cores wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Skips(nn.Module):
    """In-place work, a skip that is used twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.relu = nn.BatchNorm1d(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.relu(self.a(x))
        k = self.norm(self.b(h))
        h = h + k
        h += 1
        h.mul_(2)
        return self.c(h), k


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.join = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).tanh()
        y: Tensor = self.join(self.left(h).tanh() * self.right(h).sigmoid())
        return y


class Tied(nn.Module):
    """An embedding that is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.out(self.hidden(self.embed(words)).tanh())
        return y


class Several(nn.Module):
    """Two inputs, one with a default, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> dict[str, Any]:
        left, right = self.a(x), self.b(y)
        return {"sum": left + right, "both": (left, right * scale)}


class Recurrent(nn.Module):
    """The outputs of an LSTM are a pytree of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.second, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        y, state = self.first(self.embed(words))
        z, (hidden, _) = self.second(y, state)
        out: Tensor = self.out(z) + hidden[0].unsqueeze(1).sum()
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.out(self.encoder(self.embed(words)))
        return y


class OnShapes(nn.Module):
    """Control flow on a shape, which only torch.export can follow; dropout-free, with in-place work and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(4, 4), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            x = self.norm(self.a(x))
        x = functional.relu(x, inplace=True)
        y: Tensor = self.b(x.view(x.shape[0] * 2, 4)).view(x.shape[0], 8)
        return y.add_(1)


class OnData(nn.Module):
    """Control flow on numbers: no tool can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) if x.sum() > 0 else self.b(x)
        return y


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def words(*shape: int) -> Tensor:
    return torch.randint(0, 11, shape)


def examples() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """name -> (model, inputs), in double precision and from fixed random numbers."""
    torch.manual_seed(0)
    return {
        "chain": (chain().double(), (floats(4, 8),)),
        "skips": (Skips().double(), (floats(4, 8),)),
        "branches": (Branches().double(), (floats(4, 8),)),
        "tied": (Tied().double(), (words(4, 5),)),
        "several": (Several().double(), (floats(4, 8), floats(4, 8))),
        "recurrent": (Recurrent().double(), (words(3, 5),)),
        "transformer": (Transformer().double(), (words(3, 5),)),
        "on_shapes": (OnShapes().double(), (floats(4, 8),)),
    }
