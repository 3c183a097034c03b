"""Eight training loops as people write them. One run prints what its model reaches, as JSON.

python -m reproduce.default.loops cnn --seed 0                  plain PyTorch: rainband.join is not called
rainband run reproduce/default/loops.py -- cnn --seed 0         shared by workers
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics  # the text: what help("if") prints
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import rainband
from rainband.tasks.digits import NUM_TRAIN, Digits

Join = Callable[[Any, Any], Any]
Loop = Callable[[Join], float]


class Plain:
    """Stands in for the `run` of rainband.join, and does nothing."""

    is_first = True

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None: ...

    def loader(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader

    def part(self, batch: Any) -> Any:
        return batch

    def mean(self, value: float) -> float:
        return value

    def register(self, *objects: Any) -> None: ...

    def no_sync(self) -> Any:
        return nullcontext()


# ---- digits ----


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training images, and images and labels for testing."""
    images, labels = Digits()._samples
    return TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), images[NUM_TRAIN:], labels[NUM_TRAIN:]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return 100 * (model(images).argmax(1) == labels).double().mean().item()


def cnn(join: Join) -> float:
    """A small CNN with BatchNorm, momentum, a cosine per step; the test accuracy."""
    data, images, labels = digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    scheduler = CosineAnnealingLR(optimizer, 8 * len(loader))
    with join(model, optimizer) as run:
        run.register(scheduler)
        for _ in range(8):
            for x, y in run.loader(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
    return accuracy(model, images, labels)


def mlp(join: Join) -> float:
    """A perceptron, momentum with a high rate, a cosine per step; the test accuracy."""
    data, images, labels = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    scheduler = CosineAnnealingLR(optimizer, 12 * len(loader))
    with join(model, optimizer) as run:
        run.register(scheduler)
        for _ in range(12):
            for x, y in run.loader(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
    return accuracy(model, images, labels)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.other(self.second(functional.relu(self.norm(self.first(x))))))


def resnet(join: Join) -> float:
    """An image classifier in the style of imagenet/main.py: weight decay, a rate per epoch; the test accuracy."""
    data, images, labels = digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)
    best = 0.0
    with join(model, optimizer) as run:
        run.register(scheduler)
        loader = run.loader(DataLoader(data, batch_size=32, shuffle=True, drop_last=True))
        for _ in range(7):
            model.train()
            for x, y in loader:
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            best = max(best, accuracy(model, images, labels))
    return best


def frozen(join: Join) -> float:
    """A pretrained body that is unfrozen after two epochs, dropout, OneCycle, two groups; the test accuracy."""
    data, images, labels = digits()
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.Sequential(body, head)
    body.requires_grad_(False)
    optimizer = AdamW([{"params": body.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 3e-3}])
    loader = DataLoader(data, batch_size=32, shuffle=True)
    scheduler = OneCycleLR(optimizer, max_lr=[1e-3, 3e-3], total_steps=8 * len(loader))
    with join(model, optimizer) as run:
        run.register(scheduler)
        for epoch in range(8):
            body.requires_grad_(epoch >= 2)
            for x, y in run.loader(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
    return accuracy(model, images, labels)


def autoencoder(join: Join) -> float:
    """Two batches per step without an exchange in between, an average of the parameters; its test loss."""
    data, images, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12), nn.Linear(12, 64))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    optimizer = Adam(model.parameters(), lr=3e-3)
    with join(model, optimizer) as run:
        run.register(average)
        for _ in range(16):
            for number, (x, _) in enumerate(run.loader(DataLoader(data, batch_size=16, shuffle=True))):
                last = number % 2 == 1
                with nullcontext() if last else run.no_sync():
                    (functional.mse_loss(model(x), x.flatten(1)) / 2).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update_parameters(model)
            optimizer.zero_grad()
    with torch.no_grad():
        return functional.mse_loss(average(images), images.flatten(1)).item()


# ---- other data ----


class GraphNetwork(nn.Module):
    """Three rounds of messages along the edges, and the sum over the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.messages = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = functional.relu(self.first(nodes))
        for layer in self.messages:
            h = h + functional.relu(layer(torch.cat([h, edges @ h], 2)))
        out: Tensor = self.out(h.sum(1)).squeeze(1)
        return out


def graphs(number: int, generator: torch.Generator) -> TensorDataset:
    """Graphs of eight nodes, and how similar neighbors are."""
    nodes = torch.randn(number, 8, 4, generator=generator)
    edges = (torch.rand(number, 8, 8, generator=generator) < 0.3).float()
    edges = (edges + edges.mT).clamp(max=1)
    target = (torch.tanh(nodes @ nodes.mT) * edges).sum((1, 2)) / 4
    return TensorDataset(nodes, edges, target)


def graph(join: Join) -> float:
    """A graph network with Adam, clipping, a cosine per epoch; the test loss."""
    generator = torch.Generator().manual_seed(5)
    data, test = graphs(2048, generator), graphs(1024, generator)
    model = GraphNetwork()
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, 10)  # without it, a difference of 1e-7 may double the loss at the end
    with join(model, optimizer) as run:
        run.register(scheduler)
        for _ in range(10):
            for nodes, edges, target in run.loader(DataLoader(data, batch_size=32, shuffle=True)):
                optimizer.zero_grad()
                functional.mse_loss(model(nodes, edges), target).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
            scheduler.step()
    with torch.no_grad():
        return functional.mse_loss(model(*test.tensors[:2]), test.tensors[2]).item()


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(self.first(x)).unflatten(2, (6, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Writer(nn.Module):
    """A language model with tied weights."""

    def __init__(self, letters: int, width: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Attention(width), Attention(width), nn.LayerNorm(width))
        self.guess = nn.Linear(width, letters, bias=False)
        self.guess.weight = self.embed.weight

    def forward(self, codes: Tensor) -> Tensor:
        out: Tensor = self.guess(self.blocks(self.embed(codes) + self.position.weight))
        return out


def language_model(join: Join) -> float:
    """In the style of nanoGPT: drawn batches, AdamW, warm-up and cosine by hand, clipping; the validation loss."""
    text = "".join(topics[name] for name in sorted(topics))[:400_000]
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    train, validation = codes[:360_000], codes[360_000:]
    length, steps = 32, 600

    def get_batch(source: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - length - 1, (24,), generator=generator)
        rows = starts[:, None] + torch.arange(length + 1)
        return source[rows[:, :-1]], source[rows[:, 1:]]

    model = Writer(len(letters), 48, length)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    with join(model, optimizer) as run:
        for step in range(steps):
            rate = 3e-3 * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
            x, y = run.part(get_batch(train, run.generator))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        tests = [get_batch(validation, generator) for _ in range(40)]
        losses = [functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in tests]
        return torch.stack(losses).mean().item()


def table(join: Join) -> float:
    """Regression on a table, with a rate that is lowered when the mean loss rises; the test loss."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(3000, 10, generator=generator)
    targets = torch.sin(inputs[:, 0]) * inputs[:, 1] + 0.3 * inputs[:, 2] ** 2 + 0.1 * inputs[:, 3:].sum(1)
    data = TensorDataset(inputs[:2000], targets[:2000, None])
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = Adam(model.parameters(), lr=5e-3)
    warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    with join(model, optimizer) as run:
        run.register(warm_up, plateau)
        for epoch in range(12):
            losses = []
            for x, y in run.loader(DataLoader(data, batch_size=64, shuffle=True)):
                loss = functional.smooth_l1_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if epoch == 0:
                    warm_up.step()
            plateau.step(run.mean(sum(losses) / len(losses) if losses else 0.0))
    with torch.no_grad():
        return functional.mse_loss(model(inputs[2000:]), targets[2000:, None]).item()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (cnn, mlp, resnet, frozen, autoencoder, graph, language_model, table)
}


# ---- killed workers ----


def killed_after(steps: int, seed: int) -> Callable[[Optimizer, Any, Any], None]:
    """Return a hook that kills this process at a random instant within or after that many steps."""
    done, before = 0, time.perf_counter()

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal done, before
        now = time.perf_counter()
        done, took, before = done + 1, now - before, now
        if done == steps:
            delay = random.Random(seed).uniform(0, 2 * took)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", type=int, default=0, help="number of workers that are killed")
    parser.add_argument("--out", type=Path, default=None, help="folder for a file of each worker")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    join: Join = Plain
    worker = getattr(sys.modules["__main__"], "__rainband__", None)  # started by `rainband run`
    if worker is None:
        torch.set_num_threads(1)
    else:
        join = rainband.join
        victims = random.Random(asked.seed).sample(range(rainband.num_workers()), asked.kill)
        if rainband.rank() in victims:
            steps = random.Random(f"{asked.seed} {rainband.rank()}").randrange(20, 250)

            def join_and_die(model: Any, optimizer: Any) -> Any:
                optimizer.register_step_post_hook(killed_after(steps, asked.seed))
                return rainband.join(model, optimizer)

            join = join_and_die
    found = LOOPS[asked.loop](join)
    print(json.dumps({"loop": asked.loop, "found": found}))
    if asked.out is not None:
        rank = 0 if worker is None else rainband.rank()
        (asked.out / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
