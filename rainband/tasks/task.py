"""The interface of a task (a model, its data and its loss), and classes to build one.

Importing this file imports neither torch nor numpy: the command line must start fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import xxhash
    from torch import Tensor, nn

CHUNK = 1000  # samples evaluated at once
SAMPLE_DRAWS = 3  # of each sample in a fingerprint; a random transform may do nothing once


class Data(Protocol):
    """The training samples, numbered from 0.

    With `prefetch = True`, for example for data read from files, full-batch strategies call `batch` ahead, on another
    thread. Then `batch` must not draw random numbers from torch's global generator, which other threads use.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> Any:
        """Return these samples, ready for the task's `loss`."""


class Task(Protocol):
    """A task is a class, usually a frozen dataclass, whose fields are its settings.

    A task may also have `groups(model) -> list[dict]`: parameter groups with their own lr or weight_decay, as
    torch.optim takes them. With `optimizer(parameters)`, and perhaps `scheduler(optimizer)`, that return objects of
    torch.optim, strategies whose workers make the steps (sync, single) use these in place of their own. With
    `drop_last = True`, an epoch's last batch is left out if it is short.

    Workers that share each batch (sync), and microbatches of stages, compute parts of it. If the loss is a mean over
    fewer things than samples, as with ignore_index, `weight(batch) -> float` returns what it divides by: the number of
    labels that are not ignored, or the sum of their class weights. A part of weight 0 contributes nothing, and a batch
    of weight 0 is skipped.
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def epochs(self) -> int: ...

    def model(self) -> nn.Module:
        """Build the model, drawing from torch's global generator, which the run seeds: all workers start equal."""

    def data(self) -> Data:
        """Return the training samples, the same and in the same order on every worker."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics of the model on held-out data, such as {"accuracy": 0.97, "loss": 0.1}."""


def parameter_groups(task: Task, model: nn.Module) -> list[dict[str, Any]]:
    """Return the task's own parameter groups, or one group of all parameters."""
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = getattr(task, "groups", None)
    return groups(model) if groups else [{"params": list(model.parameters())}]


def own_optimizer(task: Task) -> Callable[[Iterable[Any]], Any] | None:
    """Return what makes the task's own torch optimizer, if it has one."""
    optimizer: Callable[[Iterable[Any]], Any] | None = getattr(task, "optimizer", None)
    return optimizer


def own_scheduler(task: Task) -> Callable[[Any], Any] | None:
    """Return what makes the scheduler of the task's own optimizer, if it has one."""
    scheduler: Callable[[Any], Any] | None = getattr(task, "scheduler", None)
    return scheduler


def drops_last(task: Task) -> bool:
    """Return whether the task leaves out an epoch's last batch if it is short."""
    return bool(getattr(task, "drop_last", False))


class TensorData:
    """Tensors with a common first dimension; a batch is the tuple of their rows."""

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"TensorData got tensors of lengths {lengths}: it requires one or more of equal length.")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        import numpy as np
        import torch

        index = torch.from_numpy(np.array(indices, dtype=np.int64))  # a copy: torch warns of read-only arrays
        return tuple(tensor.index_select(0, index) for tensor in self.tensors)


class MapDataset(Protocol):
    """A map-style torch Dataset: it has a length and gives sample i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def is_of_ray(dataset: object) -> bool:
    """Return True for a `ray.data.Dataset`."""
    return f"{type(dataset).__module__}.".startswith("ray.data.")


class DatasetData:
    """A map-style torch Dataset, with batches collated as by a DataLoader."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any] | None = None) -> None:
        if is_of_ray(dataset):
            raise ValueError(
                "a worker is not connected to Ray, so it cannot read a Ray dataset: make the task in your script, and "
                "call rainband.fit(task), which reads the dataset first."
            )
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length, so its samples cannot be divided among workers: "
                "use a map-style dataset, with __len__ and __getitem__."
            )
        self.dataset = dataset
        self.collate = collate

    @property
    def prefetch(self) -> bool:
        return bool(getattr(self.dataset, "prefetch", False))

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Any:
        from torch.utils.data import default_collate

        samples = self._samples([int(i) for i in indices])
        return (self.collate or default_collate)(samples)

    def _samples(self, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)  # as a DataLoader does
        return list(many(indices)) if many else [self.dataset[i] for i in indices]


@dataclasses.dataclass(frozen=True)
class ModuleTask:
    """A task made of a module, a dataset and a loss function; batches are (inputs, targets).

        def mine() -> ModuleTask:
            return ModuleTask(Net, train_set, functional.cross_entropy, epochs=3)

    If this is in mylab.py, `rainband train mylab:mine downpour` trains it.
    """

    module: Callable[[], Any]  # () -> nn.Module; Any, so that settings can be read without importing torch
    dataset: MapDataset
    loss_fn: Callable[[Any, Any], Any]  # (outputs, targets) -> mean loss, as in torch.nn.functional
    evaluate_fn: Callable[[Any], dict[str, float]] | None = None  # (model) -> metrics on held-out data
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 32
    epochs: int = 10
    # (parameters) -> torch optimizer, in place of the strategy's: for sync and single, where workers make the steps
    optimizer: Callable[[Iterable[Any]], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None  # (optimizer) -> scheduler, stepped after each batch
    drop_last: bool = False  # leave out an epoch's last batch if it is short
    # (batch) -> what its mean loss divides by, if that is not the number of samples: see Task
    weight: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if hasattr(self.module, "state_dict") and not isinstance(self.module, type):
            raise ValueError(
                f"ModuleTask needs a function or class that makes the model, and this {type(self.module).__name__} is "
                "a model: pass its class, or lambda: Net(...)."
            )
        if self.scheduler is not None and self.optimizer is None:
            raise ValueError("a scheduler needs the task's own optimizer: add optimizer=lambda params: ...")

    def model(self) -> nn.Module:
        module: nn.Module = self.module()
        return module

    def data(self) -> DatasetData:
        return DatasetData(self.dataset, self.collate)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        mean: Tensor = self.loss_fn(model(inputs), targets)
        return mean

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.evaluate_fn is None:
            return {}
        with evaluating(model):
            return self.evaluate_fn(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and no gradients; afterwards restore the mode of every submodule."""
    import torch

    from rainband.model.unchanged import same_modes

    with same_modes(model), torch.no_grad():
        model.eval()
        yield


def accuracy_and_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Evaluate a classifier in chunks, to limit memory."""
    import torch
    from torch.nn import functional

    device = next(model.parameters()).device
    right, loss = 0, 0.0
    with evaluating(model):
        for start in range(0, len(labels), CHUNK):
            y = labels[start : start + CHUNK].to(device)
            outputs = model(inputs[start : start + CHUNK].to(device))
            right += int(torch.sum(outputs.argmax(1) == y))
            loss += float(functional.cross_entropy(outputs, y, reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}


def fingerprint(data: Data) -> str:
    """Return a short hash of the number of samples and of a few of them, to check that workers have the same data.

    Random transforms give the same samples here if they draw from torch's, numpy's or Python's global generator. Of
    other random samples only the number is compared.
    """
    import xxhash

    hashes = _hashes_of_samples(data)
    if len(hashes) == 1:
        return hashes.pop()
    return xxhash.xxh3_64_hexdigest(f"{len(data)} random samples".encode())


def is_repeatable(data: Data) -> bool:
    """Return whether samples are the same each time, if the global random generators start from the same state."""
    return len(_hashes_of_samples(data)) == 1


def _hashes_of_samples(data: Data) -> set[str]:
    return {_hash_of_samples(data) for _ in range(SAMPLE_DRAWS)}


def _hash_of_samples(data: Data) -> str:
    import xxhash

    from rainband.model.seeds import global_generators_from

    length = len(data)
    chosen = [*range(3), *range(length // 2 - 1, length // 2 + 2), *range(length - 3, length)]
    hasher = xxhash.xxh3_64()
    hasher.update(f"{length} samples".encode())
    with global_generators_from(0):
        for index in sorted({i for i in chosen if 0 <= i < length}):
            _absorb(hasher, data.batch([index]))
    return hasher.hexdigest()


def _absorb(hasher: xxhash.xxh3_64, value: Any) -> None:
    """Hash a pytree of tensors, arrays and plain values, with their types and shapes."""
    import numpy as np
    import torch

    match value:
        case torch.Tensor():
            hasher.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            hasher.update(flat.view(torch.uint8).numpy().tobytes())  # as bytes, because numpy has no bfloat16
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            hasher.update(f"array {value.dtype.str} {value.shape}".encode())
            hasher.update(value.tobytes())
        case None | bool() | int() | float() | complex() | str() | bytes():
            text = repr(value)
            hasher.update(f"{type(value).__name__} {len(text)} {text}".encode())
        case Mapping():
            hasher.update(f"mapping {len(value)}".encode())
            for key in sorted(value, key=repr):
                _absorb(hasher, key)
                _absorb(hasher, value[key])
        case tuple() | list():
            hasher.update(f"sequence {len(value)}".encode())
            for item in value:
                _absorb(hasher, item)
        case _:
            raise ValueError(
                f"a batch contains a value of type {type(value).__name__}, which workers cannot compare: "
                "return tensors, arrays, numbers and strings, in tuples, lists or dicts."
            )
