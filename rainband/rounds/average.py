"""The weighted mean of tensors, with the same bits on every member."""

from __future__ import annotations

import math
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
    divisor: float = 0.0  # they were multiplied by weight / divisor; 0: they are as they were


Average = Callable[[list[Tensor | None], int, Sequence[Contribution]], float]  # does what `average` does


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


def divisor_for(weight: float, total: float, number: int, tensors: Sequence[Tensor | None]) -> float:
    """Return by what a contribution is divided that is multiplied by its weight; 0 if it is sent as it is.

    The others need only to add it then. It is about the sum of the `number` weights, and such that whole numbers stay
    exact: products with a power of two if the weights are alike, or with a weight divided by a power of two.
    """
    if not 0 < weight < total < math.inf:
        return 0.0
    for tensor in tensors:
        if tensor is not None and (tensor.itemsize < 4 or not tensor.is_cpu):
            return 0.0
    alike = weight * number == total
    return weight * _power_of_two(number) if alike else _power_of_two(total)


def _power_of_two(limit: float) -> float:
    """Return the largest one up to a limit."""
    return math.ldexp(0.5, math.frexp(limit)[1])


def write(area: Sequence[Tensor], tensors: Sequence[Tensor | None], factor: float) -> None:
    """Write tensors into an area, multiplied."""
    with torch.no_grad():
        if factor == 1.0:
            pairs = [(into, tensor) for into, tensor in zip(area, tensors, strict=True) if tensor is not None]
            if pairs:
                torch._foreach_copy_([into for into, _ in pairs], [tensor for _, tensor in pairs])
            return
        by = torch.tensor(factor, dtype=torch.float64)  # sooner than a number, of which each call makes a tensor
        for into, tensor in zip(area, tensors, strict=True):
            if tensor is not None:
                torch.mul(tensor, by, out=into)


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
    if not given or (len(given) == 1 and given[0].rank == mine and _is_exact(given[0])):
        return total
    divisor = given[0].divisor
    if divisor and all(one.divisor == divisor for one in given):
        _add(out, mine, given, total / divisor)
        return total
    given = [one._replace(weight=one.divisor or one.weight) for one in given]
    alike = len({one.weight for one in given}) == 1 and total == given[0].weight * len(given)
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


def _add(out: list[Tensor | None], mine: int, given: Sequence[Contribution], total: float) -> None:
    """Replace `out` by the sum of contributions that were multiplied, divided by `total`."""
    if len(given) == 2 and total == 1.0 and given[0].present == given[1].present == mask_of(out):
        own, other = given if given[0].rank == mine else given[::-1]
        if own.rank == mine and _is_exact(own):  # addition of two is commutative: the own area need not be read
            factor = own.weight / own.divisor
            for value, theirs in zip(out, other.tensors, strict=True):
                if value is not None:
                    torch.add(theirs, value, alpha=factor, out=value)
            return
    for i, value in enumerate(out):
        areas = [one.tensors[i] for one in given if one.present >> i & 1]
        if not areas:
            continue  # absent everywhere, except on members that do not count
        if value is None:
            value = out[i] = torch.empty_like(areas[0])
        if len(areas) == 1:
            value.copy_(areas[0])
        else:
            torch.add(areas[0], areas[1], out=value)
        for area in areas[2:]:
            value.add_(area)
        if total != 1.0:
            value.div_(total)


def _is_exact(one: Contribution) -> bool:
    """Return True if no bit was lost when a contribution was multiplied."""
    return not one.divisor or math.frexp(one.weight / one.divisor)[0] == 0.5


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
