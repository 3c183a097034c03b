"""The values that a worker sends, encoded by a codec, and what it has not sent yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from rainband.codecs.codec import Codec, Piece, Sender, key_of
from rainband.protocol.layout import BlockSpec, Layout

if TYPE_CHECKING:
    from torch import Tensor

    from rainband.protocol.ports import BlockValues

MEASURED_EVERY = 8  # messages: the norm of what is not sent costs a pass over it


class EncodedValues:
    """Bytes that a codec has made of a block's values, or values that it has left as they are."""

    __slots__ = ("encoded", "tensor")

    def __init__(self, tensor: Tensor, block: BlockSpec) -> None:
        is_encoded = tensor.dtype == torch.uint8
        self.tensor = tensor if is_encoded else tensor.to(getattr(torch, block.dtype))
        self.encoded = len(tensor) if is_encoded else 0

    def write(self, out: Tensor) -> None:
        out.copy_(self.tensor)

    def contiguous(self) -> Tensor | None:
        return self.tensor


class Unsent(NamedTuple):
    """Values that a codec has kept of the gradients of one block."""

    block: BlockSpec
    absent: tuple[int, ...]  # parameters that are left out
    values: EncodedValues


class SentValues(NamedTuple):
    """A push of one block that is not answered yet."""

    which: tuple[BlockSpec, tuple[int, ...]]
    key: int
    gradient: Tensor
    values: Tensor  # what was sent


class CompressedPushes:
    """Encodes the pushes of one worker; what a codec keeps is kept for each block, and each choice of parameters."""

    def __init__(self, codec: Codec, me: int, layout: Layout) -> None:
        self.codec = codec
        self.me = me
        self.layout = layout
        self.senders: dict[tuple[BlockSpec, tuple[int, ...]], Sender] = {}
        self.norms: dict[tuple[BlockSpec, tuple[int, ...]], float] = {}  # squared, of what is not sent
        self.messages = 0
        self.unanswered: dict[tuple[int, int], SentValues] = {}  # by the number of the push and its block

    def encode(
        self, values: BlockValues, block: BlockSpec, absent: tuple[int, ...], numel: int, sequence: int
    ) -> EncodedValues:
        """Return what is sent in place of these values."""
        which = block, absent
        sender = self.senders.get(which)
        if sender is None:
            sender = self.senders[which] = self.codec.sender(pieces_of(self.layout, block, absent))
        plain = values.contiguous()
        if plain is None or not plain.is_cpu:
            plain = torch.empty(numel, dtype=getattr(torch, block.dtype))
            values.write(plain)
        key = key_of(self.me, sequence, block.index)
        before = plain.detach().float().clone() if self.codec.properties.keeps else None
        sent = sender.encode(plain, key)
        if before is not None:
            self.unanswered[sequence, block.index] = SentValues(which, key, before, sent)
        encoded = EncodedValues(sent, block)
        self.messages += 1
        if sender.unsent is not None and (which not in self.norms or not self.messages % MEASURED_EVERY):
            self.norms[which] = float(sender.unsent.square().sum())
        return encoded

    def answered(self, sequence: int, block: int, is_taken: bool) -> None:
        """Take the answer to a push. If it was refused, what it had of earlier gradients is kept again, and what it
        has left out of its own is not: the gradient itself is dropped, or computed again by another worker.
        """
        sent = self.unanswered.pop((sequence, block), None)
        if sent is None or is_taken:
            return
        values, sender = sent.values, self.senders[sent.which]
        if values.dtype == torch.uint8:
            values = self.codec.decode(values, len(sent.gradient), sent.key)
        sender.keep(values - sent.gradient)
        if sender.unsent is not None:
            self.norms[sent.which] = float(sender.unsent.square().sum())

    @property
    def unsent_norm(self) -> float:
        """Return about the norm of what is not sent."""
        return math.sqrt(sum(self.norms.values()))

    def take_unsent(self) -> list[Unsent]:
        """Return what is not sent yet, which will now be sent as it is."""
        self.norms.clear()
        kept = [(which, sender.take_unsent()) for which, sender in self.senders.items()]
        kept = [(which, values) for which, values in kept if values is not None and values.any()]
        return [Unsent(*which, EncodedValues(values, which[0])) for which, values in kept if values is not None]


def pieces_of(layout: Layout, block: BlockSpec, absent: Sequence[int] = ()) -> list[Piece]:
    """Return where the parameters lie in the values of a block, and how many columns they have as matrices."""
    pieces, at = [], 0
    for segment in block.present(absent):
        start = at if absent else segment.start
        at = start + segment.numel
        pieces.append(Piece(start, at, min(segment.numel, _columns(layout, segment.parameter))))
    return pieces


def _columns(layout: Layout, parameter: int) -> int:
    spec = layout.parameters[parameter]
    rows = spec.shape[spec.order[0]] if len(spec.shape) > 1 else spec.numel
    return max(1, spec.numel // max(1, rows))
