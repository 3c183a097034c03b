"""The buffers in which a block publishes its parameters for readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SharedWords(Protocol):
    """Integers that readers can see: a list, or memory shared with other processes."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class ParameterBuffer:
    """A block's published parameters: one or two tensors, and a version word that is odd while one is written.

    With two tensors, version v is in tensor v % 2, so that the version before it can still be read.
    """

    def __init__(self, words: SharedWords, index: int, tensors: Sequence[Tensor]) -> None:
        self.words = words
        self.index = index  # of this block's version word
        self.tensors = tensors

    def begin_at(self, version: int) -> None:
        """Set the version of what was written: the run continues from it."""
        self.words[self.index] = 2 * version

    def begin_write(self) -> None:
        self.words[self.index] += 1

    def end_write(self) -> None:
        self.words[self.index] += 1

    def at(self, version: int) -> Tensor:
        """Return the tensor of this version."""
        return self.tensors[version % len(self.tensors)]
