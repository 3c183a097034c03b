"""The mean of the workers' buffers, such as BatchNorm's running statistics.

Buffers are no function of gradients, so servers do not hold them: each worker's follow its own batches. The saved
model gets their mean, weighted by the samples each worker has seen; counters are rounded. They travel as float64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BufferMean:
    """Adds up flat float64 vectors, one per worker."""

    def __init__(self) -> None:
        self.total: NDArray[np.float64] | None = None
        self.samples = 0

    def add(self, body: bytes | memoryview | None, samples: int) -> None:
        if body is None or not len(body) or not samples:
            return
        values = np.frombuffer(body, dtype=np.float64) * samples
        if self.total is not None and self.total.shape != values.shape:
            return  # not of this model: a worker with other buffers is refused at join
        self.total = values if self.total is None else self.total + values
        self.samples += samples

    def mean(self) -> bytes | None:
        return None if self.total is None else (self.total / self.samples).tobytes()
