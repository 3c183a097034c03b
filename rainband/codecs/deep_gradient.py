r"""Deep gradient compression: top-k of accumulated momentum (Lin et al. 2018).

    u  = momentum * u + g            momentum correction: each worker has the momentum, the server has none
    v += u
    sent: the largest `fraction` of v;  there, u and v become zero (momentum factor masking)

The first messages send more: 25 %, 6.25 %, 1.6 %, 0.4 %, each for `warmup` messages, as the paper does for epochs.
With `clip`, a gradient whose norm is above it is scaled down first; the paper clips at the usual bound divided by the
square root of the number of workers, which is to be typed here.

Use for gradients on very slow networks, with an optimizer without momentum on the servers (sgd). Avoid with Adam, or
with momentum on the servers: it would count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import Codec, Memory, Piece, Properties, Sender, fraction_error
from rainband.codecs.sparse import decode_entries, encode_entries, entries_bytes, largest

if TYPE_CHECKING:
    from torch import Tensor


WARM_UP = (0.25, 0.0625, 0.015625, 0.004)  # fractions of the first messages


@dataclass(frozen=True)
class DeepGradientCompression(Codec):
    """The largest values of accumulated momentum."""

    fraction: float = 0.001  # of the values of a block
    momentum: float = 0.9  # of each sender
    warmup: int = 100  # messages of each of the four larger fractions at the start; 0: none
    clip: float = 0.0  # largest norm of a block's gradient; 0: any
    masking: bool = True  # let the momentum of what was sent begin anew

    def __post_init__(self) -> None:
        if wrong := fraction_error("fraction", self.fraction):
            raise ValueError(wrong)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: must be at least 0 and less than 1, such as momentum=0.9.")
        if self.warmup < 0 or not self.clip >= 0:
            raise ValueError("warmup and clip must be at least 0.")

    @property
    def properties(self) -> Properties:
        return Properties(keeps="momentum, and what it has not sent", scope="block")

    def sender(self, pieces: Sequence[Piece] = ()) -> Sender:
        return DeepGradient(self)

    def fraction_of(self, message: int) -> float:
        """Return the fraction that a sender's n-th message has."""
        stage = message // self.warmup if self.warmup else len(WARM_UP)
        return max(self.fraction, WARM_UP[stage]) if stage < len(WARM_UP) else self.fraction

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        number = min(len(values), max(1, round(self.fraction_of(memory.messages) * len(values))))
        return encode_entries(values, largest(values, number, key))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        return decode_entries(body, numel)

    def num_bytes(self, numel: int) -> int:
        return entries_bytes(numel, min(numel, max(1, round(self.fraction * numel))))


class DeepGradient:
    """One sender's momentum, and what has accumulated."""

    def __init__(self, codec: DeepGradientCompression) -> None:
        self.codec = codec
        self.memory = Memory()
        self.momentum: Tensor | None = None
        self.accumulated: Tensor | None = None

    @torch.no_grad()
    def encode(self, values: Tensor, key: int) -> Tensor:
        codec, memory = self.codec, self.memory
        values = values.float()
        if self.accumulated is None:
            self.accumulated = torch.zeros(len(values))
        if self.momentum is None:
            self.momentum = torch.zeros(len(values))
        if codec.clip and (norm := float(values.norm())) > codec.clip:
            values = values * (codec.clip / norm)
        self.momentum.mul_(codec.momentum).add_(values)
        total = self.accumulated.add_(self.momentum)
        body = codec.encode(total, key, memory)
        memory.messages += 1
        if len(body) >= values.nbytes:
            self.accumulated = None
            if codec.masking:
                self.momentum.zero_()
            return total
        sent = torch.from_numpy(np.flatnonzero(codec.decode(body, len(total), key).numpy()))
        total[sent] = 0.0
        if codec.masking:
            self.momentum[sent] = 0.0
        return body

    @property
    def unsent(self) -> Tensor | None:
        return self.accumulated

    def take_unsent(self) -> Tensor | None:
        accumulated, self.accumulated, self.momentum = self.accumulated, None, None
        return accumulated

    def keep(self, more: Tensor) -> None:
        self.accumulated = more if self.accumulated is None else self.accumulated.add_(more)
