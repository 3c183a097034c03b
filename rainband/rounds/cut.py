"""Cutting a round's samples into parts, one for each member."""

from __future__ import annotations

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
