"""Batches that workers share: this worker's part of each, and the mean of all workers' gradients.

The workers take the same batches in the same order. A round (`rainband/rounds/`) is one batch: each worker computes the
gradient of its part, and all get the mean, weighted by samples. If a worker is lost, the others compute its part in the
same round, so the update is that of the whole batch. What is done is part of the state that workers receive when they
join, so all count alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from rainband.model.containers import bytes_of, marked, restored
from rainband.model.gradient import Gradient
from rainband.model.sync_batch_norm import set_group
from rainband.protocol.accounting import NO_WEIGHT
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Report, Tally
from rainband.protocol.steps import Handle
from rainband.rounds.average import finite
from rainband.rounds.board import Board, Condition
from rainband.rounds.exchange import Outcome
from rainband.rounds.member import RoundMember
from rainband.rounds.membership import RoundMembership, Waiting
from rainband.rounds.statistics import RoundStatistics
from rainband.strategy import Batch, BatchPart, Parameters

if TYPE_CHECKING:
    from torch import nn

    from rainband.model.flat_parameters import Flat
    from rainband.worker.client import Client
    from rainband.worker.worker import ModuleWorker

NO_MEAN = "no mean of its gradients"


class Transferable(Protocol):
    """The state that a worker gives to others."""

    def collect(self) -> Any: ...

    def apply(self, state: Any) -> None: ...


class KeepsState(Protocol):
    """An optimizer whose state workers give to those that join, and average."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def state_vectors(self) -> list[list[Tensor | None]]: ...


class RoundsWorker(Protocol):
    """A worker that can meet others in rounds: that of a task, or of a custom training loop."""

    client: Client

    @property
    def plan(self) -> DataPlan: ...

    @property
    def flat(self) -> Flat: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def params(self) -> Parameters: ...

    @property
    def local_optimizer(self) -> KeepsState | None: ...

    def at_boundary(self) -> bool: ...


class OthersInRound(Handle):
    """Something that other members of the rounds write into the memory that all share."""

    def __init__(self, until: Condition, member: RoundMembership) -> None:
        self.board = member.board
        self.until = until
        self.member = member

    def ready(self) -> bool:
        return self.until()

    def holder(self) -> int | None:
        return self.member.blocked_by


class WorkerRounds:
    """One worker's place in the rounds of a run: how it waits, leaves, and reports what all together have done."""

    worker: RoundsWorker
    member: RoundMember
    state: Transferable  # what workers receive when they join, and what a checkpoint has

    def __init__(self, worker: RoundsWorker, board: Board) -> None:
        self.worker = worker
        self.board = board
        self.buffers = SharedBuffers(worker.module)
        self.done = 0  # batches that are applied or skipped
        self.skipped: Counter[str] = Counter()  # reason -> batches
        self.stops = False  # the run ends after this round
        self.has_left = False
        self.reported = -1

    @property
    def plan(self) -> DataPlan:
        return self.worker.plan

    @property
    def is_first(self) -> bool:
        """Return True on exactly one member: the longest-serving one."""
        return self.member.view.first == self.member.rank

    def close(self) -> None:
        """Count the batches of the open round, if this worker has its mean."""
        raise NotImplementedError

    def open_numbers(self) -> tuple[int, Sequence[int]]:
        """Return the number of the first batch that was not begun, and those of earlier ones that are not done."""
        return self.done, ()

    def first_open(self) -> int:
        """Return the number of the first batch, in the order of the data, that is not done."""
        return self.done

    async def leave(self) -> None:
        """Take no more part in rounds; others do not wait for this worker."""
        if not self.has_left:
            self.has_left = True
            self.close()
            await self.through(self.member.leave())

    async def through(self, waiting: Waiting) -> Any:
        """Go through a part of the protocol, and wait where it does."""
        try:
            while True:
                until = next(waiting)
                self.member.membership.blocked_by = None
                if until is not None and not until():
                    await OthersInRound(until, self.member.membership)
        except StopIteration as end:
            return end.value

    def tell(self) -> None:
        """Report what is done to the coordinator, if it has changed since this worker's last report."""
        if self.done != self.reported:
            self.reported = self.done
            self.worker.client.tell(self.report())

    def report(self) -> Report:
        """Return what all workers together have done."""
        skipped = self.skipped.total()
        over = self.done >= self.plan.num_batches
        return Report(
            first_open=self.plan.num_portions if over else batch_at(self.plan, self.first_open()).portion,
            full=(),
            accepted=self.done,
            updates=self.done - skipped,
            blocks=(Tally(self.done, self.done - skipped, skipped, 0),),
            skipped=dict(self.skipped),
        )


async def leaves_alone(rounds: WorkerRounds) -> bool:
    """Leave the rounds, and return True, if only this worker is to end."""
    leaving = rounds.worker.client.leases.leaving
    if leaving:
        rounds.has_left = True
        await rounds.through(rounds.member.pause())
    return leaving


class SharedBatches(WorkerRounds):
    """One worker's place in the rounds, where workers share each batch."""

    worker: ModuleWorker

    def __init__(
        self, worker: ModuleWorker, board: Board, clock: Callable[[], float], equal_parts: bool = False
    ) -> None:
        super().__init__(worker, board)
        self.state = state = TrainingState(worker, self)
        self.member = RoundMember(board, state, clock, equal_parts, whole_batches=True)
        self.computed_again = 0  # samples of parts that were lost
        self.sends_rest = False  # what codecs have kept goes with the next exchange: the run stops after it
        self.batch: Batch | None = None  # of the open round; the next one has the number `done`
        self.result: Gradient | None = None  # its mean
        self.statistics: RoundStatistics | None = None  # of layers, exchanged while a batch is computed

    def share_statistics(self, run: Callable[[Waiting], Any]) -> None:
        """Exchange the statistics of SyncBatchNorm layers, if there are any; `run` waits for the others."""
        statistics = RoundStatistics(self.member, run)
        if not set_group(self.worker.module, statistics):
            return
        if self.worker.microbatches > 1:
            raise ValueError(
                "SyncBatchNorm normalizes a whole batch, and --microbatches computes it in parts: omit --microbatches, "
                "or use BatchNorm."
            )
        self.statistics = statistics

    # ---- parts -----------------------------------------------------------------------------------------------------

    async def parts(self) -> AsyncIterator[BatchPart]:
        """Yield this worker's part of each batch, until all batches are done or the run stops."""
        while (part := await self._next_part()) is not None:
            yield part
        await self.leave()

    async def _next_part(self) -> BatchPart | None:
        self.close()
        if await leaves_alone(self):
            return None
        where = await self.through(self.member.begin(0))
        self.settle_skipped()
        self.worker.at_boundary()
        if where.epoch or self.done >= self.plan.num_batches or self.stops:
            return None
        self.batch = batch_at(self.plan, self.done)
        size = self.plan.samples_in(self.batch.portion, self.batch.k)
        part = self.member.cut(range(size))
        if self.member.encoded is not None:
            self.member.encoded.last = self.sends_rest or self.done + 1 >= self.plan.num_batches
        return BatchPart(self.batch, range(part.first, part.last), size)

    # ---- means -----------------------------------------------------------------------------------------------------

    async def mean(self, gradient: Gradient) -> Gradient:
        """Return the mean gradient of the whole batch.

        A worker that was excluded meanwhile, for example because it was paused, gets a gradient without batches, which
        optimizers ignore: it receives the state of another worker before its next part.
        """
        assert self.batch is not None, "a mean is that of the parts of a batch: ask for a part first"
        tensors, buffers = gradient.tensors, self.buffers.changes()
        outcome = await self._exchange(tensors + buffers, gradient)
        total, loss = outcome.total, outcome.loss
        while outcome.took_part and self.member.round.missing:
            part = BatchPart(self.batch, self.member.round.own_missing(), self.member.round.part.total)
            self.computed_again += len(part.positions)
            more = await self.worker.gradient(part)
            rest = await self._exchange(more.tensors + self.buffers.changes(), more)
            add_weighted(outcome.tensors, total, rest.tensors, rest.total)
            loss = (loss * total + rest.loss * rest.total) / ((total + rest.total) or 1.0)
            total += rest.total
            outcome = rest._replace(tensors=outcome.tensors)
        if not outcome.took_part:
            return Gradient([None] * len(tensors), (), 0, 0.0)
        number = len(tensors)
        self.buffers.add(outcome.tensors[number:])
        self.result = Gradient(outcome.tensors[:number], (self.batch,), round(total), loss, total)
        if not total:
            self.result.left_out = NO_WEIGHT
        if self.worker.client.observer is not None:
            self.worker.client.observer.averaged(self.worker, self.member.view.where, self.result)
        return self.result

    async def _exchange(self, tensors: list[Tensor | None], gradient: Gradient) -> _Exchanged:
        encoded = self.member.encoded
        waiting = self.member.mean(
            tensors, gradient.weight, (float(self.stops or self.worker.client.leases.run_stops),), (gradient.loss,)
        )
        outcome: Outcome = await self.through(waiting)
        if outcome.took_part:
            self.stops = bool(outcome.numbers[0])  # those of one worker: all stop after the same round
            if self.stops and not self.sends_rest and encoded is not None and encoded.codec.properties.keeps:
                self.stops, self.sends_rest = False, True  # one more round sends what codecs have kept
        return _Exchanged(outcome.took_part, tensors, outcome.weight, outcome.scalars[0] if outcome.took_part else 0.0)

    # ---- accounting ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Count the batch of the open round, if this worker has its mean."""
        if self.result is None:
            return
        skip, self.result = self.result.skip, None
        self._count(skip)
        self.member.stepped()

    def settle_skipped(self) -> None:
        """Count the batch of a round that has ended without a mean on any worker."""
        if self.batch is not None and self.result is None and self.member.all_skipped:
            self._count(NO_MEAN)

    def _count(self, skip: str) -> None:
        self.batch = None
        self.done += 1
        self.worker.client.stats.acked += 1
        if skip:
            self.skipped[skip] += 1
        ends_here = not self.done % self.plan.portion_batches or not self.done % self.plan.batches_per_epoch
        if ends_here and self.is_first:
            self.tell()


class _Exchanged(NamedTuple):
    """The result of one exchange."""

    took_part: bool
    tensors: list[Tensor | None]
    total: float  # samples
    loss: float


class RoundState:
    """Collects what a worker that joins or returns receives: parameters, buffers, optimizer state, and what is done."""

    def __init__(self, worker: RoundsWorker, rounds: WorkerRounds) -> None:
        self.worker = worker
        self.rounds = rounds

    def collect(self) -> dict[str, Any]:
        worker, rounds = self.worker, self.rounds
        optimizer = worker.local_optimizer
        return {
            "vectors": list(worker.flat.vectors),
            "buffers": list(worker.module.buffers()),
            "optimizer": None if optimizer is None else marked(optimizer.state_dict()),
            "done": rounds.done,
            "skipped": dict(rounds.skipped),
            "stops": rounds.stops,
        }

    @torch.no_grad()
    def apply(self, state: Mapping[str, Any]) -> None:
        worker, rounds = self.worker, self.rounds
        for own, value in zip(worker.flat.vectors, state["vectors"], strict=True):
            own.copy_(value)
        for buffer, value in zip(worker.module.buffers(), state["buffers"], strict=True):
            buffer.copy_(value)
        if worker.local_optimizer is not None and state["optimizer"] is not None:
            worker.local_optimizer.load_state_dict(restored(state["optimizer"]))
        rounds.buffers.keep()
        rounds.done, rounds.skipped, rounds.stops = state["done"], Counter(state["skipped"]), state["stops"]

    def has_changed(self) -> bool:
        return False  # only the optimizer changes parameters


class TrainingState(RoundState):
    """The state of workers that share each batch: it is equal on all of them."""

    rounds: SharedBatches

    def collect(self) -> dict[str, Any]:
        self.rounds.settle_skipped()
        rounds = self.rounds
        return {**super().collect(), "computed_again": rounds.computed_again, "sends_rest": rounds.sends_rest}

    def apply(self, state: Mapping[str, Any]) -> None:
        super().apply(state)
        self.rounds.batch = self.rounds.result = None
        self.rounds.computed_again, self.rounds.sends_rest = state["computed_again"], state["sends_rest"]

    def fingerprint(self) -> int:
        digest = xxhash.xxh3_64()
        for vector in self.worker.flat.vectors:
            digest.update(bytes_of(vector))
        return digest.intdigest() >> 1


class SharedBuffers:
    """The floating-point buffers, such as statistics of BatchNorm: each becomes its last value plus the mean change."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.common = [buffer.detach().clone() for buffer in self._buffers()]  # equal on all workers

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    def changes(self) -> list[Tensor | None]:
        """Return what this worker has changed since the last round, and take it back."""
        changes: list[Tensor | None] = []
        for buffer, common in zip(self._buffers(), self.common, strict=True):
            changes.append(finite(buffer - common))
            buffer.copy_(common)
        return changes

    def add(self, changes: Sequence[Tensor | None]) -> None:
        """Apply the mean changes."""
        for buffer, common, change in zip(self._buffers(), self.common, changes, strict=True):
            if change is not None:
                buffer.copy_(common.add_(change))

    def keep(self) -> None:
        """Take the current values as those that are equal on all workers."""
        for buffer, common in zip(self._buffers(), self.common, strict=True):
            common.copy_(buffer)


def batch_at(plan: DataPlan, number: int) -> Batch:
    """Return batch `number` of a run, in order."""
    epoch, inside = divmod(number, plan.batches_per_epoch)
    portion, k = divmod(inside, plan.portion_batches)
    return Batch(epoch * plan.portions_per_epoch + portion, k, 0)


@torch.no_grad()
def add_weighted(into: list[Tensor | None], weight: float, others: Sequence[Tensor | None], other: float) -> None:
    """Replace each mean of `weight` by that with a mean of `other` more; None counts as zero."""
    for i, more in enumerate(others):
        value = into[i]
        weighted = [tensor * n for tensor, n in ((value, weight), (more, other)) if tensor is not None]
        if weighted:
            into[i] = sum(weighted[1:], weighted[0]) / ((weight + other) or 1.0)


def examples(worker: RoundsWorker) -> list[Tensor]:
    """Return a tensor of the shape and dtype of each tensor of an exchange: gradients and buffers."""
    floating = [buffer for buffer in worker.module.buffers() if buffer.is_floating_point()]
    return [parameter.detach() for parameter in worker.flat.parameters] + floating
