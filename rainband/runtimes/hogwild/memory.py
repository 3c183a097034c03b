"""The memory that all workers of a machine share: the parameters, and small tables of what has been done.

The parameters are one model that every worker writes (hogwild), or one model for each worker (pairs.py). Nothing in
this file is locked. Every word of the tables has one writer at a time, so no
write is lost:

    by a worker               the number of its updates, the batch that it is writing, how stale its gradients were
    by a portion's lessee     the portion's batches that are done or skipped
    by the hogwild server     the lowest valid lease of each portion, a factor on the learning rate, whether to pause
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import ITEM_BYTES, BlockSpec
from rainband.strategy import Batch

LINE_BYTES = 64
WORD_BYTES = 8
OWN_WORDS = LINE_BYTES // WORD_BYTES  # of a worker; a cache line, so that workers do not slow each other down
UPDATES, WRITING, REFUSED, MEETINGS = range(4)  # offsets in it
LOOK_AGAIN_S = 0.0002
STALEST = 1024  # greater staleness is counted with this


class MemoryOffsets(NamedTuple):
    """Offsets of the tables and the parameters, in bytes."""

    own: int
    staleness: int
    fences: int
    done: int
    skipped: int
    models: tuple[tuple[tuple[str, int, int], ...], ...]  # of each model, its vectors: dtype, elements, offset
    num_bytes: int


def offsets_of(blocks: Sequence[BlockSpec], plan: DataPlan, num_workers: int, num_models: int = 1) -> MemoryOffsets:
    """Return the offsets, which depend on the plan only."""
    sizes = (LINE_BYTES, num_workers * LINE_BYTES, num_workers * (STALEST + 1) * WORD_BYTES)
    starts = [0]
    for size in (*sizes, *3 * (plan.num_portions * WORD_BYTES,)):
        starts.append(starts[-1] + -(-size // LINE_BYTES) * LINE_BYTES)
    _, own, staleness, fences, done, skipped, at = starts
    models = []
    for _ in range(num_models):
        vectors = []
        for number in sorted({block.vector for block in blocks}):
            mine = [block for block in blocks if block.vector == number]
            dtype, numel = mine[0].dtype, max(block.stop for block in mine)
            vectors.append((dtype, numel, at))
            at += -(-numel * ITEM_BYTES[dtype] // LINE_BYTES) * LINE_BYTES
        models.append(tuple(vectors))
    return MemoryOffsets(own, staleness, fences, done, skipped, tuple(models), at)


# size: each table is small, and has a few methods for workers and a few for the server
class SharedParameters:
    """The shared memory, for workers and the hogwild server."""

    def __init__(
        self, buffer: Any, blocks: Sequence[BlockSpec], plan: DataPlan, num_workers: int, num_models: int = 1
    ) -> None:
        """`buffer` is writable, and has `offsets_of(...).num_bytes` bytes."""
        self.plan = plan
        self.num_workers = num_workers
        offsets = offsets_of(blocks, plan, num_workers, num_models)
        self.models: list[list[Tensor]] = [
            [
                torch.frombuffer(buffer, dtype=getattr(torch, dtype), count=numel, offset=at)
                for dtype, numel, at in vectors
            ]
            for vectors in offsets.models
        ]
        self.vectors = self.models[0]
        self._all = memoryview(buffer)
        self._factor = self._all[:WORD_BYTES].cast("d")
        self._paused = self._all[WORD_BYTES : 2 * WORD_BYTES].cast("Q")
        self._own = self._words(offsets.own, num_workers * OWN_WORDS)
        self._staleness = self._words(offsets.staleness, num_workers * (STALEST + 1))
        self._fences = self._words(offsets.fences, plan.num_portions)
        self._done = self._words(offsets.done, plan.num_portions)
        self._skipped = self._words(offsets.skipped, plan.num_portions)

    def _words(self, start: int, number: int) -> memoryview:
        return self._all[start : start + number * WORD_BYTES].cast("Q")

    # ---- for workers -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the number of updates that all workers together have written."""
        return sum(self._own[UPDATES::OWN_WORDS].tolist())

    @property
    def lr_factor(self) -> float:
        return 1.0 + self._factor[0]  # new memory is zero

    def is_fenced(self, batch: Batch) -> bool:
        """Return True if the batch's lease was revoked."""
        return self._fences[batch.portion] > batch.lease

    def begin(self, worker: int, batch: Batch) -> None:
        """Note that a worker begins to write the update of this batch, in case it is lost meanwhile.

        While updates are paused, for a checkpoint, it waits before that.
        """
        self._own[worker * OWN_WORDS + WRITING] = 1 + batch.portion * 64 + batch.k
        while self.paused:
            self._own[worker * OWN_WORDS + WRITING] = 0
            time.sleep(LOOK_AGAIN_S)
            self._own[worker * OWN_WORDS + WRITING] = 1 + batch.portion * 64 + batch.k

    def wrote(self, worker: int, batch: Batch, missed: int) -> None:
        """Note that the update is written. If the lease was revoked meanwhile, another worker repeats the batch."""
        self._own[worker * OWN_WORDS + UPDATES] += 1
        self._staleness[worker * (STALEST + 1) + min(missed, STALEST)] += 1
        if not self.is_fenced(batch):
            self._done[batch.portion] |= 1 << batch.k
        self._own[worker * OWN_WORDS + WRITING] = 0

    def skip(self, batch: Batch) -> None:
        self._skipped[batch.portion] |= 1 << batch.k

    def end(self, worker: int) -> None:
        """Note that a worker writes nothing, because the step of its batch is skipped."""
        self._own[worker * OWN_WORDS + WRITING] = 0

    def refuse(self, worker: int) -> None:
        """Note that a worker did not write a batch, because its lease was revoked."""
        self._own[worker * OWN_WORDS + REFUSED] += 1

    def is_complete(self, portion: int) -> bool:
        return self.accepted_set(portion) == self.plan.full(portion)

    def met(self, worker: int) -> None:
        """Note that another worker has averaged its model with that of this worker, whose lock it holds."""
        self._own[worker * OWN_WORDS + MEETINGS] += 1

    def meetings(self, worker: int) -> int:
        return self._own[worker * OWN_WORDS + MEETINGS]

    def mean(self) -> list[Tensor]:
        """Return the mean of all models."""
        if len(self.models) == 1:
            return self.vectors
        return [torch.stack(same).mean(0) for same in zip(*self.models, strict=True)]

    # ---- for the hogwild server ------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Return whether workers wait before their next update."""
        return bool(self._paused[0])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused[0] = paused

    def word(self, worker: int) -> int:
        """Return the word in which a worker notes what it is writing."""
        return self._own[worker * OWN_WORDS + WRITING]

    def writing(self) -> list[int]:
        """Return the workers that are writing an update, or were when they were lost."""
        return [worker for worker in range(self.num_workers) if self.word(worker)]

    def restore(self, portion: int, accepted: int, skipped: int) -> None:
        """Note the batches of a portion that were done or skipped before the run continued."""
        self._done[portion], self._skipped[portion] = accepted & ~skipped, skipped

    def fence(self, portion: int, lease: int) -> None:
        """Revoke all smaller lease numbers of this portion."""
        self._fences[portion] = max(self._fences[portion], lease)

    def lower(self, factor: float) -> None:
        """Multiply the learning rate by this factor from now on."""
        self._factor[0] = self.lr_factor * factor - 1.0

    def accepted_set(self, portion: int) -> int:
        """Return the batches of a portion that are done or skipped, as a bit mask."""
        return int(self._done[portion] | self._skipped[portion])

    def skipped_in(self, portion: int) -> int:
        """Return the batches that were skipped and not done, as a bit mask."""
        return int(self._skipped[portion] & ~self._done[portion])

    def is_writing(self, worker: int) -> bool:
        """Return True if the worker is writing an update, or was when it was lost."""
        word = self._own[worker * OWN_WORDS + WRITING]
        portion, k = divmod(word - 1, 64)
        return bool(word) and not self._done[portion] >> k & 1

    @cached_property
    def all_batches(self) -> NDArray[np.uint64]:
        return np.array([self.plan.full(portion) for portion in range(self.plan.num_portions)], dtype=np.uint64)

    def accepted_sets(self) -> NDArray[np.uint64]:
        done = np.frombuffer(self._done, dtype=np.uint64)
        return done | np.frombuffer(self._skipped, dtype=np.uint64)

    def refused(self) -> int:
        return sum(self._own[REFUSED::OWN_WORDS].tolist())

    def staleness(self) -> dict[int, Counter[int]]:
        """Return, by worker, how many gradients missed how many updates."""
        found: dict[int, Counter[int]] = {}
        for worker in range(self.num_workers):
            start = worker * (STALEST + 1)
            words = np.frombuffer(self._staleness[start : start + STALEST + 1], dtype=np.uint64)
            counts = Counter({int(missed): int(words[missed]) for missed in np.flatnonzero(words)})
            if counts:
                found[worker] = counts
        return found
