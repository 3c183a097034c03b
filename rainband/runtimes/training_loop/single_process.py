"""A script with rainband.join that was started by `python`: it trains in this process, with the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rainband.runtimes.training_loop.batches import described, loader
from rainband.runtimes.training_loop.passes import Passes
from rainband.runtimes.training_loop.split.orders import OneOrder, PassNumbers, ShuffledOrder


class SingleProcessLoop:
    """Has the methods of a TrainingLoop, and leaves model and optimizer unchanged."""

    rank = 0
    num_workers = 1

    def __init__(self) -> None:
        self.num_epochs = 0
        self.passes = PassNumbers()
        self.batches_done = 0
        self.batches_per_pass = 0  # of the current one; 0: the loop has its own data loader
        self.stopped: str | None = None  # the reason given to run.stop(...)
        self.generator = torch.Generator().manual_seed(torch.initial_seed() % (1 << 63))

    def __enter__(self) -> SingleProcessLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Go on after the block if run.stop(...) has ended it; there are no other workers to wait for."""
        return kind is KeyboardInterrupt and self.stopped is not None

    def epochs(self, number: int) -> Iterator[int]:
        """Iterate over this many passes over the data."""
        if number < 1:
            raise ValueError(f"run.epochs({number}) must be 1 or more.")
        self.num_epochs = number
        return iter(range(number))

    def batches(self, dataset: Any, batch_size: int = 1, **loader_arguments: Any) -> Passes:
        """Return what stands in the place of a DataLoader: shuffled, or in the order of a sampler."""
        given = loader_arguments
        if given.get("shuffle") is False or any(given.get(name) is not None for name in ("sampler", "batch_sampler")):
            if given.get("batch_sampler") is None:
                given = {**given, "batch_size": batch_size}
            ordered: DataLoader[Any] = DataLoader(dataset, **given)
            return Passes(lambda: self._one_pass(ordered, len(ordered)), dataset, batch_size, len(ordered))
        data = described(dataset, batch_size, self.num_epochs, loader_arguments)
        order = ShuffledOrder(data.num_samples, batch_size, 0, data.drop_last)

        def begin() -> Iterator[Any]:
            one = OneOrder(order, self.passes.next(dataset))
            return self._one_pass(loader(dataset, one, loader_arguments), len(order))

        return Passes(begin, dataset, batch_size, len(order))

    def _one_pass(self, batches: Any, number: int) -> Iterator[Any]:
        counts = torch.is_grad_enabled()  # for training
        if counts:
            self.batches_per_pass = number
        self._check_stop()
        for samples in batches:
            yield samples
            self.batches_done += counts
            self._check_stop()

    def stop(self, reason: str = "stopped by the loop") -> None:
        """Leave the `with` block after the current batch; at once in a loop over its own data loader."""
        self.stopped = self.stopped or str(reason)
        if not self.batches_per_pass:
            self._check_stop()

    def _check_stop(self) -> None:
        if self.stopped is not None:
            raise KeyboardInterrupt(self.stopped)

    @property
    def progress(self) -> float:
        """Return the fraction of the run that is done, from 0 to 1."""
        if not self.num_epochs:
            raise ValueError("run.progress needs the number of epochs: write `for epoch in run.epochs(10):`.")
        return self.batches_done / (self.num_epochs * self.batches_per_pass) if self.batches_per_pass else 0.0

    # ---- what a loop whose workers share each batch asks ----

    is_first = True

    def loader(self, loader: Any, batches_ahead: int = 1) -> Any:
        """Return the loader: there are no workers to share its batches with."""
        return loader

    def part(self, batch: Any) -> Any:
        """Return the whole batch."""
        return batch

    def eval_batches(self, dataset: Any, batch_size: int = 1, **arguments: Any) -> DataLoader[Any]:
        """Return a DataLoader of the whole dataset, in order."""
        return DataLoader(dataset, batch_size=batch_size, **arguments)

    def mean(self, value: float | Tensor, weight: float | None = None) -> float:
        """Return the number itself."""
        return float(value.detach() if isinstance(value, Tensor) else value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are not exchanged."""
        yield

    def weight(self, weight: float) -> None:
        """Do nothing: there is nothing to average."""

    def register(self, *objects: object) -> None:
        """Do nothing: no other worker needs their state."""

    def skip(self, reason: str = "") -> None:
        """Do nothing: batches are not counted."""

    def log(self, *, loss: object = None, **metrics: object) -> None:
        """Do nothing: losses and metrics are not shown."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing: no other worker waits for this one."""
        yield
