"""The task `linear` with a gate before every batch, and with accidents at chosen samples: for tests of real runs.

A gate is a folder with pipes. A batch is computed when it has taken a byte from `tokens`, so a test decides how
many batches pass. The one that meets sample `hang_at` takes another from `hang`; with `slow_build` a worker takes one
from `build` before it builds the model. Beside the pipes every worker has a file with its process number for a name,
one byte long for each batch it has begun.
"""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from rainband.tasks.linear import Linear
from rainband.tasks.task import TensorData

NOWHERE = -1
PIPES = ("tokens", "hang", "build")


@dataclass(frozen=True)
class Gated:
    gate: str = ""  # the gate's folder; "": always open
    dimension: int = 64
    samples: int = 1024
    batch_size: int = 4
    epochs: int = 1
    curved: bool = False  # square the loss, so that the gradient depends on the parameters
    nan_at: int = NOWHERE  # samples whose batches come to grief
    crash_at: int = NOWHERE
    die_at: int = NOWHERE  # any process that computes it is killed, every time
    hang_at: int = NOWHERE
    says: str = ""  # printed at every batch
    broken: bool = False  # cannot be built
    unmeasurable: bool = False  # cannot be evaluated
    slow_build: bool = False
    file: str = ""  # in the current folder, with the number of samples; "": none

    @cached_property
    def linear(self) -> Linear:
        return Linear(self.dimension, self.samples, batch_size=self.batch_size, epochs=self.epochs)

    def model(self) -> nn.Module:
        if self.slow_build:
            os.read(self._pipe("build"), 1)
        if self.broken:
            raise ArithmeticError("this model cannot be built")
        model = nn.Linear(self.dimension, 1)  # the gradient of its bias is 1: it counts the batches
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def data(self) -> TensorData:
        data = TensorData(*self.linear.data().tensors, torch.arange(self.samples))
        return TensorData(*(t[: int(Path(self.file).read_text())] for t in data.tensors)) if self.file else data

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, numbers = batch
        samples = set(numbers.tolist())
        if self.gate:
            self._pass(samples)
        self._have_an_accident(samples)
        loss = self.linear.loss(model, (x,))
        if self.curved:
            loss = (loss - 1).square() / 4096
        return loss * float("nan") if self.nan_at in samples else loss

    def _pass(self, samples: set[int]) -> None:
        os.write(self._mine, b".")
        os.read(self._tokens, 1)
        if self.hang_at in samples:
            os.read(self._pipe("hang"), 1)

    def _have_an_accident(self, samples: set[int]) -> None:
        if self.says:
            print(self.says)
        if self.die_at in samples:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.crash_at in samples:
            raise ArithmeticError(f"sample {self.crash_at} is one too many")

    @cached_property
    def _mine(self) -> int:
        return os.open(Path(self.gate, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @cached_property
    def _tokens(self) -> int:
        return self._pipe("tokens")

    def _pipe(self, name: str) -> int:
        return os.open(Path(self.gate, name), os.O_RDWR)  # for writing, too: then it never ends

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.unmeasurable:
            raise ArithmeticError("this model cannot be measured")
        return {}


class Gate:
    """The test's end of a gate; it begins shut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.fds = {}
        for name in PIPES:
            os.mkfifo(folder / name)
            self.fds[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)

    def let(self, num_batches: int) -> None:
        """Let `num_batches` more batches pass."""
        os.write(self.fds["tokens"], b"." * num_batches)

    def is_dry(self) -> bool:
        """Return True if no batch may pass now."""
        return not select.select([self.fds["tokens"]], [], [], 0)[0]

    def open(self) -> None:
        """As many as any run here has, and those that are done again."""
        self.let(16_384)

    def end_hanging(self) -> None:
        os.write(self.fds["hang"], b"." * 64)

    def let_build(self, num_workers: int) -> None:
        os.write(self.fds["build"], b"." * num_workers)

    def begun(self) -> dict[int, int]:
        """Batches that each process has come to the gate with."""
        return {int(f.name): f.stat().st_size for f in self.folder.iterdir() if f.name.isdigit()}

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
