"""The significantly-modified filter of the parameter server: only values that have changed enough (Li et al. 2014).

    sent: entries whose magnitude is at least `threshold` times the root mean square of the block, or the largest

The rest stays until it has grown (`feedback`), so how much is sent follows the values: little when few of them matter,
all when all are equal. The paper compares each change with its parameter; a sender of gradients does not know how
far they will move the parameters, so here the other values of the block are the measure.

Use where few values matter, such as models with sparse inputs. Avoid where bytes per message must be bounded: topk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import BiasedCodec, Memory, Properties
from rainband.codecs.sparse import decode_entries, encode_entries, entries_bytes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Significant(BiasedCodec):
    """The values that are large beside the others of their block."""

    threshold: float = 2.0  # times the root mean square of the block
    feedback: bool = True  # add what a message has left out to the next one

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold}: must be more than 0, such as threshold=2.")

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        return Properties(keeps=self.kept, scope="block")

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        bound = self.threshold * norm / max(1, len(values)) ** 0.5
        size = values.abs()
        # In few values, and in values that are alike, none is that large: the largest one is sent then.
        bound = min(bound, float(size.max())) if norm else bound
        places = np.flatnonzero((size >= bound).numpy()) if norm else np.empty(0, np.int64)
        return encode_entries(values, torch.from_numpy(places))

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        return decode_entries(body, numel)

    def num_bytes(self, numel: int) -> int:
        return entries_bytes(numel, min(numel, int(numel * min(1.0, 1 / self.threshold**2))))  # at most
