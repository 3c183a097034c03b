"""Train a model whose parameters and optimizer state are split so that no process holds them all.

    python examples/split_model.py

starts `rainband train split_model:Writer sync batch_per_worker=true optimizer=adam --stages 4 --workers 4 --servers 4`
and prints the memory of its processes. Each worker has a quarter of the layers, each server of the parameters and of
Adam's moments. Your own model only needs separate layers: here, blocks in an nn.Sequential.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

import rainband
from rainband.model_parallel.graph.split_marks import whole

CONTEXT, LETTERS = 32, 128


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.first(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        y: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return y


@dataclass(frozen=True)
class Writer:
    """A task that predicts the next character of the source of a Python module."""

    width: int = 384
    blocks: int = 12
    samples: int = 320
    batch_size: int = 16
    epochs: int = 1
    deferred: bool = True  # built without values: each worker initializes its own layers by reset_parameters

    def model(self) -> nn.Module:
        blocks = [whole(Block(self.width)) for _ in range(self.blocks)]  # a block is not split
        return nn.Sequential(nn.Embedding(LETTERS, self.width), *blocks, nn.Linear(self.width, LETTERS))

    def data(self) -> rainband.TensorData:
        text = torch.tensor([ord(c) % LETTERS for c in Path(argparse.__file__).read_text(encoding="utf-8")])
        windows = text[: self.samples * (CONTEXT + 1)].view(self.samples, CONTEXT + 1)
        return rainband.TensorData(windows[:, :-1], windows[:, 1:])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def measure_memory(program: psutil.Popen) -> dict[str, list[float]]:
    """Sample the MB of every worker and server until the program ends; shared pages count in parts (PSS)."""
    samples: dict[str, list[float]] = {}
    while program.poll() is None:
        for process in program.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process may have ended
                title = " ".join(" ".join(process.cmdline()).split())
                if title.startswith(("rainband worker", "rainband server")):
                    samples.setdefault(title, []).append(process.memory_full_info().pss / 1e6)
        with contextlib.suppress(psutil.TimeoutExpired):
            program.wait(timeout=0.2)  # returns earlier at the end
    return samples


if __name__ == "__main__":
    size = ["task.width=32", "task.blocks=4", "task.samples=32"] if "--tiny" in sys.argv[1:] else []
    words = ["split_model:Writer", "sync", "batch_per_worker=true", "optimizer=adam", "lr=0.0003", *size]
    start = [sys.executable, "-c", "from rainband.cli.main import main; main()", "train"]
    many = "2" if size else "4"
    counts = ["--stages", many, "--workers", many, "--servers", many, "--runs", str(Path.cwd() / "runs")]
    program = psutil.Popen([*start, *words, *counts], cwd=Path(__file__).parent)
    for name, values in sorted(measure_memory(program).items()):
        settled = sorted(values[len(values) // 2 :])
        print(f"{name}: {settled[len(settled) // 2]:.0f} MB, at most {max(values):.0f} MB")
    sys.exit(program.returncode)
