"""Methods of loops whose workers share each batch, in a loop whose workers have batches of their own.

The same script may be started with either: a method has the same effect, or its error says what to type.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from rainband.plugins import typed_name
from rainband.strategy import Strategy

TAKEN_OVER = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader that another one for the same dataset takes over."""
    return {name: getattr(loader, name) for name in TAKEN_OVER if getattr(loader, name, None) is not None}


class OfSharedBatches:
    """A part of a TrainingLoop: what only workers that share each batch can do, or do in another way."""

    strategy: Strategy
    rank: int

    def batches(self, dataset: Any, batch_size: int = 1, **loader_arguments: Any) -> Any:
        raise NotImplementedError

    @property
    def is_first(self) -> bool:
        """Return True on one worker: for printing and saving."""
        return self.rank == 0

    def loader(self, loader: Any, batches_ahead: int = 1) -> Any:
        """Return what stands in the place of a shuffling DataLoader: each iteration is a pass over its data."""
        name = type(loader).__name__
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            self._refuse(f"run.loader({name}): a stream has no sample numbers to distribute")
        if type(loader.sampler) is not RandomSampler or type(loader.batch_sampler) is not BatchSampler:
            self._refuse(f"run.loader(...) with a {type(loader.sampler).__name__}: the run shuffles the samples itself")
        assert loader.batch_size is not None
        return self.batches(
            loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **arguments_of(loader)
        )

    def no_sync(self) -> Any:
        """Return a context without effect: gradients are pushed at each step, however many backward() it has."""
        return nullcontext()

    def part(self, batch: Any) -> NoReturn:
        """Raise ValueError: workers have batches of their own."""
        self._refuse("run.part(...): workers have batches of their own")

    def eval_batches(self, dataset: Any, batch_size: int = 1, **arguments: Any) -> NoReturn:
        """Raise ValueError: the models of the workers differ by some updates."""
        self._refuse("run.eval_batches(...): the models of the workers differ by some updates")

    def weight(self, weight: float) -> NoReturn:
        """Raise ValueError: no mean over the workers is taken."""
        self._refuse("run.weight(...): no mean of the workers' gradients is taken")

    def mean(self, value: float | Tensor, weight: float | None = None) -> NoReturn:
        """Raise ValueError: workers are not at the same place of the loop."""
        self._refuse("run.mean(...): workers are not at the same place of the loop")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"{why}. It works if workers share each batch, which they do not with {typed_name(self.strategy)}: omit "
            "--strategy, or use run.batches(dataset, batch_size=...) and rainband.rank()."
        )
