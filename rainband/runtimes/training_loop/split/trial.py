"""The first rounds of a loop: whether its loss is a sum over samples, and how fast one process would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rainband.rounds.exchange import Part

TRIAL_ROUNDS = 4  # in which one worker computes whole batches
SETTLING_ROUNDS, MEASURED_ROUNDS = 5, 30  # with parts, after these
SUM_FACTOR = 1.6, 2.4  # of the gradient of a batch with each sample twice; 1 for a mean
MAX_REST = 0.3  # of the squared gradient that is not explained by such a factor: dropout, noise
MIXED_FACTOR, MIXED_REST = (1.1, 1.6), 0.1  # of a sum over samples and something else: noise lowers the factor
ALONG, LEAST, ELEMENTS = 0.7, 1e-4, 16  # cosine and relative size of a penalty's gradient, and elements to tell it by
FASTER, SLOWER = 1.05, 0.95

SUM_FOUND = (
    "rainband: the loss is a sum over samples, not a mean (the gradient of a batch doubles if each sample is there "
    "twice), so the workers' gradients are added."
)
MIXED = (
    "a loss of this loop is a sum over samples plus something else, such as a mean or a penalty on the parameters (its "
    "gradient neither stays nor doubles if each sample is there twice). Every worker would count that once more. Use "
    "means over samples: reduction='mean', times the batch size if need be. To average the gradients of the workers as "
    "they are, call run.weight(len(x)) before each backward()."
)


class LoopTrial:
    """One worker's observations. They change neither random numbers nor buffers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.found_sum = 0.0  # 1: this worker has seen that the loss is a sum
        self.found_mixed = 0.0  # 1: it is a sum and something else, or some losses of the loop are sums
        self.kinds: list[str] = []  # of the losses of the first batch
        self.added: dict[int, Tensor] = {}  # gradients of one backward pass, by the ID of their parameter
        self.hooks: list[RemovableHandle] = []
        self.own: list[tuple[Tensor | None, Tensor | None]] | None = None  # doubled gradients, and what they added to
        self.began: tuple[float, float] | None = None  # the round before: the time, and the seconds waited until then
        self.whole_s: list[float] = []  # rounds in which this worker computed whole batches, without waiting
        self.shared_s: list[float] = []
        self.is_over = False

    # ---- the loss ----

    def watch(self, part: Part, parameters: Sequence[nn.Parameter]) -> None:
        """Keep what each backward pass of a doubled batch adds to the gradients."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.added.clear()
        if part.trial == "doubled":
            add: Callable[[int, Tensor], None] = self._add
            self.hooks = [
                p.register_hook(partial(add, id(p)))  # type: ignore[no-untyped-call]
                for p in parameters
                if p.requires_grad
            ]

    def _add(self, parameter: int, gradient: Tensor) -> None:
        before = self.added.get(parameter)
        self.added[parameter] = gradient.detach().clone() if before is None else before + gradient

    def before(self, part: Part | None, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the gradients of the doubled batch: the exchange replaces them by those of the whole batch."""
        self.own, added = None, dict(self.added)
        self.added.clear()
        if part is None or part.trial != "doubled":
            return
        self.own = []
        for p in parameters:
            own = added.get(id(p))
            self.own.append((own, None if own is None or p.grad is None else p.grad - own))

    def after(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compare with the gradients of the whole batch."""
        if self.own is None:
            return
        found = []
        for (own, base), p in zip(self.own, parameters, strict=True):
            if own is not None and base is not None and p.grad is not None and not p.is_complex():
                found.append((own.double(), (p.grad - base).double(), p.detach().double()))
        self.own = None
        self.kinds.append(kind_of(found))
        self.found_sum = float(self.kinds[0] == "sum")
        self.found_mixed = float("mixed" in self.kinds or {"sum", "mean"} <= set(self.kinds))

    # ---- the time ----

    def round_begins(self, last: Part | None, waited_s: float, num_workers: int) -> str:
        """Take the time of the round before; return a sentence when enough rounds were measured."""
        now, before = self.clock(), self.began
        self.began = now, waited_s
        if before is None or last is None or not last.total:
            return ""
        if last.trial == "whole":
            self.whole_s.append(now - before[0] - (waited_s - before[1]))
        elif last.trial is None:
            self.shared_s.append(now - before[0])
        if len(self.shared_s) < SETTLING_ROUNDS + MEASURED_ROUNDS:
            return ""
        self.is_over = True
        if len(self.whole_s) < TRIAL_ROUNDS:
            return ""  # another worker was the first one then
        ratio = median(self.whole_s[1:]) / median(self.shared_s[SETTLING_ROUNDS:])
        return speed_sentence(ratio, num_workers, last)


def kind_of(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> str:
    """Return what a loss is over its samples: a "sum", a "mean", or "mixed"; empty if that cannot be told.

    Of each parameter: the gradient with each sample twice, the gradient, and the values.
    """
    own = sum(float(torch.sum(a * a)) for a, _, _ in found)
    whole = sum(float(torch.sum(b * b)) for _, b, _ in found)
    both = sum(float(torch.sum(a * b)) for a, b, _ in found)
    if not 0.0 < whole < float("inf") or not 0.0 < own < float("inf"):
        return ""
    factor, rest = both / whole, 1.0 - both * both / (own * whole)
    if MIXED_FACTOR[0] < factor < MIXED_FACTOR[1] and rest < MIXED_REST:
        return "mixed"
    if rest >= MAX_REST:
        return ""
    if SUM_FACTOR[0] < factor < SUM_FACTOR[1]:
        # of the sum S and a penalty P, twice the gradient minus that of the doubled batch is 2 (S + P) - (2 S + P) = P
        return "mixed" if any(_is_penalty(2 * b - a, b, values) for a, b, values in found) else "sum"
    return "mean" if factor <= MIXED_FACTOR[0] else ""


def _is_penalty(gradient: Tensor, whole: Tensor, values: Tensor) -> bool:
    """Return True if this is the gradient of a penalty on the values: of their squares, or of their sizes."""
    size = float(gradient.norm())
    if gradient.numel() < ELEMENTS or size < LEAST * float(whole.norm()):
        return False
    directions = [one for one in (values, values.sign()) if bool(one.any())]
    return any(abs(float(torch.sum(gradient * one))) > ALONG * size * float(one.norm()) for one in directions)


def speed_sentence(ratio: float, num_workers: int, part: Part) -> str:
    """Return how much faster than one process the workers are, and what to do if they are not."""
    each = f" ({part.weight} samples each)" if part.weight * num_workers == part.total else ""
    share = f"rainband: {num_workers} workers share each batch of {part.total}{each}: the updates of one process"
    if ratio >= FASTER:
        return f"{share}, {ratio:.1f} times as fast."
    if ratio > SLOWER:
        return f"{share}, about as fast."
    return (
        f"{share}, but only {ratio:.2g} times as fast. Start the script with python, or use larger batches or fewer "
        "workers (about one for each core)."
    )
