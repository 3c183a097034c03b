"""Tensors that members of a round exchange, encoded by a codec.

The bytes of all tensors follow each other in the sender's area. A tensor that would not become smaller is there as it
is. The sender goes on with what the others decode, so that all members have the same bits. In the units of its own
contribution, nothing is lost: what a codec keeps is added to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rainband.codecs.codec import Codec, Piece, Sender, key_of
from rainband.protocol.worker_stats import Stats

MEASURED_EVERY = 8  # contributions: the norm of what is kept costs a pass over it


class EncodedExchange:
    """One member's codec."""

    def __init__(self, codec: Codec, number: int, stats: Stats | None = None) -> None:
        """The first `number` tensors are encoded; those that follow are sent as they are."""
        self.stats = stats or Stats()
        self.codec = codec
        self.number = number
        self.senders: dict[int, Sender] = {}
        self.plain = False  # contributions are sent as they are, without what was kept
        self.last = False  # the next contribution is sent as it is, with all that was kept
        self.contributions = 0
        self.forgotten = 0.0  # squared norm of what was kept and will not be sent

    @torch.no_grad()
    def encode(
        self, tensors: Sequence[Tensor | None], area: Tensor, position: int, plain: bool = False
    ) -> tuple[int, ...]:
        """Write the tensors' bytes into `area`, and return how many each has.

        The tensors are replaced by what others decode. `plain`: they are sent as they are.
        """
        present = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None]
        sizes, at = [], 0
        plain = plain or self.plain or not all(bool(tensor.isfinite().all()) for _, tensor in present)
        for i, tensor in present:
            body = _bytes(tensor) if plain or i >= self.number else self._body(i, tensor, position)
            area[at : at + len(body)] = body
            at += len(body)
            sizes.append(len(body))
            self.stats.saved_bytes += tensor.nbytes - len(body)
        self.stats.sent_bytes += at
        if not self.contributions % MEASURED_EVERY or self.last:
            self.stats.unsent_norm = self._norm()
        self.contributions += 1
        return tuple(sizes)

    def _body(self, i: int, tensor: Tensor, position: int) -> Tensor:
        values = tensor.detach().reshape(-1).to("cpu")
        sender = self.senders.get(i)
        if sender is None:
            columns = tensor.numel() // max(1, tensor.shape[0]) if tensor.dim() > 1 else 1
            sender = self.senders[i] = self.codec.sender([Piece(0, tensor.numel(), max(1, columns))])
        if self.last:
            kept = sender.take_unsent()
            if kept is not None:
                tensor.copy_((values + kept).view(tensor.shape))
            return _bytes(tensor)
        key = key_of(position, i)
        sent = sender.encode(values, key)
        if sent.dtype == torch.uint8:
            tensor.copy_(self.codec.decode(sent, tensor.numel(), key).view(tensor.shape))
            return sent
        tensor.copy_(sent.view(tensor.shape))
        return _bytes(tensor)

    def decode(
        self, area: Tensor, sizes: Sequence[int], present: int, like: Sequence[Tensor], position: int
    ) -> list[Tensor]:
        """Return a member's tensors; those without a value are any. Raise ValueError if these bytes cannot be any."""
        given = [i for i in range(len(like)) if present >> i & 1]
        if len(given) != len(sizes) or min(sizes, default=0) < 0 or sum(sizes) > len(area):
            raise ValueError("other tensors than those that were announced")
        tensors, at = list(like), 0
        for i, size in zip(given, sizes, strict=True):
            body, of = area[at : at + size], like[i]
            at += size
            if size == of.nbytes:
                tensors[i] = body.clone().view(of.dtype).view(of.shape)
            else:
                values = self.codec.decode(body.clone(), of.numel(), key_of(position, i))
                tensors[i] = values.view(of.shape).to(of.dtype)
        return tensors

    def forget(self) -> None:
        """Keep nothing: a part of it belongs to gradients that others have computed again. It is counted as lost."""
        self.stats.unsent_norm = self._norm()
        self.forgotten = self.stats.unsent_norm**2
        self.senders.clear()

    def _norm(self) -> float:
        """Return the norm of what is not sent, with what will never be."""
        kept = [sender.unsent for sender in self.senders.values() if sender.unsent is not None]
        norm = float(torch.stack([values.square().sum() for values in kept]).sum()) if kept else 0.0
        return math.sqrt(norm + self.forgotten)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
