"""1-bit SGD: the sign of each value, and two scales per block (Seide et al. 2014).

    values >= 0  ->  their mean,   values < 0  ->  their mean

32 times fewer bytes. What is lost by this is added to the next message (`feedback`), without which training is worse.
The paper has two scales for each column of a matrix; here each block of at most 1 MB has two.

Use for gradients on slow networks: it is the fastest codec besides casts. Avoid without error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import BiasedCodec, Memory, Properties
from rainband.codecs.packing import as_bytes, check_finite, check_length, numbers_in, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

BITS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1))  # of each byte


@dataclass(frozen=True)
class Sign(BiasedCodec):
    """One bit per value, with two scales per block."""

    feedback: bool = True  # add what a message has left out to the next one

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        return Properties(keeps=self.kept, scope="block")

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        bits = np.packbits(values.numpy() >= 0)
        number = int(np.bitwise_count(bits).sum()) if hasattr(np, "bitwise_count") else int((values >= 0).sum())
        total, absolute = float(values.sum(dtype=torch.float32)), float(values.abs().sum(dtype=torch.float32))
        positive = (absolute + total) / 2 / max(1, number)
        negative = (total - absolute) / 2 / max(1, len(values) - number)
        scales = torch.tensor([negative, positive], dtype=torch.float32)
        return as_bytes(scales, torch.from_numpy(bits))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        scales = numbers_in(body, torch.float32, 0, 2)
        check_finite(scales, "scales")
        of_bytes = scales[BITS.long()]  # the eight values of each byte
        return of_bytes[body[8:].int()].view(-1)[:numel]

    def num_bytes(self, numel: int) -> int:
        return 8 + packed_bytes(numel, 1)
