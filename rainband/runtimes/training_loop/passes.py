"""Passes over the data: they stand where a DataLoader stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Passes:
    """Stands where a DataLoader stood: each iteration is a pass over the data."""

    def __init__(
        self, begin: Callable[[], Iterator[Any]], dataset: Any, batch_size: int, total: int, num_workers: int = 1
    ) -> None:
        self.begin = begin
        self.dataset = dataset
        self.batch_size = batch_size
        self.total = total  # batches of a pass, over all workers
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[Any]:
        return self.begin()

    def __len__(self) -> int:
        """Return how many batches of a pass this worker has, if all are equally fast."""
        return -(-self.total // self.num_workers)
