"""Join a run from a loop written with Accelerate.

from rainband.adapters.accelerate import join
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
with join(accelerator, model, optimizer) as run:
    ...  # the loop as it is, with accelerator.backward(loss)

By default, the workers share each batch of the prepared loaders, and make the updates of one process. A loader that is
read while the model is in evaluation mode (model.eval()), or without gradients, gives whole batches on all workers.
Only one worker is the main process, which saves and logs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from rainband.join import join as join_plainly
from rainband.join import rank
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.runtimes.training_loop.split.orders import drawn

if TYPE_CHECKING:
    from accelerate import Accelerator

    from rainband.runtimes.training_loop.loop import TrainingLoop
    from rainband.runtimes.training_loop.single_process import SingleProcessLoop

WHOLE_BATCHES = (
    "rainband: a step was made with batches of a loader that was read in evaluation mode, so every worker computes "
    "whole batches. To share them, call model.train() before the loop over the loader."
)


@contextmanager
def join(
    accelerator: Accelerator, model: Any, optimizer: Any
) -> Iterator[SplitLoop | TrainingLoop | SingleProcessLoop]:
    """Call rainband.join for the model and the optimizer that accelerator.prepare(...) returned; lists for several."""
    check_one_process(accelerator.num_processes)
    several = isinstance(model, list | tuple)
    plain = [accelerator.unwrap_model(each) for each in (model if several else [model])]
    run = join_plainly(plain if several else plain[0], optimizer)
    if isinstance(run, SplitLoop):
        run.register(*accelerator._schedulers, *([accelerator.scaler] if accelerator.scaler is not None else []))

    def trains(loader: Any) -> bool:
        return torch.is_grad_enabled() and any(each.training for each in plain)

    with run, SharedLoaders(run, trains):
        yield run


def check_one_process(number: int) -> None:
    """Raise ValueError if another launcher has started several processes."""
    if number > 1:
        raise ValueError(
            f"Accelerate has started {number} processes, but a worker has one: start the script with `rainband run`, "
            "not with `accelerate launch`."
        )


def set_main_process(is_main: bool) -> None:
    """Make this process the main one, which saves and logs, or not."""
    from accelerate.state import AcceleratorState, PartialState

    number = 0 if is_main else max(1, rank())
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if "process_index" in state:
            state["process_index"] = state["local_process_index"] = number


class SharedLoaders:
    """While a run is joined, loaders of Accelerate give each worker its part of every batch that trains.

    `trains` says whether a loader is read for training.
    """

    def __init__(self, run: Any, trains: Callable[[Any], bool], batches_ahead: int = 1) -> None:
        self.run = run
        self.trains = trains
        self.batches_ahead = batches_ahead  # that the loop draws before their backward passes
        self.drawn = {"parts": 0, "whole": 0}  # batches since the last step
        self.has_told = False
        self.hooks: list[RemovableHandle] = []
        self.before: list[tuple[Any, Any]] = []  # classes of loaders, and how they iterated

    def __enter__(self) -> SharedLoaders:
        if not isinstance(self.run, SplitLoop):
            return self  # the servers' strategies, and scripts of one process: every worker reads its own data
        from accelerate import data_loader

        for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
            self.before.append((kind, kind.__iter__))
            kind.__iter__ = self._iterating(kind.__iter__)
        self.hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in self.run.optimizers]
        set_main_process(self.run.is_first)
        return self

    def __exit__(self, *error: object) -> None:
        for kind, before in self.before:
            kind.__iter__ = before
        self.before.clear()
        for hook in self.hooks:
            hook.remove()

    def _iterating(self, before: Any) -> Any:
        def iterate(loader: Any) -> Iterator[Any]:
            if self.trains(loader):
                return self._parts(loader)
            whole = self._whole(loader) if hasattr(loader, "_fetch_batches") else before(loader)
            return self._count(drawn(whole, self.run.passes.random))  # which train loaders use, too, as in one process

        return iterate

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.drawn["whole"] += 1
            yield batch

    def _after_step(self, *given: Any) -> None:
        """Say if a step was made with whole batches: the result is right, and no worker has saved time."""
        if self.drawn["whole"] and not self.drawn["parts"] and not self.has_told and self.run.is_first:
            self.has_told = True
            print(WHOLE_BATCHES, file=sys.stderr)
        self.drawn = {"parts": 0, "whole": 0}

    def _parts(self, loader: Any) -> Iterator[Any]:
        """Iterate as the loader itself does, over this worker's part of each batch."""
        loader.begin()
        loader.set_epoch(loader.iteration)
        whole = loader.base_dataloader
        if skipped := getattr(loader, "skip_batches", 0):
            whole = _Rest(whole, skipped)
        parts = self.run.loader(whole, self.batches_ahead)
        parts.trains = True
        count = _length(parts)
        for number, batch in enumerate(parts, 1):
            set_main_process(self.run.is_first)
            self.drawn["parts"] += 1
            done = parts.reading.position if self.batches_ahead == 1 else number
            loader.end_of_dataloader = done == count
            yield _on_device(loader, batch)
        loader.end_of_dataloader = True
        loader.iteration += 1
        loader.end()

    def _whole(self, loader: Any) -> Iterator[Any]:
        """Iterate over whole batches; Accelerate would read them on the main process, and send them to the others."""
        loader.begin()
        for batch in loader.base_dataloader:
            yield _on_device(loader, batch)
        loader.end_of_dataloader = True
        loader.end()


class _Rest:
    """The batches of a loader after the first ones."""

    def __init__(self, loader: Any, skipped: int) -> None:
        self.loader = loader
        self.skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.skipped, None)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # a stream
        return -1


def _on_device(loader: Any, batch: Any) -> Any:
    from accelerate.utils import send_to_device

    device = getattr(loader, "device", None)
    return batch if device is None else send_to_device(batch, device)
