"""The passes over data that a loop has open: the first one makes the rounds, and others are read beside it.

A loop may read several loaders together (`zip(labelled, unlabelled)`, `next(other)`), and validate within a pass:

- A pass makes the **rounds** if no other open pass does: each of its batches is a round.
- A pass that is read meanwhile is **beside** it: its batches belong to the round that is open, and are cut in the
  proportions of the round's batch, so that the weights of the workers are right for both. If they cannot be cut so,
  every worker has the whole batch, which is right with any weights.
- A pass that is read without gradients, or in evaluation mode, is **whole**: every worker has whole batches, as in one
  process, and no round.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import torch

from rainband.errors import NOT_IN_BLOCK
from rainband.protocol.messages import Dataset as Description
from rainband.rounds.exchange import Exchange, Part, RoundId
from rainband.runtimes.training_loop.batches import fingerprint_of
from rainband.runtimes.training_loop.script_random import CommonRandom
from rainband.runtimes.training_loop.split.gradients import GradientExchange
from rainband.runtimes.training_loop.split.orders import BatchOrder, PassId, PassNumbers
from rainband.runtimes.training_loop.split.session import LoopSession
from rainband.runtimes.training_loop.split.state import LoopState

Indices = Sequence[int]
Kind = Literal["rounds", "beside", "whole"]

ABANDONED_AFTER = 1000  # exchanges in one round: the loop goes on without the pass that makes the rounds
FROM_A_THREAD = (
    "a loader of `run` was read in another thread than that of rainband.join, ahead of the training, so the workers "
    "cannot tell which batch a gradient belongs to: read it in the training loop. To load batches ahead, use "
    "DataLoader(..., num_workers=2), and pin_memory=True for copies to a GPU."
)


UNUSED = (
    "rainband: the loop has read all batches of a pass without a backward(), and each worker had its parts of them "
    "only. To evaluate, read the loader in torch.no_grad(), or after model.eval(): each worker has whole batches then."
)


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


class Pass:
    """A pass over the data, while a loop reads it."""

    def __init__(self, name: PassId, length: int, data: PassData | None, trains: bool) -> None:
        self.name = name
        self.length = length  # in rounds; 0: not known
        self.data = data
        self.trains = trains  # never for validation
        self.kind: Kind | None = None  # not read yet
        self.epoch = 0  # of the rounds that it makes
        self.first = 0  # number of its batch in round 0 of that epoch
        self.position = 0  # number of its next batch
        self.began = RoundId(0, 0)  # the round in which it was first read, if it is beside the one that makes it
        self.is_over = False
        self.backward_passes = 0  # of this worker before it
        self.random: Any = None  # numbers with which its order was drawn
        self.iterator: Callable[[], Any] = lambda: None  # what the loop holds, as long as it does


class OpenPasses:
    """All passes of one worker: chooses the next batch of each, and cuts it."""

    def __init__(
        self,
        exchange: Exchange,
        gradients: GradientExchange,
        state: LoopState,
        num_workers: int,
        session: LoopSession | None = None,
    ) -> None:
        self.exchange = exchange
        self.gradients = gradients
        self.state = state
        self.num_workers = num_workers
        self.session = session
        self.random = CommonRandom(alone=num_workers == 1)
        self.numbers = PassNumbers()
        self.open: dict[PassId, Pass] = {}  # read, and not over
        self.current: Pass | None = None  # makes the rounds, or did so last
        self.epochs = 0  # begun
        self.first_epoch = 0  # that a pass made
        self.num_epochs = 0  # of the run; 0: not known
        self.where = RoundId(0, 0)
        self.thread: int | None = None  # of the loop, in its `with` block
        self.misuse: ValueError | None = None  # raised in another thread, which the loop may not notice
        self.has_trained = self._is_training()  # the model was in training mode once
        self.described: tuple[Any, ...] | None = None  # the data that the coordinator knows
        self.own = _own_pass(0)
        self.received: dict[PassId, Pass] = {}  # open on the worker that has sent its state
        self.over: dict[int, int] = {}  # dataset -> passes that this worker had begun
        state.passes = self

    # ---- what loaders call ----

    def begin(self, dataset: Any, length: int, data: PassData | None = None, trains: bool = False) -> Pass:
        """Return the pass that begins."""
        return Pass(self.numbers.next(dataset), length, data, trains)

    def order(self, one: Pass, order: BatchOrder) -> Iterator[Any]:
        """Return the batches of a pass, in the order that the other workers have."""
        there = self.received.pop(one.name, None)
        now = self.random.state()
        if there is not None:  # others read it already
            one.first, one.position, one.random = there.first, there.position, there.random
            self.random.put(there.random, order.generator)
        elif one.name.number < self.over.get(one.name.dataset, 0):  # before this worker joined
            if one.length:
                deque(islice(order.begin(one.name), len(order)), maxlen=0)
            self.random.put(now)
            return iter(())
        else:
            one.random = self.random.state(order.generator)
            return order.begin(one.name)
        batches = order.begin(one.name)
        if not one.position:  # the worker that has sent its state was about to draw the first batch, too
            self.random.put(now)
            return batches
        first = list(islice(batches, 1))  # torch's samplers draw no random numbers after it
        self.random.put(now)
        return chain(first, batches)

    def draw(self, one: Pass) -> int | None:
        """Return the number of the next batch of a pass, None if it is over; a round may begin."""
        self._check_thread()
        if one.kind is None or (one.kind == "beside" and not self._is_open(self.current)):
            self._choose_kind(one)
        if one.kind == "rounds":
            batch = self.begin_round(one)
            return None if batch is None else one.first + batch
        if one.is_over:  # on the worker that has sent its state
            return None
        if one.kind == "whole" and one.position and self.is_catching_up:
            return None  # the first batch is enough for loops that divide by their number of batches
        if one.kind == "beside" and self.gradients.exchanges >= ABANDONED_AFTER:
            self._abandon()
            return self.draw(one)
        return one.position

    def draw_own(self) -> Pass:
        """Return the pass over batches that the loop draws itself, for the next of them."""
        while self.own.is_over or self.draw(self.own) is None:
            self.own = _own_pass(self.own.name.number + 1)
        return self.own

    def cut(self, one: Pass, batch: Indices | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        """Return this worker's part of the batch that was drawn, or of several batches of these lengths."""
        part = self._cut(one, batch, lengths, digest)
        if part.is_over:
            self._check_used(one)
            self.end(one)
        elif one.kind == "rounds":
            one.position = one.first + self.where.batch + 1
        else:
            one.position += 1
        return part

    def end(self, one: Pass) -> None:
        """Note that a pass is over, or that the loop has left it."""
        one.is_over = True
        self.open.pop(one.name, None)
        if one.kind == "beside" and one.began == self.where and self._is_open(self.current):
            self._abandon()  # a whole pass was read in one round: the loop goes on without the other one

    def drew(self, one: Pass, batch: Any) -> Any:
        """Return a batch, which the loop is about to get."""
        if one.kind == "rounds":
            self.gradients.losses.drew(batch)
        return batch

    def _cut(self, one: Pass, batch: Indices | None, lengths: Sequence[int], digest: int) -> Part:
        self.gradients.losses.has_whole_batch = one.kind == "whole" and torch.is_grad_enabled()
        if one.kind == "rounds":
            part = self.exchange.cut(batch, lengths, digest)
            self.gradients.set_part(part)
            return part
        if batch is None:
            return Part((), is_over=True)
        if one.kind == "whole":
            return Part(batch, 0, len(batch), len(batch), batch_sizes=tuple(lengths))
        samples: list[int] = []
        batch_sizes: list[int] = []
        for length in lengths or (len(batch),):
            own = self.exchange.cut_beside(batch[:length], self.state.is_sum)
            batch = batch[length:]
            samples += own
            batch_sizes.append(len(own))
        return Part(samples, 0, len(samples), len(samples), batch_sizes=tuple(batch_sizes))

    # ---- the state ----

    def collect(self) -> Any:
        """Return how far this worker has read each open pass."""
        known = chain(self.open.values(), self.received.values())  # the loop may not have come to those it received
        passes = [[*one.name, one.first, one.position, one.random] for one in known]
        begun = dict(enumerate(self.numbers.passes))
        begun = {dataset: max(self.over.get(dataset, 0), begun.get(dataset, 0)) for dataset in self.over | begun}
        return {"begun": list(begun.values()), "open": passes, "random": self.random.state()}

    def apply(self, state: Any) -> None:
        """Continue where the worker was that has collected this."""
        self.random.put(state["random"])
        self.over = dict(enumerate(state["begun"]))
        self.received = {}
        for dataset, number, first, position, numbers in state["open"]:
            one = self.open.get(PassId(dataset, number))
            if one is None:
                one = Pass(PassId(dataset, number), 0, None, trains=True)
                one.random = numbers
                self.received[one.name] = one
            one.first, one.position = first, max(position, one.position)
        there = {(dataset, number) for dataset, number, *_ in state["open"]}
        for name, one in list(self.open.items()):
            if name not in there and name.number < self.over.get(name.dataset, 0) and one.kind == "beside":
                self.end(one)

    # ---- kinds ----

    def _choose_kind(self, one: Pass) -> None:
        self.has_trained = self.has_trained or self._is_training()
        if one.kind is None and not one.trains and not self._trains_now():
            one.kind = "whole"
            return
        self.open[one.name] = one
        if self._is_open(self.current):
            one.kind, one.began = "beside", self.where
            return
        if one.kind == "beside":
            one.first = one.position
        if self.gradients.part is not None and not self.gradients.uses_loaders:  # the loop's own rounds were epoch 0
            self.epochs = self.first_epoch = 1
        one.kind, one.epoch, self.current = "rounds", self.epochs, one
        one.backward_passes = self.gradients.losses.passes
        self.epochs += 1
        self._describe(one)

    def _trains_now(self) -> bool:
        """Return whether batches that are read now are for training.

        A model may be trained in evaluation mode, too: then it never was in training mode.
        """
        return torch.is_grad_enabled() and (self._is_training() or not self.has_trained)

    def _is_training(self) -> bool:
        return any(module.training for module in self.state.tensors.model.modules())

    def _is_open(self, one: Pass | None) -> bool:
        return one is not None and not one.is_over

    def _abandon(self) -> None:
        """Let the next pass make the rounds: the loop goes on without the one that did."""
        assert self.current is not None
        self.current.kind, self.current = "beside", None

    def _check_thread(self) -> None:
        if self.thread is None:
            raise ValueError(NOT_IN_BLOCK)
        if threading.get_ident() != self.thread:
            self.misuse = ValueError(FROM_A_THREAD)
            raise self.misuse

    def _check_used(self, one: Pass) -> None:
        """Report a whole pass whose batches were not used for training."""
        unused = one.kind == "rounds" and one.backward_passes == self.gradients.losses.passes
        if unused and one.position > one.first and self.num_workers > 1 and self.exchange.is_first:
            self.gradients.tell(UNUSED)

    def _describe(self, one: Pass) -> None:
        self.gradients.uses_loaders = True
        if self.session is None:
            return
        self.session.counts_samples = True
        if one.data is not None and one.data.key != self.described:
            self.described = one.data.key
            self.session.describe(one.data.described(self.num_epochs, self.num_workers))

    # ---- rounds ----

    @property
    def is_catching_up(self) -> bool:
        """Return True while the loop of a worker that joins goes through what was over before."""
        return not self.state.begun and self.where != RoundId(0, 0)

    def begin_round(self, one: Pass) -> int | None:
        """Begin the next round, and return its number in the pass that makes it; None if the pass is over."""
        if self.session is not None:
            self.session.leave_if_asked()
        self.where = self.exchange.begin(one.epoch)
        if self.session is not None:
            if self.state.stopped is not None:
                self.session.snapshots.note_end()
            self.session.snapshots.at_boundary()
        self.gradients.check_stop()
        self._measure()
        self.gradients.begin_round(self.where)
        if self.where.epoch == one.epoch:
            self.state.end_catching_up()
            return self.where.batch
        for optimizer in self.state.optimizers:  # schedulers catch up with passes that were over before
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else they warn that no step came before
        self.end(one)
        return None

    def _measure(self) -> None:
        """After the first rounds, tell how much faster than one process this is."""
        gradients = self.gradients
        if self.session is None or gradients.trial.is_over:
            return
        sentence = gradients.trial.round_begins(gradients.part, self.session.stats.waited_s, self.num_workers)
        if sentence and self.exchange.is_first:
            print(sentence, file=sys.stderr)


def _own_pass(number: int) -> Pass:
    return Pass(PassId(-1, number), 0, None, trains=True)
