"""Checks of the losses of a loop whose workers share each batch: what a mean counts, and of which batch it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rainband.rounds.exchange import Part, RoundId
from rainband.runtimes.training_loop.split.loss_graph import (
    CountedFraction,
    memory_used,
    stop_watching,
    watch_losses,
)
from rainband.runtimes.training_loop.split.parts import memory_of

if TYPE_CHECKING:
    from rainband.runtimes.training_loop.split.gradients import GradientExchange

PREFETCHED = (
    "this loop draws each batch before the backward() of the one before, as a prefetcher does, so the workers cannot "
    "tell which batch a gradient belongs to: draw a batch after the backward() of the one before. To load batches "
    "ahead, use DataLoader(..., num_workers=2). If several batches are drawn, and then used: "
    "run.loader(loader, batches_ahead=4)."
)
COUNTED_APART = (
    "rainband: the losses of this loop are means over different numbers of targets (cross_entropy with ignore_index or "
    "weight), so no weight of a worker is right for all of them: the result differs a little from that of one process. "
    "Use reduction='sum', divided by a number that is the same on all workers."
)
COUNTED_LATER = (
    "rainband: cross_entropy with ignore_index or weight is a mean over what counts, which run.no_sync() cannot "
    "average: the result differs a little from that of one process. Accumulate without run.no_sync()."
)
EVALUATES = (
    "rainband: the model is in evaluation mode, so every worker trains on whole batches, as if they were for "
    "validation: the result is that of one process, and no faster. Call model.train() before reading training data."
)
HOOKED = (
    "rainband: a hook on {name} (register_hook, or one that steps an optimizer in backward()) gets the gradient of a "
    "worker's part of the batch. That is right if it scales or masks it. To clip, change p.grad after backward()."
)


class LossChecks:
    """Reads the graph of each loss before its backward pass, and knows which batch the loop has drawn."""

    def __init__(self, gradients: GradientExchange) -> None:
        self.gradients = gradients
        self.counted = CountedFraction()
        self.where = RoundId(0, 0)
        self.last_round: RoundId | None = None  # that this worker has begun
        self.passes = 0  # backward passes of this worker
        self.before_round = 0  # of these, before the current round
        self.first_unused = False  # the first batch of this pass had none before the next one was drawn
        self.drawn: tuple[set[int], set[int]] = set(), set()  # addresses of the first two batches of a pass
        self.is_judged = True  # the first batches can tell whether the loss is a sum
        self.has_whole_batch = False  # the loop has drawn one that is not divided: its model is evaluated

    def attach(self) -> None:
        if self.gradients.num_workers > 1:
            watch_losses(self._look)
            if self.gradients.exchange.is_first and (name := self.gradients.tensors.hooked()):
                self.gradients.tell(HOOKED.format(name=name))

    def remove(self) -> None:
        stop_watching()

    def begin_round(self, where: RoundId) -> None:
        if where.batch < 2:
            follows = where.batch == 1 and self.last_round == RoundId(where.epoch, 0)
            self.first_unused = follows and self.before_round == self.passes and self.gradients.num_workers > 1
        self.where = self.last_round = where
        self.before_round = self.passes

    def drew(self, batch: Any) -> None:
        """Note where the first batches of a pass are in memory."""
        if self.gradients.num_workers > 1 and self.where.batch < 2:
            self.drawn = self.drawn[1], memory_of(batch)

    def _look(self, losses: Sequence[Tensor]) -> None:
        """Read the graph of a loss before its backward pass."""
        self.counted.look(losses)
        if self.first_unused and self.where.batch == 1:
            used = memory_used(losses)
            if used & self.drawn[0] and not used & self.drawn[1]:
                raise ValueError(PREFETCHED)

    def after_backward(self) -> None:
        """Refuse gradients of a batch whose round is over, and report means that cannot be weighted."""
        self.passes += 1
        self.is_judged = self.is_judged and not self.gradients.accumulating and self.gradients.weight is None
        gradients = self.gradients
        if self.first_unused and gradients.part is not None and gradients.part.is_over:
            raise ValueError(PREFETCHED)
        self.report_evaluation()
        if gradients.weight is not None or not gradients.uses_loaders:
            return
        if self.counted.value != 1.0 and (gradients.accumulating or gradients.deferred):
            gradients.tell(COUNTED_LATER)
        if self.counted.differs:
            gradients.tell(COUNTED_APART)

    def report_evaluation(self) -> bool:
        """Report if the model is trained in evaluation mode: then batches are not divided."""
        gradients = self.gradients
        if not self.has_whole_batch or any(module.training for module in gradients.tensors.model.modules()):
            return False
        if gradients.num_workers > 1 and gradients.exchange.is_first:
            gradients.tell(EVALUATES)
        return True

    def mean(self, loss: float) -> float:
        """Return the loss of the batch, of which this is that of this worker's part."""
        part = self.gradients.part
        return self.gradients.mean(
            loss, self.weight(part) if part is not None and self.gradients.uses_loaders else None
        )

    def weight(self, part: Part) -> float | None:
        """Return the weight of this worker's loss, unless it is the number of samples of its part."""
        given = self.gradients.weight
        if given is not None or not (part.batch_sizes or self.counted.value != 1.0):
            return given
        if part.is_over:
            return self.gradients.last_samples * self.counted.value
        sizes = part.batch_sizes or (part.weight,)
        of_pass = min(self.gradients.exchanges, len(sizes) - 1)  # the batch of this backward pass
        return sizes[of_pass] * self.counted.value
