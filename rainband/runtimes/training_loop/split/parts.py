"""Parts of batches: loading a worker's part, and cutting it out of tensors."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.batches import loader as parts_loader

Indices = Sequence[int]
ROWS = (Tensor, np.ndarray)
MOST_NUMBERS = 64  # of a batch that are compared

# Arguments of a DataLoader that it refuses, or that mean nothing, without processes of its own.
OF_PROCESSES = frozenset(("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"))


class PartLoader:
    """Loads this worker's parts, some rounds ahead if the DataLoader has processes of its own.

    Parts of later rounds are predicted from the last one. A part that differs when its round begins is loaded again.
    """

    def __init__(self, dataset: Any, arguments: dict[str, Any], passes: int = 0) -> None:
        self.dataset = dataset
        self.passes = passes  # a number that no other pass has, to seed processes with
        # The order of the samples is drawn from this generator: processes that load them must not draw from it, too.
        self.arguments = {name: given for name, given in arguments.items() if name != "generator"}
        self.ahead = bool(arguments.get("num_workers"))
        in_this_process = {name: given for name, given in self.arguments.items() if name not in OF_PROCESSES}
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


def memory_of(batch: Any) -> set[int]:
    """Return the addresses of the tensors of a batch."""
    addresses: set[int] = set()
    _changed(
        batch, lambda tensor: addresses.add(tensor.untyped_storage().data_ptr() if hasattr(tensor, "data_ptr") else 0)
    )
    return addresses - {0}


def digest_of(batch: Any) -> int:
    """Return a number that differs if the whole numbers of a batch do, such as labels or tokens; 0 if it has none."""
    found: list[int] = []

    def add(tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex() and not found:
            numbers = tensor.detach().cpu().numpy().reshape(-1)
            found.append(zlib.crc32(numbers[:: max(1, len(numbers) // MOST_NUMBERS)].tobytes()))
        return tensor

    _changed(batch, add)
    return found[0] if found else 0


def part_of(batch: Any, samples: Indices) -> Any:
    """Return these samples of a batch."""
    first, last = samples[0], samples[-1] + 1
    follow = len(samples) == last - first and (isinstance(samples, range) or list(samples) == list(range(first, last)))
    rows: Any = slice(first, last) if follow else list(samples)
    return _changed(batch, lambda tensor: tensor[rows])


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with all its tensors changed: those in tuples, lists and dicts, except numbers."""
    if isinstance(value, ROWS):
        return change(value) if value.ndim else value
    if type(value) is tuple:
        return tuple([_changed(item, change) for item in value])
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
