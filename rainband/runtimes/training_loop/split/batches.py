"""The batches of a custom training loop whose workers share each batch: every worker loads its part."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import islice, tee
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rainband.rounds.cut import MIN_SAMPLES
from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.batches import check_sizes, refuse_loader
from rainband.runtimes.training_loop.of_shared_batches import arguments_of
from rainband.runtimes.training_loop.script_random import CommonRandom
from rainband.runtimes.training_loop.split.orders import BatchOrder, SamplerOrder, ShuffledOrder, StreamOrder
from rainband.runtimes.training_loop.split.parts import Indices, PartLoader, batch_length, digest_of, part_of
from rainband.runtimes.training_loop.split.passes import Pass, PassData


class Rounds(Protocol):
    """The rounds of a loop, as its loaders see them: `OpenPasses`."""

    random: CommonRandom

    def begin(self, dataset: Any, length: int, data: PassData | None, trains: bool) -> Pass:
        """Return the pass that begins; it makes this many rounds, 0 if not known."""

    def order(self, one: Pass, order: BatchOrder) -> Iterator[Any]:
        """Return the batches of a pass, in the order that the other workers have."""

    def draw(self, one: Pass) -> int | None:
        """Return the number of the next batch of a pass, None if it is over; a round may begin."""

    def cut(self, one: Pass, batch: Indices | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        """Return this worker's part of the batch, or of several batches of these lengths.

        Workers with another digest have another batch.
        """

    def drew(self, one: Pass, batch: Any) -> Any:
        """Return a batch, which the loop is about to get."""

    def end(self, one: Pass) -> None:
        """Note that a pass is over, or that the loop has left it."""


class LoaderStandIn:
    """Stands where a loader stood: each iteration is a pass over the data, of which every worker gets its parts."""

    trains = False  # True: never for validation, also if the model is in evaluation mode
    batches_ahead = 1  # that the loop draws before their backward passes: they share a round

    def __init__(
        self, rounds: Rounds, dataset: Any, order: BatchOrder, batch_size: int | None, loader: Any = None
    ) -> None:
        self.rounds = rounds
        self.dataset = dataset
        self.order = order
        self.batch_size = batch_size
        self.loader = loader  # of the user
        self.reading: Pass | None = None  # the last pass

    def __len__(self) -> int:
        """Return the number of batches of a pass, as in one process."""
        return len(self.order)

    def __getattr__(self, name: str) -> Any:
        """Return what the user's loader has, such as its sampler."""
        if name.startswith("__") or (loader := vars(self).get("loader")) is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(loader, name)

    def __iter__(self) -> Iterator[Any]:
        length = -(-_length(self.order) // self.batches_ahead)
        self.reading = one = self.rounds.begin(self.dataset, length, self._data(), self.trains)
        batches = self._read(one, self.rounds.order(one, self.order))
        one.iterator = weakref.ref(batches)
        return batches

    def _data(self) -> PassData | None:
        """Return what one pass consists of, if that can be known."""
        return None

    def _read(self, one: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        raise NotImplementedError


class SplitBatches(LoaderStandIn):
    """Stands where a DataLoader stood whose samples have numbers: each worker loads its parts alone."""

    def __init__(
        self,
        rounds: Rounds,
        dataset: Any,
        order: ShuffledOrder | SamplerOrder,
        batch_size: int | None,
        arguments: dict[str, Any],
        loader: Any = None,
    ) -> None:
        super().__init__(rounds, dataset, order, batch_size, loader)
        self.arguments = arguments  # of a DataLoader

    def continue_iteration(self) -> None:
        """Take the place of an iterator of the DataLoader that was made, and has drawn a random number."""
        if isinstance(self.order, SamplerOrder):
            self.order.has_drawn = True

    def _data(self) -> PassData | None:
        if self.batch_size is None or (num_samples := self.order.pass_samples) is None:
            return None
        collate = self.arguments.get("collate_fn")
        return PassData(self.dataset, num_samples, self.batch_size, self.order.drop_last, collate)

    def _read(self, one: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        parts = PartLoader(self.dataset, self.arguments, one.name.seed)
        try:
            yield from (
                self._read_ahead(one, batches, parts)
                if self.batches_ahead > 1
                else _read(one, batches, parts, self.rounds)
            )
        finally:
            parts.end_pass()
            self.rounds.end(one)

    def _read_ahead(self, one: Pass, batches: Iterator[Any], parts: PartLoader) -> Iterator[Any]:
        """Yield this worker's samples of each batch, of several batches in a round."""
        drawn = enumerate(iter(lambda: list(islice(batches, self.batches_ahead)), []))
        while (index := self.rounds.draw(one)) is not None:
            several = next((several for k, several in drawn if k == index), [])
            lengths = [len(batch) for batch in several]
            part = self.rounds.cut(one, [k for batch in several for k in batch] if several else None, lengths)
            if part.is_over:
                break
            at = 0
            for size in part.batch_sizes or (len(part.samples),):
                samples = part.samples[at : at + size] or part.samples[:MIN_SAMPLES]  # those do not count
                at += size
                yield parts.now(samples)


def _read(one: Pass, batches: Iterator[Any], parts: PartLoader, rounds: Rounds) -> Iterator[Any]:
    """Yield this worker's part of each batch."""
    whole = coming = enumerate(batches)
    if parts.ahead:
        whole, coming = tee(whole)  # type: ignore[assignment]
    while (index := rounds.draw(one)) is not None:
        # a worker that joins, or returns, finds that some batches were used without it
        batch = next((batch for k, batch in whole if k == index), None)
        part = rounds.cut(one, batch)
        if part.is_over:
            break
        since = index
        yield rounds.drew(one, parts.load(part, (batch for k, batch in coming if k >= since)))


class StreamBatches(LoaderStandIn):
    """Stands where a loader without sample numbers stood: every worker reads all of it and keeps its parts."""

    def __init__(self, rounds: Rounds, loader: Any) -> None:
        dataset = getattr(loader, "dataset", loader)
        super().__init__(
            rounds, dataset, StreamOrder(loader, rounds.random), getattr(loader, "batch_size", None), loader
        )

    def _read(self, one: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        position = 0
        try:
            while (index := self.rounds.draw(one)) is not None:
                given = list(islice(batches, index - position, index - position + 1))
                position = index + 1
                batch = range(batch_length(given[0])) if given else None
                part = self.rounds.cut(one, batch, digest=digest_of(given))
                if part.is_over or not given:
                    break
                yield given[0] if one.kind == "whole" else self.rounds.drew(one, part_of(given[0], part.samples))
        finally:
            self.rounds.end(one)


def _length(order: BatchOrder) -> int:
    """Return the number of batches of a pass, 0 if it is not known."""
    try:
        return len(order)
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
    refuse_loader(dataset)
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length: make a DataLoader of it, and iterate over "
            "run.loader(loader), where every worker reads the whole stream and keeps its part of each batch."
        )
    check_sizes(dataset, batch_size, drop_last)
    order: SamplerOrder | ShuffledOrder = ShuffledOrder(len(dataset), batch_size, seed, drop_last)
    if not shuffle or arguments.get("sampler") is not None or arguments.get("batch_sampler") is not None:
        drawn = {**arguments, "batch_size": batch_size, "drop_last": drop_last}
        if arguments.get("batch_sampler") is not None:
            drawn = arguments
        loader: DataLoader[Any] = DataLoader(dataset, **drawn)
        order = SamplerOrder(loader.batch_sampler, rounds.random, loader)
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
    order = SamplerOrder(loader.batch_sampler, rounds.random, loader)
    batches = SplitBatches(rounds, loader.dataset, order, loader.batch_size, arguments, loader)
    batches.batches_ahead = batches_ahead
    return batches
