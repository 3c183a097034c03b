"""TernGrad: each value becomes -s, 0 or s at random, so that its mean is exact (Wen et al. 2017).

    s = the largest absolute value of the block, after values beyond `clip` standard deviations are cut to them
    value -> s * sign(value) with probability |value| / s, else 0

16 times fewer bytes. Without clipping (clip=0) it is unbiased; the paper clips at 2.5, because a single large value
makes the rounding of all others coarse.

Use for gradients when nothing is to be kept. Avoid where sign is possible: that keeps more, in half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
class Ternary(Codec):
    """Two bits per value: minus, zero or plus one scale."""

    clip: float = 2.5  # cut values beyond this many standard deviations; 0: none, then it is unbiased

    def __post_init__(self) -> None:
        if not self.clip >= 0:
            raise ValueError(f"clip={self.clip}: must be at least 0, such as clip=2.5.")

    @property
    def properties(self) -> Properties:
        return Properties(unbiased=not self.clip, scope="block")

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        scale = float(values.abs().max()) if len(values) else 0.0
        if self.clip and len(values) > 1:
            scale = min(scale, self.clip * float(values.std(correction=0)) or scale)
        scaled = values / (scale or 1.0)
        levels = round_at_random(scaled.clamp_(-1.0, 1.0), key, 1).add_(1).to(torch.uint8)
        return as_bytes(torch.tensor([scale], dtype=torch.float32), pack(levels, 2))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        scale = numbers_in(body, torch.float32, 0, 1)
        check_finite(scale, "scales")
        levels = unpack(body[4:], 2, numel)
        if numel and int(levels.max()) > 2:
            raise ValueError("levels that this codec does not have")
        return levels.float().sub_(1.0).mul_(scale)

    def num_bytes(self, numel: int) -> int:
        return 4 + packed_bytes(numel, 2)
