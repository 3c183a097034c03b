"""The weighted mean of tensors, with the same bits on every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Floats = Sequence[float]
# From ranks to the weights that a member gives to them; None: those that the ranks have given.
Row = Callable[[Sequence[int]], Floats] | None


class Contribution(NamedTuple):
    """One member's tensors and their weight."""

    rank: int
    weight: float
    present: int  # bit mask of the tensors that have a value
    tensors: Sequence[Tensor]


Average = Callable[[list[Tensor | None], int, Sequence[Contribution]], float]  # does what `average` does


def given_by(
    ranks: Sequence[int], weights: Floats, masks: Sequence[bytes], areas: Sequence[Sequence[Tensor]]
) -> list[Contribution]:
    """Return the contributions of these ranks."""
    rows = zip(ranks, weights, masks, areas, strict=True)
    return [Contribution(rank, weight, int.from_bytes(mask, "little"), area) for rank, weight, mask, area in rows]


def mask_of(tensors: Sequence[Tensor | None]) -> int:
    """Return the bit mask of the tensors that are not None."""
    mask = 0
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            mask |= 1 << i
    return mask


def finite(change: Tensor) -> Tensor:
    """Return a change of a buffer with 0 for NaN and infinity: one bad sample would spoil the statistics of all."""
    return change.nan_to_num(0.0, 0.0, 0.0)


@torch.no_grad()
def average(out: list[Tensor | None], mine: int, given: Sequence[Contribution]) -> float:
    """Replace `out` by sum of n_j t_j / sum of n_j over `given`, which is in the order of ranks; return sum of n_j.

    `out` has the values of rank `mine`. Nothing changes if there is no weight, or only its own. The operations do not
    depend on `mine`, so all members get the same bits; whole-number gradients and weights give exact sums.
    """
    if any(tensor is not None and is_elsewhere(tensor) for tensor in out):
        return _average_here(out, mine, given)
    return _average(out, mine, given)


def _average(out: list[Tensor | None], mine: int, given: Sequence[Contribution]) -> float:
    given = [one for one in given if one.weight]
    total = sum(one.weight for one in given)
    if not given or (len(given) == 1 and given[0].rank == mine):
        return total
    masks = {one.present for one in given}
    if (
        len(given) == 2
        and len(masks) == 1
        and masks != {0}
        and given[0].weight == given[1].weight
        and mask_of(out) in masks
    ):
        theirs = [one for one in given if one.rank != mine]
        if len(theirs) == 1:  # addition of two is commutative, so the own area need not be read
            (one,) = theirs
            values = [tensor for tensor in out if tensor is not None]
            others = [tensor for i, tensor in enumerate(one.tensors) if one.present >> i & 1]
            torch._foreach_add_(values, others)
            torch._foreach_mul_(values, 0.5)
            return total
    alike = len({one.weight for one in given}) == 1
    for i in range(len(out)):
        _average_one(out, i, [one for one in given if one.present >> i & 1], len(given) if alike else total, alike)
    return total


def is_elsewhere(tensor: Tensor) -> bool:
    """Return True for a tensor on an accelerator: what the members share is in the memory of the machine."""
    return not tensor.is_cpu


def _average_here(out: list[Tensor | None], mine: int, given: Sequence[Contribution]) -> float:
    """Average copies in the memory of the machine, and copy the result back."""
    copies = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in out]
    total = _average(copies, mine, given)
    for i, copied in enumerate(copies):
        original = out[i]
        if original is None or copied is None:
            out[i] = copied  # the caller puts a new one where it belongs
        else:
            original.copy_(copied)
    return total


def _average_one(out: list[Tensor | None], i: int, given: list[Contribution], total: float, alike: bool) -> None:
    if not given:
        return  # absent everywhere, except on members that do not count
    value = out[i]
    if value is None:
        value = out[i] = torch.empty_like(given[0].tensors[i])
    if alike and total == 1:  # one member's value
        value.copy_(given[0].tensors[i])
        return
    if value.dtype.itemsize < 4:  # half precision could overflow
        fractions = [(1.0 if alike else one.weight) / total for one in given]
        torch.mul(given[0].tensors[i], fractions[0], out=value)
        for one, fraction in zip(given[1:], fractions[1:], strict=True):
            value.add_(one.tensors[i], alpha=fraction)
        return
    if alike:
        value.copy_(given[0].tensors[i])
    else:
        torch.mul(given[0].tensors[i], given[0].weight, out=value)
    for one in given[1:]:
        value.add_(one.tensors[i], alpha=1.0 if alike else one.weight)
    value.div_(total)
