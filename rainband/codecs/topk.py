"""Top-k: only the largest values are sent, each with its place (Aji and Heafield 2017; Stich et al. 2018).

    k = fraction of the values of a block, those with the largest magnitude

An entry takes 6 bytes. What is not sent is added to the next message (`feedback`). In blocks of more than 8,192 values
a threshold from a sample decides, so about k are sent: between 0.8 and 1.3 of them.

Use for gradients on networks below 1 Gbit, and for changes of parameters. Avoid without error feedback, and with a
fraction above 0.1: casts send as little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rainband.codecs.codec import BiasedCodec, Memory, Properties, fraction_error
from rainband.codecs.sparse import decode_entries, encode_entries, entries_bytes, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(BiasedCodec):
    """The largest values of each block."""

    fraction: float = 0.01  # of the values of a block
    feedback: bool = True  # add what a message has left out to the next one

    def __post_init__(self) -> None:
        if wrong := fraction_error("fraction", self.fraction):
            raise ValueError(wrong)

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        return Properties(keeps=self.kept, scope="block")

    def number(self, numel: int) -> int:
        return min(numel, max(1, round(self.fraction * numel)))

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        return encode_entries(values, largest(values, self.number(len(values)), key))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        return decode_entries(body, numel)

    def num_bytes(self, numel: int) -> int:
        return entries_bytes(numel, self.number(numel))
