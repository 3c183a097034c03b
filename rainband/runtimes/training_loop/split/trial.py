"""The first rounds of a loop: whether its loss is a sum over samples, and how fast one process would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from rainband.rounds.exchange import Part

TRIAL_ROUNDS = 4  # in which one worker computes whole batches
SETTLING_ROUNDS, MEASURED_ROUNDS = 5, 30  # with parts, after these
SUM_FACTOR = 1.6, 2.4  # of the gradient of a batch with each sample twice; 1 for a mean
MAX_REST = 0.3  # of the squared gradient that is not explained by such a factor: dropout, noise
FASTER, SLOWER = 1.05, 0.95

SUM_FOUND = (
    "rainband: the loss is a sum over samples, not a mean (the gradient of a batch doubles if each sample is there "
    "twice), so the workers' gradients are added."
)


class LoopTrial:
    """One worker's observations. They change neither random numbers nor buffers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.found_sum = 0.0  # 1: this worker has seen that the loss is a sum
        self.own: list[Tensor | None] | None = None  # its gradients of the doubled batch
        self.began: tuple[float, float] | None = None  # the round before: the time, and the seconds waited until then
        self.whole_s: list[float] = []  # rounds in which this worker computed whole batches, without waiting
        self.shared_s: list[float] = []
        self.is_over = False

    # ---- the loss ----

    def before(self, part: Part | None, gradients: Sequence[Tensor | None], exchanges: int) -> None:
        """Keep the gradients of the doubled batch: the exchange replaces them by those of the whole batch."""
        self.own = None
        if part is not None and part.trial == "doubled" and not exchanges:
            self.own = [None if gradient is None else gradient.detach().clone() for gradient in gradients]

    def after(self, whole: Sequence[Tensor | None]) -> None:
        """Compare with the gradients of the whole batch."""
        if self.own is None:
            return
        pairs = [(a.double(), b.double()) for a, b in zip(self.own, whole, strict=True) if _comparable(a, b)]  # type: ignore[union-attr]
        self.own = None
        self.found_sum = float(is_doubled(pairs))

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


def _comparable(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and not a.is_complex()


def is_doubled(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return True if the first of each pair is about twice the second one."""
    own = sum(float(torch.sum(a * a)) for a, _ in pairs)
    whole = sum(float(torch.sum(b * b)) for _, b in pairs)
    both = sum(float(torch.sum(a * b)) for a, b in pairs)
    if not 0.0 < whole < float("inf") or not 0.0 < own < float("inf"):
        return False
    rest = 1.0 - both * both / (own * whole)
    return SUM_FACTOR[0] < both / whole < SUM_FACTOR[1] and rest < MAX_REST


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
