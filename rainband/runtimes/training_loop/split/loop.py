"""A custom training loop whose workers share each batch: the updates of one process.

    with rainband.join(model, optimizer) as run:
        for x, y in run.batches(dataset, batch_size=64):    every worker gets its part of the batch
            ...                                              the user's zero_grad, forward, backward, step

At the end of each backward(), `p.grad` becomes the mean over the workers, weighted by samples. The user's own optimizer
then steps on every worker, so that all parameters stay equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rainband.model.sync_batch_norm import set_group
from rainband.rounds.exchange import Exchange
from rainband.runtimes.processes.worker_link import WorkerLink
from rainband.runtimes.training_loop.loop import is_normal_exit
from rainband.runtimes.training_loop.script_random import seed_by_rank
from rainband.runtimes.training_loop.split.batches import (
    SplitBatches,
    StreamBatches,
    batches_of,
    batches_of_dataset,
)
from rainband.runtimes.training_loop.split.gradients import GradientExchange, weight_of_part
from rainband.runtimes.training_loop.split.parts import batch_length, digest_of, part_of
from rainband.runtimes.training_loop.split.passes import OpenPasses
from rainband.runtimes.training_loop.split.session import LoopSession
from rainband.runtimes.training_loop.split.state import HasState, LoopState
from rainband.runtimes.training_loop.split.tensors import SharedTensors, refuse_wrapped
from rainband.runtimes.training_loop.step_hooks import unwrapped

MakeExchange = Callable[[LoopState, list[Tensor]], Exchange]  # the tensors tell shapes and dtypes


class SplitLoop:
    """The training loop of one worker that shares each batch: the `run` of `with rainband.join(...) as run`."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[Any],
        make_exchange: MakeExchange,
        num_workers: int,
        seed: int = 0,
        session: LoopSession | None = None,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        refuse_wrapped(self.model)
        self.optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        self.session = session  # None: there is no coordinator
        self.num_workers = num_workers
        self.seed = seed
        self.generator = torch.Generator().manual_seed(torch.initial_seed() % (1 << 63))
        tensors = SharedTensors(self.model, self.optimizers)
        self.state = LoopState(tensors, self.optimizers, self.generator)
        self.exchange = make_exchange(self.state, tensors.examples())
        self.rank = self.exchange.rank
        self.gradients = GradientExchange(self.exchange, self.state, num_workers, session)
        set_group(self.model, self.exchange.statistics(partial(weight_of_part, self.gradients)))
        self.passes = OpenPasses(self.exchange, self.gradients, self.state, num_workers, session)

    def __enter__(self) -> SplitLoop:
        if self.session is not None:
            self.session.join(self.state.tensors)
            self.session.snapshots.restore()
        self.passes.where = self.exchange.begin(0)  # all workers begin with the state of the first one
        self.passes.thread = threading.get_ident()
        seed_by_rank(self.rank)
        if self.session is not None and self.num_workers > 1:  # one worker alone has its numbers with its passes
            self.session.snapshots.continue_script()
        self.gradients.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.gradients.detach()
        stopped = kind is KeyboardInterrupt and self.stopped is not None
        misuse = self.passes.misuse if kind is None else None
        if misuse is not None or not (kind is None or stopped or is_normal_exit(error)):
            if self.session is not None:
                self.session.failed()
            self.exchange.abandon()
            if misuse is not None:
                raise misuse
            return False
        self.gradients.end()
        if self.session is not None:
            self.session.leave()
        return stopped

    # ---- data ----

    def batches(
        self, dataset: Any, batch_size: int = 1, *, shuffle: bool = True, drop_last: bool = False, **arguments: Any
    ) -> SplitBatches:
        """Return what stands in the place of a DataLoader. Workers share each batch of `batch_size` samples.

        Other arguments are those of a DataLoader. The order of the samples is the same with any number of workers.
        """
        return batches_of_dataset(
            self.passes, dataset, batch_size, self.seed, shuffle=shuffle, drop_last=drop_last, arguments=arguments
        )

    def loader(self, loader: Any, batches_ahead: int = 1) -> SplitBatches | StreamBatches:
        """Return what stands in the place of this loader; its batches are shared by the workers.

        Of a DataLoader it takes over dataset, sampler and collate function, and each worker loads its parts alone. Of
        a stream (an IterableDataset, or any other iterable) every worker reads all batches, and keeps its parts.
        A loop that draws several batches before their backward passes says how many: `batches_ahead`.
        """
        return batches_of(self.passes, loader, batches_ahead)

    def part(self, batch: Any) -> Any:
        """Return this worker's part of a batch that every worker has drawn alike, with run.generator.

        A batch is a tensor, or a tuple, list or dict of tensors. Under torch.no_grad() it is returned whole.
        """
        if not torch.is_grad_enabled():
            return batch
        one = self.passes.draw_own()
        if one.kind == "rounds":
            self.state.generator_state = self.generator.get_state()
        part = self.passes.cut(one, range(batch_length(batch)), digest=digest_of(batch))
        return self.passes.drew(one, part_of(batch, part.samples))

    def eval_batches(self, dataset: Any, batch_size: int = 1, **arguments: Any) -> DataLoader[Any]:
        """Return a DataLoader of this worker's share of a dataset, in order: evaluate it and take run.mean(...)."""
        self.gradients.ensure_round()
        members = self.exchange.members
        mine = range(members.index(self.rank), len(dataset), len(members))
        return DataLoader(torch.utils.data.Subset(dataset, mine), batch_size=batch_size, **arguments)

    def epochs(self, number: int) -> Iterator[int]:
        """Iterate over this many passes over the data: `for epoch in run.epochs(10):`."""
        if number < 1:
            raise ValueError(f"run.epochs({number}) must be 1 or more.")
        self.passes.num_epochs = number
        return (epoch for epoch in range(number) if self.stopped is None)

    # ---- gradients ----

    def no_sync(self) -> Any:
        """Accumulate gradients on each worker inside the block; the next backward() outside averages their sum."""
        return self.gradients.no_sync()

    def weight(self, weight: float) -> None:
        """Weight this worker's gradients of this batch, in place of its number of samples.

        For losses that are not means over samples: with a mean over the tokens that are not padding, call
        run.weight(number of those tokens) before backward().
        """
        if not weight >= 0:
            raise ValueError(f"run.weight({weight}) must be 0 or more.")
        self.gradients.set_weight(float(weight))

    def skip(self, reason: str = "skipped by the loop") -> None:
        """Leave this worker's part of the current batch out; the other workers average theirs."""
        self.exchange.skip(reason)

    def mean(self, value: float | Tensor, weight: float | None = None) -> float:
        """Return the mean of a number over the workers, weighted by the samples of the current batch, or by `weight`.

        All workers must call it at the same place.
        """
        return self.gradients.mean(float(value.detach() if isinstance(value, Tensor) else value), weight)

    # ---- the run ----

    def register(self, *objects: HasState) -> None:
        """Send the state of these (a scheduler, a GradScaler, averaged parameters) to workers that join or return."""
        self.state.register(objects)

    def stop(self, reason: str = "stopped by the loop") -> None:
        """End the run of all workers after their current batches: the code after their `with` blocks runs.

        `run.stopped` is then the reason.
        """
        if self.session is not None:
            self.session.stop(str(reason))
        self.gradients.stop(str(reason))

    def checkpoint(self) -> None:
        """Write a checkpoint at the beginning of the next batch, besides those of --checkpoint-every."""
        if self.session is not None and self.exchange.is_first:
            self.session.checkpoint()

    @property
    def stopped(self) -> str | None:
        """Return the reason for which the run ends early, or None."""
        return self.state.stopped

    @property
    def is_first(self) -> bool:
        """Return True on one worker: the one that has served longest. For printing and saving."""
        self.gradients.ensure_round()
        return self.exchange.is_first

    @property
    def progress(self) -> float:
        """Return the fraction of the run that is done, from 0 to 1: for learning-rate schedules."""
        passes = self.passes
        if not passes.num_epochs:
            raise ValueError("run.progress needs the number of epochs: write `for epoch in run.epochs(10):`.")
        length = passes.current.length if passes.current is not None else 0
        done = passes.where.epoch - passes.first_epoch + passes.where.batch / max(1, length)
        return min(1.0, done / passes.num_epochs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no worker wait for this one inside, for example during a long evaluation on one worker."""
        self.exchange.pause()
        if self.session is not None:
            self.session.pause()
        yield

    def log(self, *, loss: float | Tensor | None = None, **metrics: float) -> None:
        """Report the loss of the current batch, or metrics, for progress views; --target ends the run at a metric."""
        part = self.gradients.part
        if self.session is not None and metrics:
            self.session.report(metrics)
        if loss is None:
            return
        if self.session is not None and part is not None and part.weight:
            self.session.log(loss.item() if isinstance(loss, Tensor) else float(loss), part.weight)


def joined_loop(model: nn.Module | Sequence[nn.Module], optimizers: Sequence[Any], link: WorkerLink) -> SplitLoop:
    """Return the loop of a script that was started by `rainband run`."""
    assert link.strategy is not None
    session = LoopSession(link, link.strategy)
    return SplitLoop(model, optimizers, session.make_exchange, session.num_workers, link.config.seed, session)
