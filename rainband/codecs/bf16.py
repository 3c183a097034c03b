"""Brain floating point (bfloat16): 8 bits of precision with the range of float32, half the bytes.

Values are rounded to the nearest. Receivers sum in float32.

Use for gradients and for parameters, at any bandwidth below that of memory. Avoid for parameters whose updates are
smaller than 1/256 of them, if workers add up what they receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rainband.codecs.codec import Codec, Memory, Properties
from rainband.codecs.packing import check_finite, check_length, numbers_in

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = float(torch.finfo(torch.bfloat16).max)


@dataclass(frozen=True)
class Bf16(Codec):
    """Cast to bfloat16."""

    @property
    def properties(self) -> Properties:
        return Properties(linear=True, of_values=True)

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        cast = values.bfloat16()
        if not bool(cast.sum(dtype=torch.float32).isfinite()):
            cast = values.clamp(-LARGEST, LARGEST).bfloat16()  # the last of float32 would be rounded to infinity
        return cast.view(torch.uint8)

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        values = numbers_in(body, torch.bfloat16, 0, numel).float()
        check_finite(values)
        return values

    def num_bytes(self, numel: int) -> int:
        return 2 * numel
