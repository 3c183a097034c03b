"""A worker as a strategy sees it. A gradient is a pure function of the parameters and the batch ID."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from rainband.codecs.codec import Codec
from rainband.model.block_optimizer import build
from rainband.model.flat_parameters import Flat
from rainband.model.gradient import Gradient
from rainband.model.loss_parts import LossParts, states_weight, try_parts, weight_of
from rainband.model.model_vector import ModelVector
from rainband.model.seeds import seed_global_generators
from rainband.plugins import typed_name
from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.accounting import NO_WEIGHT, SkipReasons
from rainband.protocol.data_plan import PushId, num_batches
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import Report, Tally
from rainband.protocol.saved_state import SavedBlock
from rainband.protocol.steps import Work
from rainband.rounds.board import Board
from rainband.rounds.cut import MIN_SAMPLES
from rainband.rounds.encoded import EncodedExchange
from rainband.rounds.statistics import RoundStatistics
from rainband.strategy import Batch, BatchPart, Requirements, Servers, Strategy, WorkItem
from rainband.tasks.task import own_optimizer, own_scheduler
from rainband.worker.client import Client
from rainband.worker.model_rounds import ModelRounds
from rainband.worker.sampler import Sampler
from rainband.worker.saving.snapshots import WorkerSnapshots
from rainband.worker.shared_batches import SharedBatches, WorkerRounds
from rainband.worker.work_items import StillNeeded

ONE_SAMPLE = (
    "BatchNorm cannot normalize a single sample: let the task leave out an epoch's short last batch with "
    "drop_last=True, or choose a batch size that leaves no batch, and no worker's part of one, with a single sample."
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from rainband.observer import Observer
    from rainband.protocol.optimizer_spec import OptimizerSpec
    from rainband.stage import PipelineStage, StageVersions
    from rainband.tasks.task import Data, Task


class Compute(Work):
    """A gradient that is to be computed."""

    def __init__(self, worker: ModuleWorker, batch: Batch | BatchPart) -> None:
        self.worker = worker
        self.target = batch
        self.batch = batch.batch if isinstance(batch, BatchPart) else batch
        if isinstance(batch, BatchPart):
            self.share = len(batch.positions) / batch.size
        self.result: Gradient | None = None
        # Newer parameters may arrive while it is computed.
        self.began, self.read = worker.client.pushes.clock, tuple(worker.client.pulls.versions)

    def perform(self) -> None:
        observer = self.worker.client.observer
        if observer is not None:
            observer.computing(self.worker, self.batch)
        self.result = self.worker.compute(self.target)
        if observer is not None:
            observer.computed(self.worker, self.batch)

    def __await__(self) -> Generator[Compute, None, Gradient]:
        while self.result is None:
            yield self
        self.result.began, self.result.read = self.began, self.read
        return self.result


class WorkerParameters:
    """The worker's own copy of the parameters."""

    def __init__(self, flat: Flat, observer: Observer | None = None) -> None:
        self.flat = flat
        self.observer = observer

    def step(self, gradient: Gradient, lr: float) -> None:
        if self.observer is not None:
            self.observer.began("step")
        if gradient.is_finite:  # otherwise every later gradient would be NaN, too
            self.flat.add_(gradient.tensors, -lr)
        if self.observer is not None:
            self.observer.ended("step")

    def copy(self) -> ModelVector:
        return ModelVector([parameter.detach() for parameter in self.flat.parameters]).copy()

    @torch.no_grad()
    def replace(self, vector: ModelVector) -> None:
        for parameter, tensor in zip(self.flat.parameters, vector.tensors, strict=True):
            parameter.copy_(tensor)

    async def average_with(self, partner: int, step: ModelVector, gradient: Gradient) -> None:
        raise ValueError("models are averaged in pairs by a strategy whose `requires` declares in_pairs=True.")


class GradientPart(NamedTuple):
    """Samples of a batch whose loss is computed at once."""

    seed: int
    samples: int
    indices: Any = None  # of the samples; None: they were read already


def _in_microbatches(indices: NDArray[np.int64], most: int, seed: int) -> list[GradientPart]:
    parts = np.array_split(indices, max(1, min(most, len(indices))))
    seeds = [seed, *(xxhash.xxh3_64_intdigest(f"{seed} {n}".encode()) >> 2 for n in range(1, len(parts)))]
    return [GradientPart(each, len(part), part) for each, part in zip(seeds, parts, strict=True)]


def _factor(worker: ModuleWorker, samples: int, weight: float, num_samples: int, size: int) -> float:
    """Return by what the loss of `samples` samples is multiplied, of `num_samples` of a batch that are computed."""
    if states_weight(worker.task) is not None:
        return weight  # the sum is divided by the weight of all
    if worker.loss_parts.is_sum:
        return size / num_samples  # the mean, weighted by samples, is then the sum over the batch
    return samples / num_samples


def _parts(worker: ModuleWorker, batch: Batch, positions: Sequence[int], size: int) -> list[GradientPart]:
    """Return the microbatches of some samples of a batch."""
    is_whole = len(positions) == size
    indices = worker.sampler.indices(batch)
    indices = indices if is_whole else indices[np.asarray(positions)]
    return _in_microbatches(indices, worker.microbatches, worker.seed_of(batch, 0 if is_whole else positions[0]))


def _statistics_of(worker: ModuleWorker) -> RoundStatistics | None:
    """Return the exchanges of statistics of layers, if the model has such layers."""
    return None if worker.shared_batches is None else worker.shared_batches.statistics


class ModuleWorker:
    """A worker that trains a module on a task."""

    def __init__(self, rank: int, num_workers: int, task: Task, data: Data, module: nn.Module, client: Client) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.task = task
        self.data = data
        self.module = module
        self.client = client
        self.plan = client.plan
        self.flat = client.flat
        self.params = WorkerParameters(self.flat, client.observer)
        self.servers: Servers = client
        self.sampler = Sampler(self.plan)
        self.work_item: WorkItem | None = None
        self.accounting: LocalAccounting | None = None  # if it steps itself
        self.local_optimizer: WorkerOptimizer | None = None
        self.rounds: WorkerRounds | None = None  # if workers meet in rounds, one of these:
        self.shared_batches: SharedBatches | None = None
        self.model_rounds: ModelRounds | None = None
        self.snapshots: WorkerSnapshots | None = None  # for checkpoints
        self.prefetch: Callable[[Batch], Any] | None = None  # returns the samples of a batch that were prepared ahead
        self.microbatches = 1  # of each batch, computed one after the other

    async def work_items(self) -> AsyncIterator[WorkItem]:
        """Yield the work items leased to this worker, until the run's data is done."""
        client, leases = self.client, self.client.leases
        while self.at_boundary() and not leases.finished and not leases.stopping:
            work_item = client.next_item()
            if work_item is None:
                await client.state_changed()
            else:
                yield work_item

    def at_boundary(self) -> bool:
        """Write a checkpoint if one is wanted: no batch is between its gradient and its step. Return True."""
        if self.snapshots is not None:
            self.snapshots.at_boundary()
        return True

    def still_needed(self, work_item: WorkItem) -> StillNeeded:
        return self.client.still_needed(work_item)

    @property
    def seen(self) -> int:
        """Samples that this worker has processed, for the mean of its buffers."""
        return self.client.stats.samples

    def enter_rounds(
        self,
        requires: Requirements,
        board: Board,
        clock: Callable[[], float],
        equal_parts: bool = False,
        codec: Codec | None = None,
    ) -> None:
        """Take part in the rounds that the run's strategy declares; `codec` encodes what is exchanged there."""
        if requires.split_batches:
            _ = self.loss_parts  # with the first parameters, which are equal on all workers
            self.rounds = self.shared_batches = SharedBatches(self, board, clock, equal_parts)
        else:
            self.rounds = self.model_rounds = ModelRounds(self, board, clock)
        if codec is not None:
            stats = self.client.stats if requires.split_batches else None  # models are counted by their readers
            self.rounds.member.encoded = EncodedExchange(codec, len(self.flat.parameters), stats)

    @cached_property
    def loss_parts(self) -> LossParts:
        """Return how the loss of a batch is made of those of its parts, from a few samples and the first parameters."""
        found = try_parts(self.task, self.module, self.data, self.plan.batch_size)
        if found.message and not self.rank and (self.num_workers > 1 or self.microbatches > 1):
            print(f"rainband: {found.message}", file=sys.stderr)
        return found

    def _in_rounds(self) -> SharedBatches:
        if self.shared_batches is None:
            raise ValueError("parts and means of batches need a strategy whose `requires` declares split_batches=True.")
        return self.shared_batches

    def parts(self) -> AsyncIterator[BatchPart]:
        return self._in_rounds().parts()

    def mean(self, gradient: Gradient) -> Coroutine[Any, Any, Gradient]:
        return self._in_rounds().mean(gradient)

    @property
    def models(self) -> ModelRounds:
        if self.model_rounds is None:
            raise ValueError("models are exchanged by a strategy whose `requires` declares local_steps=True.")
        return self.model_rounds

    def gradient(self, batch: Batch | BatchPart) -> Compute:
        return Compute(self, batch)

    def compute(self, batch: Batch | BatchPart) -> Gradient:
        """Return the gradient of the mean loss of a batch, or of some of its samples.

        It depends on the parameters and the batch ID alone; that of all samples of a batch is that of the batch.
        """
        whole, size = (
            (batch.batch, batch.size)
            if isinstance(batch, BatchPart)
            else (batch, self.plan.samples_in(batch.portion, batch.k))
        )
        positions = batch.positions if isinstance(batch, BatchPart) else range(size)
        if (statistics := _statistics_of(self)) is not None:
            statistics.has_no_samples = not positions
            if not positions:  # take part in the exchanges of the others
                self._compute(whole, _parts(self, whole, range(min(size, MIN_SAMPLES)), size), size)
        if not positions:
            return Gradient([None] * len(self.flat.parameters), (whole,), 0, 0.0)
        is_whole = len(positions) == size
        seed = self.seed_of(whole, 0 if is_whole else positions[0])
        if is_whole and self.microbatches == 1:
            seed_global_generators(seed)
            return self._compute(whole, [GradientPart(seed, size)], size, self.fetch(whole))
        return self._compute(whole, _parts(self, whole, positions, size), size)

    def _compute(self, batch: Batch, parts: Sequence[GradientPart], size: int, whole: Any = None) -> Gradient:
        """Return the gradient of the mean loss over microbatches; only the activations of one are in memory.

        `size`: samples of the whole batch. `whole`: those of the only microbatch, if they were read already.
        """
        for parameter in self.flat.parameters:
            parameter.grad = None
        num_samples, total, weight = sum(part.samples for part in parts), 0.0, 0.0
        stated, statistics = states_weight(self.task) is not None, _statistics_of(self)
        for part in parts:
            if whole is None:
                seed_global_generators(part.seed)
            samples = self.data.batch(part.indices) if whole is None else whole
            own = weight_of(self.task, samples, part.samples)  # before the loss, which may change its batch
            weight += own
            if statistics is not None:
                statistics.own_weight = own
            elif not own:
                continue
            try:
                loss = self.task.loss(self.module, samples)
            except ValueError as error:
                if part.samples == 1 and "more than 1 value per channel" in str(error):
                    error.add_note(ONE_SAMPLE)
                raise
            if len(parts) > 1 or (num_samples < size and not stated):
                loss = loss * _factor(self, part.samples, own, num_samples, size)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item() if own else 0.0
        self.flat.check()
        if statistics is not None and statistics.has_no_samples:
            return Gradient([], (batch,), 0, 0.0)
        gradient = Gradient(self.tensors(), (batch,), num_samples, total, weight)
        if not weight:
            gradient.left_out = NO_WEIGHT
        elif stated and len(parts) > 1:
            gradient.divide(weight)
        self._count(gradient)
        return gradient

    def fetch(self, batch: Batch) -> Any:
        """Return the samples of a batch."""
        if self.prefetch is not None:
            return self.prefetch(batch)
        return self.data.batch(self.sampler.indices(batch))

    def tensors(self) -> list[Tensor | None]:
        """Return the gradients that autograd has left."""
        return self.flat.gradients()

    def seed_of(self, batch: Batch, first: int = 0) -> int:
        """Return the seed of a batch, or of the part of it that begins with this sample."""
        plan = self.plan  # not the portion: how many batches it has depends on the number of workers
        name = f"{plan.seed} {plan.epoch_of(batch.portion)} {plan.number(batch.portion, batch.k)}"
        name += f" {first}" if first else ""
        return xxhash.xxh3_64_intdigest(name.encode()) >> 1

    def _count(self, gradient: Gradient) -> None:
        stats = self.client.stats
        stats.steps += 1
        stats.samples += gradient.samples
        stats.loss_sum += gradient.loss * gradient.weight
        stats.loss_samples += gradient.weight
        if stats.steps == 1:
            self.client.tell(stats.heartbeat())  # at once: users wait for the first progress

    def optimizer(self, spec: OptimizerSpec, schedule: Schedule, counts: bool = True) -> WorkerOptimizer:
        make = own_optimizer(self.task)
        optimizer = self.local_optimizer = (
            WorkerOptimizer(self, spec, schedule) if make is None else TaskOptimizer(self, make(self._parameters()))
        )
        if not counts:
            optimizer.accounting = None
        self.accounting = optimizer.accounting
        if self.snapshots is not None:
            self.snapshots.put_training()
        return optimizer

    def _parameters(self) -> list[Any]:
        """Return the parameters, in groups if they have settings of their own."""
        groups = self.groups()
        return groups if len(groups) > 1 or set(groups[0]) > {"params"} else groups[0]["params"]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameters of each group, with the settings that the task gives it."""
        groups: list[dict[str, Any]] = [{"params": [], **settings} for settings in self.flat.layout.groups]
        for spec, parameter in zip(self.flat.layout.parameters, self.flat.parameters, strict=True):
            groups[spec.group]["params"].append(parameter)
        return [group for group in groups if group["params"]]

    def change(self, vector: ModelVector, batches: Sequence[Batch], samples: int) -> Gradient:
        return Gradient(list(vector.tensors), tuple(batches), samples, 0.0)

    def stage(self, spec: OptimizerSpec, schedule: Schedule, how: StageVersions) -> PipelineStage:
        raise ValueError("this worker computes the whole model: a pipeline needs stages, for example --stages 2.")

    def buffers(self) -> bytes:
        return buffers_of(self.module)

    def set_buffers(self, body: bytes | memoryview) -> None:
        set_buffers(self.module, body)


def buffers_of(module: nn.Module) -> bytes:
    """Return all numeric buffers as one float64 vector."""
    parts = [b.detach().cpu().double().reshape(-1) for b in _numeric_buffers(module)]
    return torch.cat(parts).numpy().tobytes() if parts else b""


@torch.no_grad()
def set_buffers(module: nn.Module, body: bytes | memoryview) -> None:
    """Set all numeric buffers; those that already have their values are not written to, as not all can be."""
    values = torch.frombuffer(bytearray(body or bytes(8)), dtype=torch.float64)
    at = 0
    for buffer in _numeric_buffers(module):
        part = values[at : at + buffer.numel()].view(buffer.shape)
        if not torch.equal(part, buffer.cpu().double()):
            buffer.copy_(part if buffer.is_floating_point() else part.round())
        at += buffer.numel()


def _numeric_buffers(module: nn.Module) -> list[torch.Tensor]:
    return [b for b in module.buffers() if not b.is_complex() and b.dtype != torch.bool]


def check_optimizer(task: Task, strategy: Strategy) -> None:
    """Raise ValueError if the task has an optimizer of its own, and the strategy does not let workers use it."""
    requires = strategy.requires
    in_place = requires.shared_memory and not requires.in_pairs
    if own_optimizer(task) is not None and (requires.optimizer != "workers" or in_place):
        raise ValueError(
            f"the task has its own optimizer, and {typed_name(strategy)} makes updates in another way: use sync or "
            "single, where workers step with it, or omit the task's optimizer."
        )


class WorkerOptimizer:
    """A torch optimizer on one worker."""

    def __init__(self, worker: ModuleWorker, spec: OptimizerSpec, schedule: Schedule) -> None:
        self._watch(worker)
        self.schedule = schedule
        self.optimizer = build(spec, worker.groups())
        self.base = [group["lr"] for group in self.optimizer.param_groups]

    def _watch(self, worker: ModuleWorker) -> None:
        self.worker = worker
        # In rounds, the workers count together what is applied.
        self.accounting = LocalAccounting(worker.client) if worker.rounds is None else None

    def step(self, gradient: Gradient) -> None:
        if not gradient.batches:
            return  # this worker was left out of the round
        if gradient.skip:
            self._account(gradient, gradient.skip)
            return
        self._schedule(gradient.batches[0])
        for parameter, tensor in zip(self.worker.flat.parameters, gradient.tensors, strict=True):
            parameter.grad = tensor
        self._step()
        self._account(gradient)

    def _schedule(self, batch: Batch) -> None:
        """Set the learning rates of a batch."""
        scale = self.schedule.scale(self.worker.plan.progress(batch.portion, batch.k))
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * scale

    def _step(self) -> None:
        self.optimizer.step()

    def _account(self, gradient: Gradient, skip: str = "") -> None:
        if self.accounting is not None:
            self.accounting.add(gradient.push_id(), skip)
        elif self.worker.model_rounds is not None:
            self.worker.model_rounds.processed(gradient, skip)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def state_vectors(self) -> list[list[Tensor | None]]:
        """Return the vectors of its state, in the order of their names: one tensor of each parameter, if it has one."""
        return state_vectors([self.optimizer], self.worker.flat.parameters)


def state_vectors(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]
) -> list[list[Tensor | None]]:
    """Return the vectors of the optimizers' states, in the order of their names: one tensor of each parameter."""
    states: list[dict[str, Any]] = [
        next((optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state), {})
        for parameter in parameters
    ]
    names = {
        name
        for state, parameter in zip(states, parameters, strict=True)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
    }
    return [[state.get(name) for state in states] for name in sorted(names)]


class TaskOptimizer(WorkerOptimizer):
    """The task's own torch optimizer, and its scheduler if it has one."""

    def __init__(self, worker: ModuleWorker, optimizer: Any) -> None:
        self._watch(worker)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"the task's optimizer returned a {type(optimizer).__name__}, not a torch optimizer.")
        self.optimizer = optimizer
        make = own_scheduler(worker.task)
        self.scheduler = None if make is None else make(optimizer)

    def _schedule(self, batch: Batch) -> None:
        """Leave the learning rates to the scheduler."""

    def _step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


class LocalAccounting:
    """Batch accounting of a worker that trains without servers, reported to the coordinator."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.accepted_set = AcceptedSet(client.plan)
        self.applied = 0
        self.untracked_pushes = 0
        self.complete = True  # everything is reported
        self.skipped: Counter[str] = Counter()  # reason -> batches
        self.reasons = SkipReasons()

    def add(self, name: PushId, skip: str = "") -> None:
        """Note that batches are applied, or skipped for a reason."""
        self.client.stats.acked += 1
        if self.accepted_set.plan != self.client.plan:  # the plan was made after the first steps
            accepted = self.accepted_set
            self.accepted_set = AcceptedSet.of_portions(self.client.plan, accepted.first_open, accepted.open)
        if skip:
            self.skipped[self.reasons.bounded(skip)] += num_batches(name)
        else:
            self.applied += num_batches(name)
            self.untracked_pushes += not name
        self.complete = bool(self.accepted_set.add(name))
        if self.complete:
            self.client.tell(self.report())
        self.client.leases.settle(name)

    def saved(self) -> SavedBlock:
        """Return what is accepted, for a checkpoint."""
        accepted = self.accepted_set
        return SavedBlock(
            version=self.applied + self.untracked_pushes,
            first_open=accepted.first_open,
            open=dict(accepted.open),
            applied=self.applied,
            applied_untracked=self.untracked_pushes,
        )

    def restore(self, block: SavedBlock, skipped: Mapping[str, int]) -> None:
        """Continue from a checkpoint."""
        self.accepted_set = block.accepted_set(self.client.plan)
        self.applied, self.untracked_pushes = block.applied, block.applied_untracked
        for reason, number in skipped.items():
            self.skipped[self.reasons.bounded(reason)] += number
        self.client.tell(self.report())

    def report_rest(self) -> None:
        """Report what was done since the last portion was complete: the run is stopped."""
        if not self.complete:
            self.client.tell(self.report())

    def report(self, flushed: bool = False) -> Report:
        full = tuple(p for p in sorted(self.accepted_set.open) if self.accepted_set.is_full(p))
        return Report(
            first_open=self.accepted_set.first_open,
            full=full,
            accepted=self.accepted_set.count,
            updates=self.applied + self.untracked_pushes,
            blocks=(Tally(self.accepted_set.count, self.applied, self.skipped.total(), 0, self.untracked_pushes),),
            skipped=dict(self.skipped),
            flushed=flushed,
        )
