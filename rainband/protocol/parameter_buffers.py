"""Where a block's parameters are published for readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SharedWords(Protocol):
    """Numbers that readers can see: a list, or memory shared with other processes."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, value: int, /) -> None: ...


class ParameterBuffer:
    """Where a block's parameters are published: one or two buffers and a version word, odd while being written."""

    def __init__(self, words: SharedWords, at: int, buffers: Sequence[Tensor]) -> None:
        self.words = words
        self.at = at
        self.buffers = buffers

    def begin(self) -> None:
        self.words[self.at] += 1

    def end(self) -> None:
        self.words[self.at] += 1

    def of(self, version: int) -> Tensor:
        return self.buffers[version % len(self.buffers)]
