"""The batches of a custom training loop whose workers share each batch: every worker loads its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice, tee
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from rainband.protocol.messages import Dataset as Description
from rainband.rounds.cut import MIN_SAMPLES
from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.batches import fingerprint_of
from rainband.runtimes.training_loop.batches import loader as parts_loader
from rainband.runtimes.training_loop.of_shared_batches import arguments_of
from rainband.runtimes.training_loop.script_random import CommonRandom

Indices = Sequence[int]


class Rounds(Protocol):
    """The rounds of a loop, as its loaders see them."""

    random: CommonRandom

    def begin_pass(self, length: int, data: PassData | None = None) -> int:
        """Return the number of the pass that begins; it has this many batches, 0 if not known."""

    def begin_round(self, number: int) -> int | None:
        """Begin the next round of a pass, and return the number of its batch; None if the pass is over."""

    def cut(self, batch: Indices | None, lengths: Sequence[int] = ()) -> Part:
        """Return this worker's part of the batch, or of several batches of these lengths."""


class PassData(NamedTuple):
    """The data of one pass: what workers must have in common, and what its length follows from."""

    dataset: Any
    num_samples: int
    batch_size: int
    drop_last: bool
    collate: Any

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.dataset), self.num_samples, self.batch_size, self.drop_last

    def described(self, epochs: int, num_workers: int) -> Description:
        """Return the description for the coordinator; one worker alone has nothing to compare."""
        fingerprint = fingerprint_of(self.dataset, self.collate) if num_workers > 1 else ""
        return Description(fingerprint, self.num_samples, self.batch_size, epochs, self.drop_last)


# ---- the order of samples ----


class ShuffledOrder:
    """Batches of a permutation that depends on the seed and the pass alone."""

    def __init__(self, num_samples: int, batch_size: int, seed: int, drop_last: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last

    @property
    def pass_samples(self) -> int | None:
        """Return the number of samples before an incomplete last batch is left out; None: not known."""
        return self.num_samples

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def batches(self, number: int) -> Iterator[list[int]]:
        generator = np.random.Generator(np.random.PCG64([self.seed, number]))
        order = generator.permutation(self.num_samples)
        for k in range(len(self)):
            yield order[k * self.batch_size : (k + 1) * self.batch_size].tolist()


class SamplerOrder:
    """Batches of a batch sampler, drawn with random numbers that are equal on all workers."""

    def __init__(self, sampler: Any, random: CommonRandom, generator: torch.Generator | None = None) -> None:
        self.sampler = sampler
        self.random = random
        self.generator = generator
        self.has_drawn = False  # what a DataLoader draws at its start
        self.drop_last = bool(getattr(sampler, "drop_last", False))

    @property
    def pass_samples(self) -> int | None:
        inner: Any = self.sampler.sampler if type(self.sampler) is BatchSampler else None
        return len(inner) if hasattr(inner, "__len__") else None

    def __len__(self) -> int:
        return len(self.sampler)

    def batches(self, number: int) -> Iterator[list[int]]:
        with self.random.active():
            if not self.has_drawn:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as a DataLoader at its start
            self.has_drawn = False
            batches = iter(self.sampler)
            first = list(islice(batches, 1))
        yield from map(list, first)
        # torch's samplers have drawn all their random numbers by now
        known = type(self.sampler) is BatchSampler and type(self.sampler.sampler).__module__.startswith("torch.")
        while True:
            with nullcontext() if known else self.random.active():
                batch = next(batches, None)
            if batch is None:
                return
            yield list(batch)


# ---- loading the parts ----

# Arguments of a DataLoader that it refuses, or that mean nothing, without processes of its own.
OF_PROCESSES = frozenset(("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"))


class PartLoader:
    """Loads this worker's parts, some rounds ahead if the DataLoader has processes of its own.

    Parts of later rounds are predicted from the last one. A part that differs when its round begins is loaded again.
    """

    passes = 0

    def __init__(self, dataset: Any, arguments: dict[str, Any]) -> None:
        self.dataset = dataset
        self.arguments = arguments
        self.ahead = bool(arguments.get("num_workers"))
        in_this_process = {name: given for name, given in arguments.items() if name not in OF_PROCESSES}
        self.collate = parts_loader(dataset, self, in_this_process).collate_fn
        self.coming: Iterator[list[int]] = iter(())  # whole batches of the rounds to come
        self.last: Part | None = None
        self.due: deque[list[int]] = deque()  # parts that are being loaded
        self.loaded: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield, for the DataLoader, the samples of each part."""
        assert self.last is not None
        for batch in self.coming:
            predicted = batch[self.last.first : self.last.last] or batch[:1]
            self.due.append(predicted)
            yield predicted

    def load(self, part: Part, coming: Iterator[list[int]]) -> Any:
        """Return the samples of a part; `coming` has the whole batches of this round and the next ones."""
        samples = list(part.samples)
        if self.ahead:
            self.last = part
            if self.loaded is None:
                self.coming = coming
                self.loaded = iter(parts_loader(self.dataset, self, self.arguments))
            loaded = next(self.loaded, None)
            if self.due and self.due.popleft() == samples:
                return loaded
        return self.now(samples)

    def now(self, samples: Indices) -> Any:
        """Load these samples in this process."""
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(list(samples)))
        return self.collate([self.dataset[k] for k in samples])

    def end_pass(self) -> None:
        """Forget what was loaded ahead, and end the processes that loaded it."""
        self.due.clear()
        self.loaded, self.coming = None, iter(())


class SplitBatches:
    """Stands where a DataLoader stood: each iteration is a pass over the data, of which every worker gets its parts."""

    def __init__(
        self,
        rounds: Rounds,
        dataset: Any,
        order: ShuffledOrder | SamplerOrder,
        batch_size: int | None,
        arguments: Any,
        batches_ahead: int = 1,
    ) -> None:
        self.rounds = rounds
        self.batches_ahead = batches_ahead  # that the loop draws before their backward passes: they share a round
        self.dataset = dataset
        self.order = order
        self.batch_size = batch_size
        self.parts = PartLoader(dataset, arguments)

    def continue_iteration(self) -> None:
        """Take the place of an iterator of the DataLoader that was made, and has drawn a random number."""
        if isinstance(self.order, SamplerOrder):
            self.order.has_drawn = True

    def __len__(self) -> int:
        """Return the number of batches of a pass, as in one process."""
        return len(self.order)

    def _data(self) -> PassData | None:
        """Return what one pass consists of, if that can be known."""
        if self.batch_size is None or (num_samples := self.order.pass_samples) is None:
            return None
        return PassData(
            self.dataset, num_samples, self.batch_size, self.order.drop_last, self.parts.arguments.get("collate_fn")
        )

    def __iter__(self) -> Iterator[Any]:
        if self.batches_ahead > 1:
            yield from self._pieces()
            return
        number = self.rounds.begin_pass(len(self), self._data())
        self.parts.passes = number
        whole = coming = enumerate(self.order.batches(number))
        if self.parts.ahead:
            whole, coming = tee(whole)  # type: ignore[assignment]
        index = self.rounds.begin_round(number)
        if index is None:  # over before this worker joined: draw the random numbers of its order
            deque(islice(whole, len(self)), maxlen=0)
        try:
            while index is not None:
                # a worker that joins, or returns, finds that some batches were used without it
                batch = next((batch for k, batch in whole if k == index), None)
                part = self.rounds.cut(batch)
                if part.is_over:
                    break
                since = index
                yield self.parts.load(part, (batch for k, batch in coming if k >= since))
                index = self.rounds.begin_round(number)
        finally:
            self.parts.end_pass()

    def _pieces(self) -> Iterator[Any]:
        """Yield this worker's piece of each batch, of several batches in a round."""
        ahead, rounds = self.batches_ahead, -(-len(self) // self.batches_ahead)
        number = self.rounds.begin_pass(rounds, self._data())
        batches = self.order.batches(number)
        drawn = enumerate(iter(lambda: list(islice(batches, ahead)), []))
        index = self.rounds.begin_round(number)
        if index is None:
            deque(islice(drawn, rounds), maxlen=0)
        while index is not None:
            several = next((several for k, several in drawn if k == index), [])
            lengths = [len(batch) for batch in several]
            part = self.rounds.cut([k for batch in several for k in batch] if several else None, lengths)
            if part.is_over:
                break
            at = 0
            for size in part.pieces or (len(part.samples),):
                samples = part.samples[at : at + size] or part.samples[:MIN_SAMPLES]  # those do not count
                at += size
                yield self.parts.now(samples)
            index = self.rounds.begin_round(number)


class StreamBatches:
    """Stands where a loader without sample numbers stood: every worker reads all of it and keeps its parts."""

    def __init__(self, rounds: Rounds, loader: Any) -> None:
        self.rounds = rounds
        self.loader = loader
        self.dataset = getattr(loader, "dataset", loader)
        self.batch_size = getattr(loader, "batch_size", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        number = self.rounds.begin_pass(_length(self.loader))
        with self.rounds.random.active():
            batches = iter(self.loader)
        position = 0
        while (index := self.rounds.begin_round(number)) is not None:
            with self.rounds.random.active():  # a stream that shuffles must give the same samples on all workers
                given = list(islice(batches, index - position, index - position + 1))
            position = index + 1
            part = self.rounds.cut(range(batch_length(given[0])) if given else None)
            if part.is_over or not given:
                return
            yield part_of(given[0], part.samples)


def _length(loader: Any) -> int:
    """Return the number of batches of a loader, 0 if it is not known."""
    try:
        return len(loader)
    except TypeError:  # a stream, also inside a DataLoader
        return 0


def batches_of_dataset(
    rounds: Rounds,
    dataset: Any,
    batch_size: int,
    seed: int,
    *,
    shuffle: bool,
    drop_last: bool,
    arguments: dict[str, Any],
) -> SplitBatches:
    """Return what stands in the place of a DataLoader of this dataset; raise ValueError if it has no batches."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length: make a DataLoader of it, and iterate over "
            "run.loader(loader), where every worker reads the whole stream and keeps its part of each batch."
        )
    if not len(dataset):
        raise ValueError("the dataset is empty: it must have at least one sample.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be an integer, 1 or more.")
    if drop_last and len(dataset) < batch_size:
        raise ValueError(f"drop_last=True leaves no batch of {batch_size}, as the dataset has {len(dataset)} samples.")
    order: SamplerOrder | ShuffledOrder = ShuffledOrder(len(dataset), batch_size, seed, drop_last)
    if not shuffle or arguments.get("sampler") is not None or arguments.get("batch_sampler") is not None:
        drawn = {**arguments, "batch_size": batch_size, "drop_last": drop_last}
        if arguments.get("batch_sampler") is not None:
            drawn = arguments
        loader: DataLoader[Any] = DataLoader(dataset, **drawn)
        order = SamplerOrder(loader.batch_sampler, rounds.random, loader.generator)
    return SplitBatches(rounds, dataset, order, batch_size, arguments)


def batches_of(rounds: Rounds, loader: Any, batches_ahead: int = 1) -> SplitBatches | StreamBatches:
    """Return what stands in the place of a user's loader."""
    stream = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
    if batches_ahead > 1 and (stream or loader.batch_sampler is None):
        raise ValueError(
            f"{type(loader).__name__} has no sample numbers, so only one batch can be drawn before its backward pass: "
            "use a dataset with __len__ and __getitem__, or no gradient accumulation."
        )
    if stream:
        return StreamBatches(rounds, loader)
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError("run.loader divides the batches itself: omit the DistributedSampler of the DataLoader.")
    if loader.batch_sampler is None:
        return StreamBatches(rounds, loader)  # batch_size=None: the dataset makes the batches
    arguments = arguments_of(loader)
    order = SamplerOrder(loader.batch_sampler, rounds.random, loader.generator)
    return SplitBatches(rounds, loader.dataset, order, loader.batch_size, arguments, batches_ahead)


# ---- parts of tensors ----


def batch_length(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    lengths: list[int] = []
    _changed(batch, lambda tensor: lengths.append(len(tensor)))
    if not lengths:
        raise ValueError(f"a batch of type {type(batch).__name__} has no tensor, so it has no parts: use run.batches.")
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the tensors of a batch have {sorted(set(lengths))} samples: all must have the same length in dimension 0."
        )
    return lengths[0]


def part_of(batch: Any, samples: Indices) -> Any:
    """Return these samples of a batch."""
    first, last = samples[0], samples[-1] + 1
    rows: Any = slice(first, last) if list(samples) == list(range(first, last)) else list(samples)
    return _changed(batch, lambda tensor: tensor[rows])


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with all its tensors changed: those in tuples, lists and dicts, except numbers."""
    if isinstance(value, Tensor | np.ndarray):
        return change(value) if value.ndim else value
    if isinstance(value, Mapping):
        return type(value)({key: _changed(item, change) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change) for item in value))
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, str) for item in value):
            return change(_Strings(value))
        return type(value)(_changed(item, change) for item in value)
    return value


class _Strings(list[str]):
    """Texts of the samples of a batch, which are indexed as a tensor is."""

    def __getitem__(self, rows: Any) -> Any:
        return (
            super().__getitem__(rows)
            if isinstance(rows, slice)
            else [super(_Strings, self).__getitem__(k) for k in rows]
        )
