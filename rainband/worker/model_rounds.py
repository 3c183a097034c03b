"""Rounds in which each worker trains a model of its own, and exchanges it with the others.

All workers agree on the batches of a round: those that were lost in earlier rounds, then the next ones of the data, cut
into one run of batches for each worker. A batch counts when the round's first mean contains the worker that processed
it: so each batch has changed one model once, and one mean once. If a worker is lost before, its batches of the round
are repeated in the next one. A worker that missed the mean receives the model of another one, or, if it is the last,
returns to its model at the start of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from rainband.model.containers import bytes_of
from rainband.model.model_vector import ModelVector
from rainband.protocol.accounting import NOT_FINITE
from rainband.rounds.average import Row
from rainband.rounds.board import Board
from rainband.rounds.exchange import Outcome
from rainband.rounds.member import RoundMember
from rainband.rounds.view import up_to_date
from rainband.strategy import Batch
from rainband.worker.shared_batches import RoundState, WorkerRounds, batch_at, leaves_alone

if TYPE_CHECKING:
    from rainband.model.gradient import Gradient
    from rainband.worker.shared_batches import RoundsWorker

LEFT_OUT_BY_LOOP = "left out by the loop"
LOSS, DONE, SKIPPED, DISTANCE, LEFT_OUT = range(5)  # the numbers that a worker publishes with its model


class OpenRound:
    """One round, as far as this worker has come, until the next one begins."""

    def __init__(self, weights: ModelVector, shared: dict[str, Any]) -> None:
        self.start = weights  # its model before
        self.shared = shared  # the same of what is equal on all workers
        self.assigned: dict[int, Sequence[int]] = {}  # rank -> numbers of its batches
        self.tried = 0  # batches that this worker has processed
        self.not_finite = 0  # of these
        self.left_out = 0  # of these, by a custom training loop
        self.samples = 0
        self.loss_sum = 0.0
        self.has_mean = False
        self.is_mixed = False  # models were published before the steps of this round
        self.num_vectors = 0  # of the optimizers' states, that are averaged

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else 0.0


# size: it has the methods of Models, for strategies, and of WorkerRounds, for the lifecycle; both act on the open round
class ModelRounds(WorkerRounds):
    """One worker's side of the rounds, where each worker has a model of its own."""

    def __init__(self, worker: RoundsWorker, board: Board, clock: Callable[[], float]) -> None:
        super().__init__(worker, board)
        self.state = state = ModelState(worker, self)
        self.member = RoundMember(board, state, clock, equal_parts=True)
        self.shared: dict[str, Any] = {}
        self.loss = math.nan
        self.next = 0  # number of the first batch that no worker has been given
        self.lost: list[int] = []  # numbers of batches that must be repeated
        self.pending: dict[int, list[int]] = {}  # rank -> numbers of batches that it has not published with its model
        self.is_over = False  # no batch was left for the open round
        self.distance = math.nan  # squared, of this worker's model from the last mean
        self.open: OpenRound | None = None

    @property
    def round(self) -> OpenRound:
        assert self.open is not None, "models are exchanged in rounds: await models.begin() first"
        return self.open

    @property
    def members(self) -> Sequence[int]:
        return [member.rank for member in self.member.view.members]

    # ---- batches ---------------------------------------------------------------------------------------------------

    async def begin(self) -> bool:
        """End the round before, and begin the next one; False: all data is processed, or the run stops."""
        self.close()
        if await leaves_alone(self):
            return False
        where = await self.through(self.member.begin(0))
        self.worker.at_boundary()
        if where.epoch or self.stops or (self.is_last and not self.pending):
            await self.leave()
            return False
        self.member.cut(())  # the batches are counted here
        self.open = OpenRound(self.worker.params.copy(), dict(self.shared))
        self.is_over = self.is_last
        if self.is_over:
            self._assign(0)
        return True

    def batches(self, number: int) -> Iterator[Batch]:
        self._assign(number)
        return self._each(self.round.assigned[self.member.rank])

    def _assign(self, number: int) -> None:
        """Divide the next batches among the members of the round."""
        ranks = self.members
        left = self.plan.num_batches - self.next
        if number == 1:  # as servers do, whose rounds end with an epoch
            left = min(left, self.plan.batches_per_epoch - self.next % self.plan.batches_per_epoch)
        new = max(0, min(number * len(ranks) - len(self.lost), left))
        numbers = [*self.lost, *range(self.next, self.next + new)]
        self.lost, self.next = [], self.next + new
        each, more = divmod(len(numbers), len(ranks))
        first = 0
        for i, rank in enumerate(ranks):
            size = each + (i < more)
            self.round.assigned[rank] = numbers[first : first + size]
            first += size

    def _each(self, numbers: Sequence[int]) -> Iterator[Batch]:
        for number in numbers:
            if self.worker.client.stopping:
                return
            yield batch_at(self.plan, number)

    @property
    def _is_stopping(self) -> bool:
        return self.stops or self.worker.client.stopping

    def processed(self, gradient: Gradient, skip: str = "") -> None:
        """Note that this worker's optimizer has applied the gradient of a batch, or skipped it."""
        self.round.tried += 1
        self.round.samples += gradient.samples
        if skip == NOT_FINITE:
            self.round.not_finite += 1
        elif skip:
            self.round.left_out += 1
        else:
            self.round.loss_sum += gradient.loss * gradient.samples
        self.worker.client.stats.acked += 1

    # ---- means -----------------------------------------------------------------------------------------------------

    async def mean(
        self, weights: ModelVector | None = None, part: range | None = None, equally: bool = False
    ) -> ModelVector:
        """Return the mean over the members of the round; this worker's own weights if it was left out."""
        weights = self.worker.params.copy() if weights is None else weights
        first = not self.round.has_mean
        outcome, mean = await self._average(weights, 1.0 if equally else float(self.round.samples), part)
        self._take(outcome, weights, mean, first)
        if first and self.is_last:
            await self._publish_distance(outcome)
        return mean

    async def _publish_distance(self, last: Outcome) -> None:
        """Tell the others the distance from the last mean, which no later exchange of models can."""
        distance = self.distance if last.took_part else math.nan
        outcome = await self.through(self.member.mean_scalars([distance], float(last.took_part)))
        if outcome.took_part and outcome.scalars[0] >= 0:
            self.worker.client.stats.disagreement = math.sqrt(outcome.scalars[0])

    async def mix(self, row: Callable[[int, int], Sequence[float]]) -> ModelVector:
        """Return a weighted sum of the members' models; this worker's own if it was left out."""
        weights, first = self.worker.params.copy(), not self.round.has_mean
        self.round.is_mixed |= first

        def row_of(ranks: Sequence[int]) -> Sequence[float]:
            return row(ranks.index(self.member.rank), len(ranks))

        outcome, mixed = await self._average(weights, 1.0, row=row_of)
        self._take(outcome, weights, mixed, first)
        return mixed

    def _take(self, outcome: Outcome, weights: ModelVector, mean: ModelVector, first: bool) -> None:
        """Take what all members have published in the first exchange of this round."""
        if not outcome.took_part or not first:
            return
        self.round.has_mean = True
        # Numbers of one worker: all stop after the same round, and average as many vectors of their optimizers.
        self.stops, self.round.num_vectors = bool(outcome.numbers[0]), int(outcome.numbers[1])
        if outcome.weight:
            self.loss = outcome.scalars[LOSS]
        if outcome.scalars[DISTANCE] >= 0:
            self.worker.client.stats.disagreement = math.sqrt(outcome.scalars[DISTANCE])
        self.distance = (weights - mean).square() if weights.tensors else math.nan  # none are computed for time alone

    async def _average(
        self, weights: ModelVector, weight: float, part: range | None = None, row: Row = None
    ) -> tuple[Outcome, ModelVector]:
        copies = weights.copy().tensors
        number, first = len(copies), not self.round.has_mean
        if first and self.round.assigned.get(self.member.rank) and not self.round.tried and not self._is_stopping:
            raise ValueError("process the batches of a round before its first mean: they count with it.")
        tensors: list[Tensor | None] = [t if part is None or i in part else None for i, t in enumerate(copies)]
        tensors += self.buffers.changes() if first else [None] * len(self.buffers.common)
        optimizer = self.worker.local_optimizer
        vectors = 0 if optimizer is None else len(optimizer.state_vectors())
        numbers = (float(self.stops or self.worker.client.leases.run_stops), float(vectors))
        scalars = (self.round.loss, self.round.tried, self.round.not_finite, self.distance, self.round.left_out)
        readers = min(1, len(self.members) - 1) if row is None else sum(weight > 0 for weight in row(self.members)) - 1
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        stats, encoded = self.worker.client.stats, self.member.encoded
        stats.sent_bytes += readers * size
        before = 0 if encoded is None else encoded.stats.saved_bytes
        outcome: Outcome = await self.through(self.member.mean(tensors, weight, numbers, scalars, row))
        saved = 0 if encoded is None else encoded.stats.saved_bytes - before
        stats.sent_bytes -= readers * saved
        stats.saved_bytes += readers * saved
        if not outcome.took_part:
            return outcome, weights
        if first:
            self.buffers.add(tensors[number:])
        return outcome, ModelVector([own if t is None else t for own, t in zip(copies, tensors, strict=False)])

    async def mean_of_optimizers(self) -> None:
        """Average each vector of the optimizer's state over the members; step counts are equal already."""
        optimizer = self.worker.local_optimizer
        vectors = [] if optimizer is None else optimizer.state_vectors()
        parameters = [parameter.detach() for parameter in self.worker.flat.parameters]
        encoded = self.member.encoded
        if encoded is not None:
            encoded.plain = True
        for number in range(self.round.num_vectors):  # this worker has none yet if it has made no step
            values = vectors[number] if number < len(vectors) else [None] * len(parameters)
            own = [torch.zeros_like(p) if value is None else value for p, value in zip(parameters, values, strict=True)]
            _, mean = await self._average(ModelVector(own), float(self.round.samples))
            for value, tensor in zip(values, mean.tensors, strict=True):
                if value is not None:
                    value.copy_(tensor)
        if encoded is not None:
            encoded.plain = False

    # ---- accounting ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Count the batches of the round that has ended."""
        ended, self.open = self.open, None
        if ended is None:
            return
        before, headers = self.done, self.member.round.averaged if ended.has_mean else {}
        good = {rank for rank in up_to_date(headers) if headers[rank].kind == "mean"}
        self._inherit(good if ended.has_mean else {self.member.rank})
        for rank, numbers in ended.assigned.items():
            self._count(rank, numbers, headers[rank].scalars if rank in good else (), ended)
        for rank in self.pending.keys() - ended.assigned.keys():
            self.lost.extend(self.pending.pop(rank))
        if ended.has_mean:
            self.member.stepped()
        else:
            self.shared = ended.shared
            self.worker.params.replace(ended.start)
        size = self.plan.portion_batches
        if self.member.is_in and self.is_first and (self.done // size != before // size or self.is_last):
            self.tell()

    def _inherit(self, there: Collection[int]) -> None:
        """Count what a member had in its model when others received it, if it is lost and one of these is still there.

        Repeated, these batches would be in their models twice.
        """
        view = self.member.view
        if view.giver not in there and set(view.receivers) & set(there):
            self.done += len(self.pending.pop(view.giver, ()))

    def _count(self, rank: int, numbers: Sequence[int], published: Sequence[float], ended: OpenRound) -> None:
        """Count the batches that a member has published with its model; those of one that has not are lost."""
        if not published:
            keeps = rank == self.member.rank and not ended.has_mean  # it goes on with the model of its last round
            self.lost.extend(numbers if keeps else [*self.pending.pop(rank, ()), *numbers])
            return
        tried = int(published[DONE])
        done = [*self.pending.pop(rank, ()), *([] if ended.is_mixed else numbers[:tried])]
        if ended.is_mixed and tried:
            self.pending[rank] = list(numbers[:tried])
        self.done += len(done)
        self.lost.extend(numbers[tried:])
        if published[SKIPPED]:
            self.skipped[NOT_FINITE] += int(published[SKIPPED])
        if published[LEFT_OUT]:
            self.skipped[LEFT_OUT_BY_LOOP] += int(published[LEFT_OUT])

    @property
    def is_last(self) -> bool:
        """Return True if no batch is left to be given to a worker."""
        return self.next >= self.plan.num_batches and not self.lost

    @property
    def progress(self) -> float:
        """Return the fraction of the batches that are done."""
        return self.done / self.plan.num_batches

    def open_numbers(self) -> tuple[int, Sequence[int]]:
        others = [numbers for rank, numbers in self.pending.items() if rank != self.member.rank]
        return self.next, [*self.lost, *chain.from_iterable(others)]

    def first_open(self) -> int:
        return min([*self.lost, *chain.from_iterable(self.pending.values()), self.next, self.plan.num_batches - 1])


class ModelState(RoundState):
    """The state of workers that have a model each; a worker that joins receives that of one of them."""

    rounds: ModelRounds

    def collect(self) -> dict[str, Any]:
        rounds = self.rounds
        return {
            **super().collect(),
            "shared": {key: value.tensors for key, value in rounds.shared.items() if isinstance(value, ModelVector)},
            "numbers": {key: value for key, value in rounds.shared.items() if not isinstance(value, ModelVector)},
            "loss": rounds.loss,
            "next": rounds.next,
            "lost": list(rounds.lost),
            "pending": {str(rank): numbers for rank, numbers in rounds.pending.items()},
            "rank": rounds.member.rank,
        }

    def apply(self, state: Mapping[str, Any]) -> None:
        super().apply(state)
        rounds = self.rounds
        rounds.open, rounds.distance = None, 0.0
        rounds.shared = {key: ModelVector(tensors).copy() for key, tensors in state["shared"].items()} | state[
            "numbers"
        ]
        rounds.loss, rounds.next, rounds.lost = state["loss"], state["next"], list(state["lost"])
        rounds.pending = {int(rank): list(numbers) for rank, numbers in state["pending"].items()}

    def fingerprint(self) -> int:
        """Return a hash of what is equal on all workers; 0: there is nothing to compare."""
        digest = xxhash.xxh3_64()
        for key, value in sorted(self.rounds.shared.items()):
            tensors = value.tensors if isinstance(value, ModelVector) else [torch.tensor(value, dtype=torch.float64)]
            digest.update(key.encode())
            for tensor in tensors:
                digest.update(bytes_of(tensor))
        return (digest.intdigest() >> 1) if self.rounds.shared else 0
