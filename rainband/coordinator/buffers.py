"""Buffers, such as BatchNorm's running statistics: the values that all workers begin with, and those that are saved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rainband.protocol.messages import Peer


class FirstBuffers:
    """The buffers of the first worker that joins, with which all workers begin."""

    def __init__(self) -> None:
        self.first: dict[int, bytes] = {}  # by the rank in a replica
        self.corrected: set[Peer] = set()  # workers that have joined with other values

    def compare(self, worker: Peer, rank: int, body: bytes | memoryview | None) -> str:
        """Compare a worker's buffers with those of the first one; return why they cannot be replaced."""
        if body is None:
            return ""
        first = self.first.setdefault(rank, bytes(body))
        if len(first) != len(body):
            mine, ours = len(body) // 8, len(first) // 8
            return f"{worker} does not fit this run: its buffers have {mine} numbers, not {ours}."
        if first != body:
            self.corrected.add(worker)
        return ""

    def replacement(self, worker: Peer, rank: int) -> bytes | None:
        """Return the values that a worker begins with; None: it has them."""
        return self.first[rank] if worker in self.corrected else None


class BufferMean:
    """The mean of the workers' buffers, number by number, weighted by the samples of each worker.

    Servers do not hold buffers, which are no function of gradients: each worker's follow its own batches. Workers send
    them as one float64 vector. A number that is equal on all workers stays exactly that, also if it is infinite. Where
    they differ, values that are not finite are left out: one NaN in the data of one worker must not spoil the model.
    """

    def __init__(self) -> None:
        self.first: NDArray[np.float64] | None = None  # of the first worker

    def add(self, body: bytes | memoryview | None, samples: int) -> int:
        """Add a worker's buffers; return how many of its numbers are NaN."""
        if body is None or not len(body) or not samples:
            return 0
        values = np.frombuffer(bytes(body), dtype=np.float64)
        if self.first is None:
            self.first = values
            self.equal = np.ones(values.shape, dtype=np.bool_)
            self.total, self.samples = np.zeros_like(values), np.zeros_like(values)
        if self.first.shape != values.shape:
            return 0  # not of this model: a worker with other buffers is refused at join
        finite = np.isfinite(values)
        self.equal &= values.view(np.int64) == self.first.view(np.int64)
        self.total += np.where(finite, values, 0.0) * samples
        self.samples += finite * samples
        return int(np.isnan(values).sum())

    def mean(self) -> bytes | None:
        """Return the mean; None: no worker has sent buffers that follow any samples."""
        if self.first is None:
            return None
        mean = np.divide(self.total, self.samples, out=self.first.copy(), where=self.samples > 0)
        return np.where(self.equal, self.first, mean).tobytes()
