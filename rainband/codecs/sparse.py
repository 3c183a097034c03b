"""A few entries of a vector: their places and values, as bytes.

4 bytes                       number of entries
4 for each 65,536 values      entries among these
4 for each entry              its value, float32
2 for each entry              its place among these 65,536, in order
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.packing import check_finite, check_length

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 16
EXACT_BELOW = 1 << 13  # values among which the largest are found exactly: a sample of fewer would be too coarse
SAMPLES = 4096


def encode_entries(values: Tensor, places: Tensor) -> Tensor:
    """Return the bytes of the entries at these places, which are in order."""
    where, entries = places.numpy(), values[places].numpy()
    bounds = np.searchsorted(where, np.arange(0, len(values) + CHUNK, CHUNK))
    counts = np.diff(bounds).astype("<u4")
    parts = (np.array([len(where)], "<u4"), counts, entries.astype("<f4"), (where % CHUNK).astype("<u2"))
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def decode_entries(body: Tensor, numel: int) -> Tensor:
    """Return a vector that has these entries, and zeros elsewhere."""
    chunks = -(-numel // CHUNK)
    if len(body) < 4 + 4 * chunks:
        raise ValueError(f"{len(body)} bytes are too few")
    data = body.numpy()
    number = int(data[:4].copy().view("<u4")[0])
    if number > numel:
        raise ValueError(f"{number} entries of {numel} values")
    check_length(body, entries_bytes(numel, number))
    first = 4 + 4 * chunks
    counts = data[4:first].copy().view("<u4").astype(np.int64)
    if int(counts.sum()) != number:
        raise ValueError("entries that are counted twice, or not at all")
    entries = torch.from_numpy(data[first : first + 4 * number].copy().view("<f4"))
    check_finite(entries)
    places = data[first + 4 * number :].copy().view("<u2").astype(np.int64)
    places += np.repeat(np.arange(chunks, dtype=np.int64) * CHUNK, counts)
    if number and (places[-1] >= numel or not bool((places[1:] > places[:-1]).all())):
        raise ValueError("places that are not in order, or not in the vector")
    values = torch.zeros(numel)
    values[torch.from_numpy(places)] = entries
    return values


def entries_bytes(numel: int, number: int) -> int:
    return 4 + 4 * -(-numel // CHUNK) + 6 * number


def largest(values: Tensor, number: int, key: int) -> Tensor:
    """Return the places of about `number` values with the largest magnitude, in order.

    In long vectors a sample gives the threshold (Lin et al. 2018), which finds about that many much sooner.
    """
    size = values.abs()
    if len(values) >= EXACT_BELOW and number < len(values) // 4:
        step = max(1, len(values) // max(SAMPLES, 16 * len(values) // number))
        sample = size[key % step :: step]
        rank = max(1, round(len(sample) * number / len(values)))
        threshold = torch.topk(sample, rank, sorted=False).values.min()
        places = torch.from_numpy(np.flatnonzero((size >= threshold).numpy()))
        if number <= len(places) <= 1.3 * number or 0.8 * number <= len(places) <= number:
            return places
        if number < len(places) <= 4 * number:  # find the largest among these
            return places[torch.topk(size[places], number, sorted=False).indices].sort().values
    return torch.topk(size, min(number, len(values)), sorted=False).indices.sort().values
