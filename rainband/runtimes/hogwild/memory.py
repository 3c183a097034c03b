"""Memory shared by all workers of a machine: the parameters, and small tables for the batch accounting.

Nothing is locked. All workers write the parameters. Every word of the tables has one writer at a time, so no write is
lost:

    a worker's own    updates it has written, the batch it is writing now, how many updates each had missed
    a portion's       which of its batches are done or skipped: written by the worker that has the lease
    the server's      the lowest lease of each portion that still counts, and a factor on the learning rate
"""

from __future__ import annotations

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
OWN_WORDS = LINE_BYTES // WORD_BYTES  # of a worker; a cache line, so that neighbours do not disturb each other
UPDATES, WRITING, REFUSED = range(3)  # places in it
STALEST = 1024  # who missed more than that is counted with this


class Places(NamedTuple):
    """The offsets of all tables, in bytes."""

    own: int
    staleness: int
    fences: int
    done: int
    skipped: int
    vectors: tuple[tuple[str, int, int], ...]  # dtype, elements, place
    num_bytes: int


def places_of(blocks: Sequence[BlockSpec], plan: DataPlan, num_workers: int) -> Places:
    """The same for everyone who knows the plan."""
    sizes = (LINE_BYTES, num_workers * LINE_BYTES, num_workers * (STALEST + 1) * WORD_BYTES)
    starts = [0]
    for size in (*sizes, *3 * (plan.num_portions * WORD_BYTES,)):
        starts.append(starts[-1] + -(-size // LINE_BYTES) * LINE_BYTES)
    _, own, staleness, fences, done, skipped, at = starts
    vectors = []
    for number in sorted({block.vector for block in blocks}):
        mine = [block for block in blocks if block.vector == number]
        dtype, numel = mine[0].dtype, max(block.stop for block in mine)
        vectors.append((dtype, numel, at))
        at += -(-numel * ITEM_BYTES[dtype] // LINE_BYTES) * LINE_BYTES
    return Places(own, staleness, fences, done, skipped, tuple(vectors), at)


class SharedParameters:
    """The memory, as everyone sees it."""

    def __init__(self, buffer: Any, blocks: Sequence[BlockSpec], plan: DataPlan, num_workers: int) -> None:
        """`buffer` can be written to, and has as many bytes as `places_of` says."""
        self.plan = plan
        self.num_workers = num_workers
        places = places_of(blocks, plan, num_workers)
        self.vectors: list[Tensor] = [
            torch.frombuffer(buffer, dtype=getattr(torch, dtype), count=numel, offset=at)
            for dtype, numel, at in places.vectors
        ]
        self._all = memoryview(buffer)
        self._factor = self._all[:WORD_BYTES].cast("d")
        self._own = self._words(places.own, num_workers * OWN_WORDS)
        self._staleness = self._words(places.staleness, num_workers * (STALEST + 1))
        self._fences = self._words(places.fences, plan.num_portions)
        self._done = self._words(places.done, plan.num_portions)
        self._skipped = self._words(places.skipped, plan.num_portions)

    def _words(self, start: int, number: int) -> memoryview:
        return self._all[start : start + number * WORD_BYTES].cast("Q")

    # ---- a worker's ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Updates that all workers together have written: what a gradient is computed at."""
        return sum(self._own[UPDATES::OWN_WORDS].tolist())

    @property
    def lr_factor(self) -> float:
        return 1.0 + self._factor[0]  # memory begins with zeros

    def is_fenced(self, batch: Batch) -> bool:
        """Return True if the lease of a batch was revoked: then the batch is another worker's."""
        return self._fences[batch.portion] > batch.lease

    def begin(self, worker: int, batch: Batch) -> None:
        """Note that a worker starts to apply a batch, which is visible even if the worker is lost."""
        self._own[worker * OWN_WORDS + WRITING] = 1 + batch.portion * 64 + batch.k

    def wrote(self, worker: int, batch: Batch, missed: int) -> None:
        """It has written all of it. If its lease was taken back meanwhile, another does the batch once more."""
        self._own[worker * OWN_WORDS + UPDATES] += 1
        self._staleness[worker * (STALEST + 1) + min(missed, STALEST)] += 1
        if not self.is_fenced(batch):
            self._done[batch.portion] |= 1 << batch.k
        self._own[worker * OWN_WORDS + WRITING] = 0

    def skip(self, batch: Batch) -> None:
        self._skipped[batch.portion] |= 1 << batch.k

    def refuse(self, worker: int) -> None:
        """A worker has come too late with a batch, and has not written it."""
        self._own[worker * OWN_WORDS + REFUSED] += 1

    def is_complete(self, portion: int) -> bool:
        return self.accepted_set(portion) == self.plan.full(portion)

    # ---- the keeper's ----------------------------------------------------------------------------------------------

    def fence(self, portion: int, lease: int) -> None:
        """From now on, smaller lease numbers of this portion do not count."""
        self._fences[portion] = max(self._fences[portion], lease)

    def lower(self, factor: float) -> None:
        """Multiply the learning rate of all workers by `factor` from now on."""
        self._factor[0] = self.lr_factor * factor - 1.0

    def accepted_set(self, portion: int) -> int:
        """The batches of a portion that are done or skipped."""
        return int(self._done[portion] | self._skipped[portion])

    def skipped_in(self, portion: int) -> int:
        """Only those that nobody has done."""
        return int(self._skipped[portion] & ~self._done[portion])

    def is_writing(self, worker: int) -> bool:
        """Return True if a worker is in the middle of an update, or was when it was lost."""
        word = self._own[worker * OWN_WORDS + WRITING]
        portion, k = divmod(word - 1, 64)
        return bool(word) and not self._done[portion] >> k & 1

    @cached_property
    def full_marks(self) -> NDArray[np.uint64]:
        return np.array([self.plan.full(portion) for portion in range(self.plan.num_portions)], dtype=np.uint64)

    def all_marks(self) -> NDArray[np.uint64]:
        done = np.frombuffer(self._done, dtype=np.uint64)
        return done | np.frombuffer(self._skipped, dtype=np.uint64)

    def refused(self) -> int:
        return sum(self._own[REFUSED::OWN_WORDS].tolist())

    def staleness(self) -> dict[int, Counter[int]]:
        """Worker -> updates missed -> how often."""
        found: dict[int, Counter[int]] = {}
        for worker in range(self.num_workers):
            start = worker * (STALEST + 1)
            words = np.frombuffer(self._staleness[start : start + STALEST + 1], dtype=np.uint64)
            counts = Counter({int(missed): int(words[missed]) for missed in np.flatnonzero(words)})
            if counts:
                found[worker] = counts
        return found
