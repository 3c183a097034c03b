"""Random-k: values at places that both ends draw from one seed, so places are not sent (Stich et al. 2018).

    the vector is cut into k stretches of equal length, and one place is drawn in each

Without `feedback`, values are multiplied by the length of their stretch, and the mean over all messages is exact
(unbiased). With it, what is not sent is added to the next message. All senders of a round draw the same places, so
an all-reduce can sum what they send.

Use where workers sum in an all-reduce. Avoid where top-k is possible: it sends what matters most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import BiasedCodec, Memory, Properties, fraction_error
from rainband.codecs.packing import check_finite, check_length, numbers_in

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandK(BiasedCodec):
    """Values at random places, which both ends know."""

    fraction: float = 0.01  # of the values of a block
    feedback: bool = True  # add what a message has left out to the next one; false: unbiased instead

    def __post_init__(self) -> None:
        if wrong := fraction_error("fraction", self.fraction):
            raise ValueError(wrong)

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        return Properties(linear=True, unbiased=not self.feedback, keeps=self.kept)

    def number(self, numel: int) -> int:
        return min(numel, max(1, round(self.fraction * numel)))

    def _places(self, numel: int, key: int) -> tuple[Tensor, Tensor]:
        """Return one place in each stretch, and the lengths of the stretches."""
        number = self.number(numel)
        edges = np.arange(number + 1, dtype=np.int64) * numel // max(1, number)
        lengths = np.diff(edges)
        drawn = np.random.Generator(np.random.SFC64(key)).random(number)
        return torch.from_numpy(edges[:-1] + (drawn * lengths).astype(np.int64)), torch.from_numpy(lengths)

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        places, lengths = self._places(len(values), key)
        chosen = values[places]
        return (chosen if self.feedback else chosen * lengths).view(torch.uint8)

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        check_length(body, self.num_bytes(numel))
        places, _ = self._places(numel, key)
        chosen = numbers_in(body, torch.float32, 0, len(places))
        check_finite(chosen)
        values = torch.zeros(numel)
        values[places] = chosen
        return values

    def num_bytes(self, numel: int) -> int:
        return 4 * self.number(numel)
