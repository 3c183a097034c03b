"""Averaging gradients over the workers at the end of each backward()."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rainband.rounds.exchange import Differences, Exchange, Part, RoundId
from rainband.runtimes.training_loop.split.loss_checks import LossChecks
from rainband.runtimes.training_loop.split.session import LoopSession
from rainband.runtimes.training_loop.split.state import LoopState
from rainband.runtimes.training_loop.split.step_checks import StepChecks
from rainband.runtimes.training_loop.split.tensors import BackwardHooks, GradientScaling, numbers_of, put_numbers
from rainband.runtimes.training_loop.split.trial import MIXED, SUM_FOUND, LoopTrial

DRIFTED = (
    "rainband: the parameters of a worker differed from those of the others, so it has received theirs. If the loop "
    "itself changes parameters, as when it initializes a layer again: random numbers differ between the workers."
)
BAD_BUFFER = "rainband: NaN or infinity in the buffer {name}, such as a running mean, was left out of its mean."
LEFT = (
    "rainband: a worker has left its loop over the batches, and others went on, so the result is not that of one "
    "process. A loss is that of a worker's part: to decide by it (`if loss < x: break`), use run.mean(loss)."
)
APART = (
    "run.mean(...) was not called by worker {ranks}, which is at another place of the loop: all workers must call it, "
    "also where one prints (`mean = run.mean(loss)`, then `if run.is_first: print(mean)`). To decide by a loss, as an "
    "early stop does, use run.mean(loss)."
)
NOT_JUDGED = (
    "rainband: a worker was lost in the first batches, so the loop's loss was not judged. If it is a sum over samples, "
    "and not a mean, stop the run and start it again: the gradients of the workers are averaged, not added."
)
OTHER_SAMPLES = (
    "this worker has other samples in a batch than the first one, so some would be used twice, and others never. Seed "
    "the random numbers of a sampler or a stream, as numpy.random.default_rng(0) does; draw those of run.part(...) "
    "with run.generator; and let no order depend on the losses of one worker."
)
UNEVEN = (
    "rainband: worker {ranks} made fewer backward() passes in a batch than others, so it has missed a gradient, and "
    "receives their state: the result is not that of one process. All workers must make the same passes: if a loss is "
    "not there, add 0 * output.sum() in its place."
)


class GradientExchange:
    """One worker's exchanges: of gradients and buffers after each backward(), of a closure's loss, of other numbers."""

    def __init__(
        self, exchange: Exchange, state: LoopState, num_workers: int, session: LoopSession | None = None
    ) -> None:
        self.exchange = exchange
        self.session = session
        self.state = state
        self.tensors = state.tensors
        self.num_workers = num_workers
        self.hooks = BackwardHooks(self._after_backward)
        self.trial = LoopTrial(time.perf_counter)
        self.steps = StepChecks(self)
        self.losses = LossChecks(self)
        self.scaling = GradientScaling()
        self.part: Part | None = None  # of the current round
        self.weight: float | None = None  # given by the loop, in place of the part's number of samples
        self.deferred = False  # gradients of earlier backward passes wait to be averaged
        self.last_weight = 0.0  # sum of the weights of the last mean of gradients
        self.exchanges = 0  # of gradients, in the current round
        self.last_samples = 0  # of this worker's last part: of what is computed after a pass
        self.accumulating = False
        self.uses_loaders = False  # the loop's batches come from `run`
        self.wants_stop: str | None = None
        self.told: set[str] = set()  # messages that were printed

    def attach(self) -> None:
        """Begin to average, when the loop begins."""
        self.losses.attach()
        self.hooks.watch(self.tensors.parameters)
        self.tensors.attach()
        self.steps.attach(self.state.optimizers)

    def detach(self) -> None:
        self.hooks.remove()
        self.tensors.detach()
        self.losses.remove()
        self.steps.remove()
        self.scaling.stop()

    # ---- rounds ----

    def end(self) -> None:
        """End this worker's part when the others have ended theirs: a worker that missed steps gets the state."""
        self.steps.settle()
        epoch = self.exchange.begin(self.losses.where.epoch + 1).epoch
        before = -1
        while self.exchange.batches != before:  # others begin another pass
            before = self.exchange.batches
            epoch = self.exchange.begin(epoch + 1).epoch
        self._tell_differences()
        self.exchange.leave()

    def ensure_round(self) -> None:
        """Begin a round outside the loop over batches, so that members are known and can exchange numbers."""
        if self.part is None:
            self.exchange.begin(self.losses.where.epoch)

    def begin_round(self, where: RoundId) -> None:
        """Prepare for the next batch."""
        self.steps.begin_round()
        self.losses.begin_round(where)
        self._tell_differences()
        if new := self.tensors.find_new():
            raise ValueError(
                f"{self.tensors.names[-len(new)]} was added to the model or an optimizer after rainband.join: add all "
                "parameters before it, with requires_grad_(False) those that are trained later."
            )
        self.hooks.watch(self.tensors.parameters)
        self.exchanges = 0
        self.weight = self.part = None

    def set_part(self, part: Part) -> None:
        self.part = part
        if not part.is_over:
            self.last_samples = part.weight
        self.trial.watch(part, self.tensors.parameters)
        if part.trial == "verdict" and not part.is_over:
            self._take_verdict()
        if self.deferred or self.state.is_sum:
            self._scale()

    def _take_verdict(self) -> None:
        """Learn from the first rounds whether the loss is a sum over samples."""
        scalars = (self.trial.found_sum, self.trial.found_mixed, float(bool(self.trial.kinds)))
        outcome = self.exchange.mean_scalars(scalars, 1.0)
        if outcome.scalars and not outcome.scalars[2] and self.losses.is_judged and self.exchange.is_first:
            self.tell(NOT_JUDGED)
        if outcome.scalars and outcome.scalars[1] > 0 and self.uses_loaders:
            raise ValueError(MIXED)
        self.state.is_sum = bool(outcome.scalars) and outcome.scalars[0] > 0 and self.uses_loaders
        if self.state.is_sum and self.exchange.is_first:
            self.tell(SUM_FOUND)

    def set_weight(self, weight: float) -> None:
        """Weight the gradients of this batch, in place of the part's number of samples."""
        self.weight = weight
        if self.deferred or self.accumulating or self.state.is_sum:
            self._scale()

    def begin_own_round(self) -> None:
        """Begin a round of a loop with its own loader, where each worker has the same weight."""
        if self.session is not None:
            self.session.leave_if_asked()
        where = self.exchange.begin(0)
        self.check_stop()
        if where.epoch:  # a joiner, in what comes before the passes over the data
            self.part = Part((), is_over=True)
            return
        self.state.end_catching_up()
        self.begin_round(where)
        self.set_part(self.exchange.cut(range(2 * len(self.exchange.members))))
        self.weight = 1.0

    # ---- backward ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.accumulating = True
        self._scale()
        try:
            yield
        finally:
            self.accumulating = False

    def _scale(self) -> None:
        """Scale the gradients of this batch, so that accumulated ones may be averaged with equal weights.

        A gradient counts with this worker's fraction of its batch, which may be another one in the next batch.
        """
        if self.weight is not None and self.uses_loaders:
            if self.state.is_sum:
                raise ValueError("run.weight(...) is for means, and this loss is a sum over samples: omit it.")
            raise ValueError("run.weight(...) and run.no_sync() cannot be combined: accumulate without run.no_sync().")
        if self.part is not None and self.part.batch_sizes and self.uses_loaders:
            raise ValueError(
                "this loop draws several batches before their backward passes, so each of these averages gradients: "
                "omit run.no_sync(), and use a loss that is a mean over samples, not a sum."
            )
        self.scaling.stop()
        if self.part is None or self.part.is_over or not self.uses_loaders:
            return
        members = len(self.exchange.members)
        if self.state.is_sum:
            factor = float(members) if self.part.weight else 0.0
        else:
            factor = self.part.weight * members / self.part.total
        self.scaling.start(self.tensors.parameters, factor, members)

    @torch.no_grad()
    def _after_backward(self, changed: set[int]) -> None:
        if self.part is None:
            self.begin_own_round()
        if self.part is not None and self.part.is_over and not self.uses_loaders:
            return
        self.losses.after_backward()
        if self.accumulating:
            self._defer(changed)
            return
        if self.session is not None:
            self.wants_stop = self.session.look() or self.wants_stop
        tensors = self.tensors.gradients()
        alone = len(self.exchange.members) == 1
        tensors += [None if alone else buffer.change() for buffer in self.tensors.buffers]
        stop = 0.0 if self.wants_stop is None else 1.0
        weight = self.weight_of_mean()
        self.trial.before(self.part if self.weight is None else None, self.tensors.parameters)
        numbers = numbers_of(self.state.optimizers)
        outcome = self.exchange.mean(tensors, weight, numbers, (stop,))
        differences = self._check_together()
        if differences.has_other_samples:
            raise ValueError(OTHER_SAMPLES)
        if differences.behind:
            self.tell(UNEVEN.format(ranks=", ".join(map(str, differences.behind))))
        self.exchanges += 1
        self.last_weight = outcome.weight
        if not outcome.took_part:  # this worker receives the state when one of the next rounds begins
            for parameter in self.tensors.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            return
        if self.session is not None and self.exchanges == 1 and self.part is not None:
            self.session.exchanged(self.part)
        if self.uses_loaders and self.exchanges == 1 and self.part is not None:
            self.steps.exchanged(self.part.total, tensors[: len(self.tensors.parameters)])
        changed |= self._put(tensors, alone)
        self._rescale_sum(outcome.weight)
        self.trial.after(self.tensors.parameters)
        self.steps.fresh |= changed
        self.deferred = False
        if not self.state.is_sum:
            self.scaling.stop()
        self.tensors.note_exchange()
        self._put_numbers(outcome.numbers, numbers)
        if outcome.scalars and outcome.scalars[0] > 0:
            self.state.stopped = self._why_stopped()

    def weight_of_mean(self) -> float | None:
        """Return the weight of the next exchange of gradients; None: the number of samples of this worker's part."""
        if self.deferred or self.state.is_sum:
            return 1.0  # the gradients are scaled
        if not self.uses_loaders or self.part is None:
            return self.weight
        if self.part.is_over:
            return self.last_samples * self.losses.counted.value
        if not self.part.weight:
            return 0.0  # another worker has this part, too
        return self.losses.weight(self.part)

    def _rescale_sum(self, given: float) -> None:
        """Add the gradients of a sum that have arrived, if some have not: they were scaled for a mean over all members.

        The samples of a lost part are added to a later batch. Gradients of earlier batches are as they should be.
        """
        if not self.state.is_sum or not given or self.scaling.members in (0, given):
            return
        for parameter in self.tensors.parameters:
            if parameter.grad is not None and id(parameter) not in self.steps.fresh:
                parameter.grad.mul_(given / self.scaling.members)

    def _put(self, tensors: list[Tensor | None], alone: bool) -> set[int]:
        """Put the mean where it was not computed in place; return the IDs of the parameters that had no gradient."""
        count, new = len(self.tensors.parameters), set()
        for parameter, mean in zip(self.tensors.parameters, tensors[:count], strict=True):
            if mean is not None and parameter.grad is None:
                parameter.grad = mean.to(parameter.device).view_as(parameter)
                new.add(id(parameter))
        for buffer, mean in zip(self.tensors.buffers, tensors[count:], strict=True):
            if alone:
                buffer.keep()
            else:
                buffer.put(mean)
            if buffer.has_bad:
                self.tell(BAD_BUFFER.format(name=buffer.name))
        return new

    def _defer(self, changed: set[int]) -> None:
        self.deferred = True
        self.tensors.unsynced |= changed
        self.exchange.defer()

    def _put_numbers(self, numbers: tuple[float, ...], own: tuple[float, ...]) -> None:
        """Take over the learning rates and other numbers of the worker that has served longest."""
        if not numbers or len(numbers) != len(own) or numbers == own:
            return
        names = put_numbers(self.state.optimizers, numbers)
        if names:
            self.tell(
                f"rainband: {names[0]} of an optimizer differs between workers; all use that of the one that has "
                "served longest. A scheduler must not depend on one worker's loss: use run.mean(loss). "
                "run.register(scheduler) gives its state to workers that join."
            )

    # ---- numbers ----

    def mean(self, value: float, weight: float | None) -> float:
        """Return the weighted mean of a number over the workers."""
        self.ensure_round()
        if weight is None:
            weight = 1.0 if self.part is None else self.weight
        outcome = self.exchange.mean_scalars((value,), weight)
        self._check_together()
        return outcome.scalars[0] if outcome.scalars and outcome.weight else value

    def stop(self, reason: str) -> None:
        """Ask all workers to end the run: they learn it with the next exchange."""
        self.wants_stop = reason

    def _why_stopped(self) -> str:
        if self.session is not None:
            return self.session.await_stop()
        return self.wants_stop or "another worker has stopped the run"

    def check_stop(self) -> None:
        """Leave the `with` block if the run ends early: raise what no loop catches by mistake; its end takes it."""
        if self.state.stopped is not None:
            raise KeyboardInterrupt(self.state.stopped)

    def _check_together(self) -> Differences:
        """Raise ValueError if some workers exchanged numbers, and others did something else."""
        differences = self.exchange.differences
        if differences.apart:
            raise ValueError(APART.format(ranks=", ".join(map(str, differences.apart))))
        return differences

    def _tell_differences(self) -> None:
        if self.exchange.drifted and self.exchange.is_first:
            self.tell(DRIFTED)
        if self.exchange.has_left and self.exchange.is_first:
            self.tell(LEFT)

    def tell(self, message: str) -> None:
        """Print a message once."""
        if message not in self.told:
            self.told.add(message)
            print(message, file=sys.stderr)


def weight_of_part(gradients: GradientExchange) -> float:
    """Return what the gradients of a worker's part count, before they are scaled: within the model."""
    part = gradients.part
    if part is None or gradients.state.is_sum:
        return 1.0
    weight = gradients.weight_of_mean() if part.weight else 0.0
    return float(part.weight) if weight is None else weight
