"""The order of the samples in a pass over the data, and the passes of a loop by number."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler

from rainband.runtimes.training_loop.script_random import CommonRandom

END = object()


class PassId(NamedTuple):
    """The number of a dataset, in the order in which the loop reads them, and that of a pass over it."""

    dataset: int
    number: int

    @property
    def seed(self) -> int:
        """Return a number that no other pass has."""
        return self.dataset << 32 | self.number


class PassNumbers:
    """Numbers the passes over each dataset of a script."""

    def __init__(self) -> None:
        self.passes: list[int] = []  # begun, over each dataset
        self.known: dict[int, tuple[int, Any]] = {}  # ID -> number, and what shows that the dataset still exists

    def next(self, dataset: Any) -> PassId:
        """Return the number of the pass that begins over this dataset."""
        key = id(dataset)
        if key not in self.known:
            try:  # a script may make a dataset for each pass
                alive: Any = weakref.ref(dataset, lambda _: self.known.pop(key, None))
            except TypeError:  # a list
                alive = dataset
            self.known[key] = len(self.passes), alive
            self.passes.append(0)
        number = self.known[key][0]
        self.passes[number] += 1
        return PassId(number, self.passes[number] - 1)


class BatchOrder(Protocol):
    """The batches of passes, equal on all workers: lists of sample numbers, or what a stream has."""

    @property
    def generator(self) -> torch.Generator | None:
        """Return a generator that the loader has of its own."""

    @property
    def drop_last(self) -> bool: ...

    @property
    def pass_samples(self) -> int | None:
        """Return the number of samples before an incomplete last batch is left out; None: not known."""

    def __len__(self) -> int: ...

    def begin(self, one: PassId) -> Iterator[Any]:
        """Return the batches of a pass; draw what an iterator of a DataLoader draws when it is made."""


class ShuffledOrder:
    """Batches of a permutation that depends on the seed and the pass alone."""

    generator = None

    def __init__(self, num_samples: int, batch_size: int, seed: int, drop_last: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last

    @property
    def pass_samples(self) -> int | None:
        return self.num_samples

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def begin(self, one: PassId) -> Iterator[list[int]]:
        return self.batches(one.number, one.dataset)

    def batches(self, number: int, dataset: int = 0) -> Iterator[list[int]]:
        """Yield the batches of a pass. Datasets of one length have different orders, so that pairs of them vary."""
        seed = [self.seed, number, dataset] if dataset else [self.seed, number]
        order = np.random.Generator(np.random.PCG64(seed)).permutation(self.num_samples)
        for k in range(len(self)):
            yield order[k * self.batch_size : (k + 1) * self.batch_size].tolist()


PERSISTENT: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that keep their iterator, and have made it


class OneOrder:
    """The batches of one pass, for the DataLoader of a script in a single process."""

    def __init__(self, order: ShuffledOrder, one: PassId) -> None:
        self.order = order
        self.one = one
        self.passes = one.seed

    def __iter__(self) -> Iterator[list[int]]:
        return self.order.begin(self.one)


class SamplerOrder:
    """Batches of a batch sampler, drawn with random numbers that are equal on all workers."""

    def __init__(self, sampler: Any, random: CommonRandom, loader: Any = None) -> None:
        self.sampler = sampler
        self.random = random
        self.generator: torch.Generator | None = getattr(loader, "generator", None)
        self.draws_ahead = bool(getattr(loader, "num_workers", 0))
        self.loader = loader
        self.has_drawn = False  # what a DataLoader draws when its iterator is made
        self.drop_last = bool(getattr(sampler, "drop_last", False))

    @property
    def pass_samples(self) -> int | None:
        inner: Any = self.sampler.sampler if type(self.sampler) is BatchSampler else None
        return len(inner) if hasattr(inner, "__len__") else None

    def __len__(self) -> int:
        return len(self.sampler)

    def begin(self, one: PassId) -> Iterator[list[int]]:
        with self.random.active():
            if not self.has_drawn and self.loader not in PERSISTENT:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self.has_drawn = False
            if getattr(self.loader, "persistent_workers", False):
                PERSISTENT.add(self.loader)
            batches = iter(self.sampler)
            first = list(islice(batches, 1)) if self.draws_ahead else None
        return self._rest(batches, first)

    def _rest(self, batches: Iterator[Any], first: list[Any] | None) -> Iterator[list[int]]:
        if first is None:
            with self.random.active():
                first = list(islice(batches, 1))
        # torch's samplers have drawn all their random numbers by now
        known = type(self.sampler) is BatchSampler and type(self.sampler.sampler).__module__.startswith("torch.")
        yield from map(list, chain(first, batches if known else drawn(batches, self.random)))


class StreamOrder:
    """Batches of a loader without sample numbers; one that shuffles must give the same on all workers."""

    drop_last = False
    pass_samples = None

    def __init__(self, loader: Any, random: CommonRandom) -> None:
        self.loader = loader
        self.random = random
        self.generator: torch.Generator | None = getattr(loader, "generator", None)

    def __len__(self) -> int:
        return len(self.loader)

    def begin(self, one: PassId) -> Iterator[Any]:
        with self.random.active():
            batches = iter(self.loader)
        return drawn(batches, self.random)


def drawn(batches: Iterator[Any], random: CommonRandom) -> Iterator[Any]:
    """Yield batches that are drawn with the common random numbers."""
    while True:
        with random.active():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch
