"""Half precision (float16): 11 bits of precision, half the bytes.

Values whose largest is above 65,504 are divided by a power of two first, so none becomes infinite. Small ones keep
at least 2^-24 absolute precision. Receivers sum in float32.

Use for gradients and for parameters, at any bandwidth below that of memory. Avoid for values below 6e-8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rainband.codecs.codec import Codec, Memory, Properties
from rainband.codecs.packing import as_bytes, check_finite, check_length, numbers_in

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 65504.0


@dataclass(frozen=True)
class Fp16(Codec):
    """Cast to float16."""

    @property
    def properties(self) -> Properties:
        return Properties(linear=True, of_values=True)

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        halves = values.half()
        factor = 1.0
        if not bool(halves.sum(dtype=torch.float32).isfinite()) and not bool(halves.isfinite().all()):
            factor = 2.0 ** math.ceil(math.log2(float(values.abs().max()) / LARGEST))
            halves = (values / factor).half()
        return as_bytes(halves, torch.tensor([factor], dtype=torch.float32))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        values = numbers_in(body, torch.float16, 0, numel).float()
        factor = float(numbers_in(body, torch.float32, 2 * numel, 1))
        if not (math.isfinite(factor) and factor >= 1.0):
            raise ValueError(f"{factor} is no factor of float16 values")
        check_finite(values)
        if factor != 1.0:
            check_finite(values.mul_(factor))
        return values

    def num_bytes(self, numel: int) -> int:
        return 2 * numel + 4
