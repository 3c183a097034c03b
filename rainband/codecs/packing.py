"""Numbers of a few bits in bytes, and rounding to them at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

TILE = 1 << 14  # random numbers of one message, which repeat: each value is still rounded without bias


def random_numbers(key: int, number: int) -> Tensor:
    """Return numbers from 0 up to 1, which depend on the key alone."""
    return torch.from_numpy(np.random.Generator(np.random.SFC64(key)).random(number, dtype=np.float32))


def round_at_random(scaled: Tensor, key: int, levels: int) -> Tensor:
    """Round values of -levels to levels, in place, up or down so that the mean over all keys is exact."""
    whole = len(scaled) // TILE * TILE
    dither = random_numbers(key, min(TILE, len(scaled)))
    if whole:
        scaled[:whole].view(-1, TILE).add_(dither)
    scaled[whole:].add_(dither[: len(scaled) - whole])
    return scaled.floor_().clamp_(-levels, levels)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Return whole numbers (uint8) of this many bits, several in a byte; the rest of the last byte is zero."""
    if bits == 8:
        return numbers
    each = 8 // bits
    if len(numbers) % each:
        numbers = torch.cat((numbers, numbers.new_zeros(each - len(numbers) % each)))
    rows = numbers.view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed.bitwise_or_(rows[:, place] << bits * place)
    return packed


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the whole numbers (uint8) that `pack` has packed."""
    if bits == 8:
        return packed[:numel]
    each = 8 // bits
    rows = torch.empty((len(packed), each), dtype=torch.uint8)
    for place in range(each):
        rows[:, place] = (packed >> bits * place) & (2**bits - 1)
    return rows.view(-1)[:numel]


def packed_bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)


def as_bytes(*tensors: Tensor) -> Tensor:
    """Return the bytes of tensors, one after the other."""
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def numbers_in(body: Tensor, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Return numbers that lie in a body at an offset that may not be a multiple of their size."""
    if not count:
        return torch.empty(0, dtype=dtype)
    part = body[start : start + count * dtype.itemsize]
    if (part.storage_offset() + part.data_ptr()) % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)


def check_length(body: Tensor, expected: int) -> None:
    if len(body) != expected:
        raise ValueError(f"{len(body)} bytes in place of {expected}")


def check_finite(values: Tensor, what: str = "values") -> None:
    if len(values) and not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise ValueError(f"{what} that are not finite")
