"""1-bit SGD: the sign of each value, and two scales for each parameter (Seide et al. 2014).

    values >= 0  ->  their mean,   values < 0  ->  their mean

32 times fewer bytes. What is lost by this is added to the next message (`feedback`), without which training is worse.
The paper has two scales for each column of a matrix; here each parameter has two, in each block of at most 1 MB.

Use for gradients on slow networks: it is the fastest codec besides casts. Avoid without error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import BiasedCodec, Memory, Piece, Properties
from rainband.codecs.packing import as_bytes, check_finite, check_length, numbers_in, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 64  # values that have scales of their own


@dataclass(frozen=True)
class Sign(BiasedCodec):
    """One bit per value, with two scales per parameter."""

    feedback: bool = True  # add what a message has left out to the next one

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        return Properties(keeps=self.kept, scope="matrix")

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        ends = _ends(memory.pieces, len(values))
        scales, start = [], 0
        for end in ends:
            part, start = values[start:end], end
            number = int((part >= 0).sum())
            total, absolute = float(part.sum()), float(part.abs().sum())
            scales += [(total - absolute) / 2 / max(1, len(part) - number), (absolute + total) / 2 / max(1, number)]
        head = torch.from_numpy(np.array([len(ends), *ends], "<u4").view(np.uint8))
        bits = torch.from_numpy(np.packbits(values.numpy() >= 0))
        return as_bytes(head, torch.tensor(scales, dtype=torch.float32), bits)

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        ends = _ends_in(body, numel)
        first = 4 + 4 * len(ends)
        check_length(body, first + 8 * len(ends) + packed_bytes(numel, 1))
        scales = numbers_in(body, torch.float32, first, 2 * len(ends))
        check_finite(scales, "scales")
        values = torch.from_numpy(np.unpackbits(body.numpy()[first + 8 * len(ends) :], count=numel)).float()
        start = 0
        for (negative, positive), end in zip(scales.view(-1, 2).tolist(), ends, strict=True):
            values[start:end].mul_(positive - negative).add_(negative)
            start = end
        check_finite(values)
        return values

    def num_bytes(self, numel: int) -> int:
        return 16 + packed_bytes(numel, 1)


def _ends(pieces: Sequence[Piece], numel: int) -> list[int]:
    """Return where the values end that have the same scales: those of one parameter, or of several small ones."""
    ends: list[int] = []
    for piece in pieces[1:]:
        if piece.start - (ends[-1] if ends else 0) >= SMALLEST and numel - piece.start >= SMALLEST:
            ends.append(piece.start)
    return [*ends, numel]


def _ends_in(body: Tensor, numel: int) -> list[int]:
    data = body.numpy()
    number = int(data[:4].copy().view("<u4")[0]) if len(data) >= 4 else 0
    if not 0 < number <= max(1, numel) or len(data) < 4 + 4 * number:
        raise ValueError(f"{len(data)} bytes are too few")
    ends: list[int] = data[4 : 4 + 4 * number].copy().view("<u4").tolist()
    if ends[-1] != numel or any(end >= following for end, following in pairwise(ends)):
        raise ValueError("parameters that are not in the vector")
    return ends
