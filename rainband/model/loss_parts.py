"""Find out how the loss of a batch is made of the losses of its parts, where Rainband splits the batches of a task.

A mean over samples is the mean of its parts, weighted by samples; so is one over tokens, if the task states the weight
of a part. A sum over samples is the sum of its parts. A few samples show which it is, before any batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rainband.model.seeds import all_random_states, random_numbers_from, restore_random_states, seed_global_generators
from rainband.model.unchanged import same_buffers, same_modes

if TYPE_CHECKING:
    from rainband.tasks.task import Data, Task

SAMPLES, PARTS = 16, 3  # of the trial; parts of unequal sizes
ELEMENTS = 4096  # of each parameter's gradient that are compared
TOLERANCE = 1e-3  # relative difference that rounding may make
NOISE = 3.0  # times the difference between two computations of the same samples

SUM_FOUND = (
    "the loss is a sum over samples, not a mean (that of {whole} samples is the sum of its parts' losses), so the "
    "gradients of a batch's parts are added: the updates are those of one process."
)
SUM_WITH_WEIGHT = (
    "the task states the weight of a part of a batch, which is for means, and its loss is a sum over samples: omit "
    "weight, or return a mean."
)
UNEQUAL = (
    "the loss of a batch is not the mean of its parts' losses, so the updates will differ from those of one process: "
    "for {whole} samples it is {loss:.6g}, and the mean over parts of {sizes} is {mean:.6g} (their gradients differ by "
    "{difference}). {remedy}"
)
REMEDY = (
    "If it is a mean over fewer things than samples, as with ignore_index, or with class weights, state the weight of "
    "a part: ModuleTask(..., weight=lambda batch: ...), such as the number of labels that are not ignored. If it adds "
    "a penalty to a sum over samples, divide the sum by their number. If it compares samples with each other, as "
    "contrastive losses do, let each worker compute whole batches: downpour, or one microbatch."
)
WRONG_WEIGHT = (
    "The task's weight of a part must be what its mean divides by, such as the number of labels that are not ignored, "
    "or the sum of their class weights."
)


class LossParts(NamedTuple):
    """The result of a trial of a task's loss."""

    is_sum: bool = False  # over the samples; False: a mean, or something else
    message: str = ""  # what the user should know


def states_weight(task: Task) -> Callable[[Any], Any] | None:
    """Return the task's own weight of a part of a batch, if it has one."""
    weight = getattr(task, "weight", None)
    return weight if callable(weight) else None


def weight_of(task: Task, batch: Any, samples: int) -> float:
    """Return the weight of a part of a batch: what its mean loss divides by."""
    own = states_weight(task)
    if own is None:
        return samples
    weight = float(own(batch))
    if not 0.0 <= weight < math.inf:
        raise ValueError(f"the task's weight of a part of a batch is {weight}: it must be a number of at least 0.")
    return weight


def try_parts(task: Task, model: nn.Module, data: Data, batch_size: int) -> LossParts:
    """Compare the loss of some samples with that of their parts; the model and all random numbers stay as they are.

    A loss that fails here, or has no gradient, is not judged: if it fails in the training, too, the error says why.
    """
    number = min(SAMPLES, batch_size, len(data))
    if number < 2:
        return LossParts()
    samples = np.linspace(0, len(data) - 1, number).astype(np.int64)
    parts = np.array_split(samples, min(PARTS, number))
    with _as_before(model):
        try:
            trial = _Trial(task, model, data)
            whole, again = trial.of(samples, 0), trial.of(samples[::-1], 1)
            found = [trial.of(part, 0) for part in parts]
        except Exception:
            return LossParts()
    return _judge(task, whole, again, found)


class _Result(NamedTuple):
    """The loss of some samples, and some elements of its gradient."""

    loss: Tensor
    gradient: Tensor
    weight: float
    samples: int


class _Trial:
    """Computes losses with the layers of torch in evaluation mode: no dropout, no statistics of a batch."""

    def __init__(self, task: Task, model: nn.Module, data: Data) -> None:
        self.task, self.model, self.data = task, model, data
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def of(self, samples: Sequence[int] | np.ndarray, seed: int) -> _Result:
        with random_numbers_from(seed, self.parameters):
            seed_global_generators(seed)
            batch = self.data.batch(samples)
            weight = weight_of(self.task, batch, len(samples))
            loss = self.task.loss(self.model, batch)
            if not loss.requires_grad:
                raise ValueError("this loss has no gradient")
            loss.backward()  # type: ignore[no-untyped-call]
        value, gradient = loss.detach().double().cpu(), self._gradient()
        if not weight:  # it has no mean, and does not count
            value, gradient = torch.zeros_like(value), torch.zeros_like(gradient)
        elif not value.isfinite():  # the gradient of a mean over nothing may be 0
            gradient.fill_(math.nan)
        return _Result(value, gradient, weight, len(samples))

    def _gradient(self) -> Tensor:
        """Return some elements of the gradient, and forget it."""
        found = []
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            count = min(ELEMENTS, parameter.numel())
            if gradient is None:
                found.append(torch.zeros(count, dtype=torch.float64))
                continue
            gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            flat = gradient.reshape(-1)
            found.append(flat[:: max(1, flat.numel() // ELEMENTS)][:count].double().cpu())
        return torch.cat(found)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, gradients and modes of a module, and the global random numbers, when left."""
    states = all_random_states()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with same_modes(model), same_buffers(model):
            for module in model.modules():
                of_torch = type(module).__module__.startswith("torch.nn.")
                if of_torch or isinstance(module, _BatchNorm):  # the user's own may need training mode for a loss
                    module.training = False
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_random_states(states)


def _judge(task: Task, whole: _Result, again: _Result, parts: Sequence[_Result]) -> LossParts:
    """Compare the gradients; if they are too random to tell, compare the losses."""
    total = sum(part.weight for part in parts)
    if sum(bool(part.gradient.any()) for part in parts) < 2:  # the mean of one part could be taken for a sum
        return LossParts()
    weights = [part.weight / total for part in parts]
    means, sums = [], []
    verdict = "unknown"
    for values in ([r.gradient for r in (whole, again, *parts)], [r.loss for r in (whole, again, *parts)]):
        of_whole, of_again, *of_parts = values
        mean = torch.stack([weight * value for weight, value in zip(weights, of_parts, strict=True)]).sum(0)
        added = torch.stack(list(of_parts)).sum(0)
        means.append(mean)
        sums.append(added)
        if verdict == "unknown":
            verdict = _verdict(of_whole, of_again, mean, added)
    if verdict == "sum":
        if states_weight(task) is not None:
            raise ValueError(SUM_WITH_WEIGHT)
        return LossParts(True, SUM_FOUND.format(whole=whole.samples))
    if verdict != "neither":
        return LossParts()
    difference = float(torch.linalg.vector_norm(whole.gradient - means[0]) / torch.linalg.vector_norm(whole.gradient))
    text = UNEQUAL.format(
        whole=whole.samples,
        loss=float(whole.loss),
        sizes=", ".join(str(part.samples) for part in parts),
        mean=float(means[1]),
        difference=f"{100 * difference:.2g} %" if math.isfinite(difference) else "NaN: a part alone has no loss",
        remedy=REMEDY if states_weight(task) is None else WRONG_WEIGHT,
    )
    return LossParts(False, text)


def _verdict(whole: Tensor, again: Tensor, mean: Tensor, added: Tensor) -> str:
    """Return mean, sum or neither; unknown: there is nothing to compare, or the values are random."""
    size = float(torch.linalg.vector_norm(whole))
    noise = float(torch.linalg.vector_norm(whole - again))
    if not 0.0 < size < math.inf or not math.isfinite(noise):
        return "unknown"
    allowed = max(TOLERANCE * size, NOISE * noise)

    def is_near(value: Tensor) -> bool:
        return float(torch.linalg.vector_norm(whole - value)) <= allowed  # False for NaN

    if is_near(mean):
        return "mean" if noise < 0.3 * size else "unknown"
    if is_near(added):
        return "sum"
    return "unknown" if noise > TOLERANCE * size else "neither"
