"""Cutting a round's samples into parts, one for each member."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

MIN_SAMPLES = 2  # of a part: batch normalization needs two


@lru_cache(maxsize=64)  # most rounds are cut alike
def part_sizes(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Divide `total` samples in proportion to the shares, by largest remainders; a part has 0, or at least two samples.

    A member whose fraction is less than one sample gets none, and so do the last ones if there are too few samples.
    """
    sizes = [0] * len(shares)
    whole = sum(shares)
    if not total or not whole:
        return tuple(sizes)
    wanted = [total * share / whole for share in shares]
    active = [i for i, fraction in enumerate(wanted) if fraction >= 1.0] or [
        max(range(len(shares)), key=wanted.__getitem__)
    ]
    active = sorted(sorted(active, key=lambda i: -wanted[i])[: max(1, total // MIN_SAMPLES)])
    if len(active) == 1:
        sizes[active[0]] = total
        return tuple(sizes)
    rest = total - MIN_SAMPLES * len(active)
    above = [max(0.0, wanted[i] - MIN_SAMPLES) for i in active]
    scale = rest / (sum(above) or 1.0)
    exact = [fraction * scale for fraction in above]
    extra = [int(fraction) for fraction in exact]
    by_remainder = sorted(range(len(active)), key=lambda j: (extra[j] - exact[j], j))
    for j in by_remainder[: rest - sum(extra)]:
        extra[j] += 1
    for i, more in zip(active, extra, strict=True):
        sizes[i] = MIN_SAMPLES + more
    return tuple(sizes)


def digest_of(samples: Sequence[int], more: int = 0) -> int:
    """Return a number that differs if the samples, or their order, differ; 0 if there are none."""
    if not samples:
        return 0
    if isinstance(samples, range):
        return _digest_of_range(samples, more)
    try:
        return zlib.crc32(array("q", samples), more)
    except TypeError:  # a dataset whose samples have names
        return zlib.crc32(repr(list(samples)).encode(), more)


@lru_cache(maxsize=64)
def _digest_of_range(samples: range, more: int) -> int:
    return zlib.crc32(array("q", samples), more)


def cut_each(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Divide each of several batches among the members, in proportion, so that member j gets `sizes[j]` in all.

    The lengths have the sum of the sizes. The result has a row for each batch and a column for each member.
    """
    left, rows = list(sizes), []
    for length in lengths:
        rest = sum(left)
        exact = [length * size / rest if rest else 0.0 for size in left]
        row = [int(fraction) for fraction in exact]
        by_remainder = sorted(range(len(row)), key=lambda j: (row[j] - exact[j], j))
        for j in by_remainder[: length - sum(row)]:
            row[j] += 1
        left = [size - taken for size, taken in zip(left, row, strict=True)]
        rows.append(row)
    return rows


def by_member(samples: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the samples of several batches in the order of the members that get them, each those of all batches."""
    found: list[list[int]] = [[] for _ in rows[0]]
    at = 0
    for row in rows:
        for own, size in zip(found, row, strict=True):
            own += samples[at : at + size]
            at += size
    return [sample for own in found for sample in own]


def each_twice(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the samples of several batches, each batch twice; without lengths, they are one batch."""
    found: list[int] = []
    at = 0
    for length in lengths or [len(samples)]:
        found += 2 * list(samples[at : at + length])
        at += length
    return found


def cut_beside(samples: Sequence[int], sizes: Sequence[int], mine: int, is_sum: bool = False) -> Sequence[int]:
    """Return member `mine`'s part of another batch of a round, whose own batch is cut into parts of these sizes.

    The mean over the members, weighted by these sizes, must be that over both batches: so both are cut in the same
    proportions. If that is not possible, every member has all samples, which is right unless the loss is a sum.
    """
    total, length = sum(sizes), len(samples)
    if not sizes[mine]:
        return samples[:MIN_SAMPLES]  # of no weight
    parts = [length * size // total for size in sizes]
    whole = [part * total == length * size for part, size in zip(parts, sizes, strict=True)]
    if all(whole) and min(part for part, size in zip(parts, sizes, strict=True) if size) >= MIN_SAMPLES:
        first = sum(parts[:mine])
        return samples[first : first + parts[mine]]
    if is_sum and sum(size > 0 for size in sizes) > 1:
        raise ValueError(
            f"a batch of {length} samples that is read together with one of {total} cannot be cut in the same "
            f"proportions ({', '.join(map(str, sizes))}), as a loss that is a sum needs: use a loss that is a mean."
        )
    return samples
