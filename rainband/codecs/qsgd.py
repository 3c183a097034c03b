"""QSGD: each value is rounded at random to one of a few levels (Alistarh et al. 2017).

    scale = the largest absolute value of a bucket of 512
    level = value / scale * s, rounded up or down at random so that its mean is exact;  s = 1, 7, 127 for 2, 4, 8 bits

The mean over all messages is exact (unbiased), and each value is wrong by at most scale / s. As in the paper's own
experiments, buckets are scaled by their maximum. Levels are packed as they are; the paper's Elias code is not used.

Use for gradients when an unbiased codec is wanted that keeps nothing. Avoid on fast networks: encoding costs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rainband.codecs.codec import Codec, Memory, Properties
from rainband.codecs.packing import (
    as_bytes,
    check_finite,
    check_length,
    numbers_in,
    pack,
    packed_bytes,
    round_at_random,
    unpack,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Qsgd(Codec):
    """A few bits per value, rounded at random."""

    bits: Literal[2, 4, 8] = 4  # of each value: 1, 7 or 127 levels above zero
    bucket: int = 512  # values with one scale

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits}: choose from 2, 4, 8.")
        if not 1 <= self.bucket <= 1 << 20:
            raise ValueError(f"bucket={self.bucket}: must be from 1 to {1 << 20}, such as bucket=512.")

    @property
    def properties(self) -> Properties:
        return Properties(unbiased=True, of_values=self.bits == 8, scope="bucket")

    @property
    def levels(self) -> int:
        return (1 << self.bits - 1) - 1

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        if not len(values):
            return torch.empty(0, dtype=torch.uint8)
        whole = len(values) // self.bucket * self.bucket
        head, rest = values[:whole].view(-1, self.bucket), values[whole:]
        scales = [head.abs().amax(1)] if whole else []
        if len(rest):
            scales.append(rest.abs().amax(0, keepdim=True))
        scale = torch.cat(scales)
        factor = self.levels / torch.where(scale > 0, scale, 1.0)
        factor = torch.where(factor.isfinite(), factor, 0.0)  # a bucket of the smallest numbers becomes zero
        scaled = torch.empty(len(values))
        torch.mul(head, factor[: len(head), None], out=scaled[:whole].view_as(head))
        torch.mul(rest, factor[-1], out=scaled[whole:])
        levels = round_at_random(scaled, key, self.levels).add_(self.levels).to(torch.uint8)
        return as_bytes(scale, pack(levels, self.bits))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        buckets = -(-numel // self.bucket)
        scale = numbers_in(body, torch.float32, 0, buckets)
        check_finite(scale, "scales")
        levels = unpack(body[4 * buckets :], self.bits, numel)
        if numel and int(levels.max()) > 2 * self.levels:
            raise ValueError("levels that this codec does not have")
        values = levels.float().sub_(self.levels)
        whole, factor = numel // self.bucket * self.bucket, scale / self.levels
        values[:whole].view(-1, self.bucket).mul_(factor[: whole // self.bucket, None])
        if whole < numel:
            values[whole:].mul_(factor[-1])
        return values

    def num_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.bucket) + packed_bytes(numel, self.bits)
