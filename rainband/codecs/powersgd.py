"""PowerSGD: each matrix as a product of two thin ones (Vogels et al. 2019).

    P = M Q, its columns made orthonormal
    Q = M^T P, kept for the next message
    M is near P Q^T

A matrix of m rows and n columns takes rank * (m + n) numbers in place of m * n; biases, and matrices for which that is
no less, are sent as they are. What is lost is added to the next message (`feedback`). Here a worker decomposes its
own matrix; the paper's workers sum P and then Q in two all-reduces, which decomposes the matrix of their mean.

Use for models of large matrices. Avoid for small layers, and on one machine: two products of matrices cost more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rainband.codecs.codec import BiasedCodec, Memory, Piece, Properties
from rainband.codecs.packing import as_bytes, check_finite, check_length, numbers_in

if TYPE_CHECKING:
    from torch import Tensor


SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class PowerSgd(BiasedCodec):
    """Matrices of a low rank."""

    rank: int = 2  # columns of the two thin matrices
    feedback: bool = True  # add what a message has left out to the next one

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise ValueError(f"rank={self.rank}: must be from 1 to 256, such as rank=2.")

    @property
    def has_feedback(self) -> bool:
        return self.feedback

    @property
    def properties(self) -> Properties:
        kept = " and ".join(filter(None, [self.kept, "the matrix Q of its last message"]))
        return Properties(keeps=kept, scope="matrix")

    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        pieces = self._worthwhile(memory.pieces)
        head = np.array([len(pieces), *(n for piece in pieces for n in piece)], "<u4")
        parts = [torch.from_numpy(head.view(np.uint8))]
        for number, piece in enumerate(pieces):
            matrix = _as_matrix(values[piece.start : piece.stop], piece.columns)
            q = memory.tensors.get(number)
            if q is None:
                generator = torch.Generator().manual_seed(number)
                q = torch.randn(matrix.shape[1], self.rank, generator=generator)
            # Only the direction of a column counts; with its length, products of large values would be infinite.
            p = _orthonormal(matrix @ (q / q.abs().amax(0).clamp_min(SMALLEST)))
            q = matrix.T @ p
            # A column of zeros would stay zero for ever.
            memory.tensors[number] = torch.where(q.norm(dim=0) > 0, q, torch.ones(()))
            parts += [p, q]
        parts += [values[start:stop] for start, stop in _rest(pieces, len(values))]
        return as_bytes(*parts)

    def _worthwhile(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the matrices that become smaller."""
        return [piece for piece in pieces if 0 < self._numbers(piece) < piece.stop - piece.start]

    def _numbers(self, piece: Piece) -> int:
        rows = -(-(piece.stop - piece.start) // piece.columns)
        if min(rows, piece.columns) <= self.rank:
            return 0
        return self.rank * (rows + piece.columns)

    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        pieces, at = _pieces_in(body, numel)
        if any(not 0 < self._numbers(piece) < piece.stop - piece.start for piece in pieces):
            raise ValueError("matrices that are too small to be encoded")
        rest = list(_rest(pieces, numel))
        check_length(body, at + 4 * (sum(map(self._numbers, pieces)) + sum(stop - start for start, stop in rest)))
        values = torch.empty(numel)
        for piece in pieces:
            length = piece.stop - piece.start
            rows = -(-length // piece.columns)
            p = numbers_in(body, torch.float32, at, rows * self.rank).view(rows, self.rank)
            at += p.nbytes
            q = numbers_in(body, torch.float32, at, piece.columns * self.rank).view(piece.columns, self.rank)
            at += q.nbytes
            values[piece.start : piece.stop] = (p @ q.T).view(-1)[:length]
        for start, stop in rest:
            values[start:stop] = numbers_in(body, torch.float32, at, stop - start)
            at += 4 * (stop - start)
        check_finite(values)
        return values

    def num_bytes(self, numel: int) -> int:
        side = max(1, round(numel**0.5))
        piece = Piece(0, numel, side)
        return 4 + (12 + 4 * self._numbers(piece) if self._worthwhile([piece]) else 4 * numel)


def _as_matrix(values: Tensor, columns: int) -> Tensor:
    """Return values as rows of this many; the last row is filled with zeros."""
    if len(values) % columns:
        values = torch.cat((values, values.new_zeros(columns - len(values) % columns)))
    return values.view(-1, columns)


def _orthonormal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns (Gram-Schmidt, twice, as rounding errors add up)."""
    return torch.linalg.qr(p).Q if bool(p.any()) else p


def _rest(pieces: list[Piece], numel: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches between matrices."""
    at = 0
    for piece in pieces:
        if at < piece.start:
            yield at, piece.start
        at = piece.stop
    if at < numel:
        yield at, numel


def _pieces_in(body: Tensor, numel: int) -> tuple[list[Piece], int]:
    """Return the matrices that a body says it has, and where they begin."""
    data = body.numpy()
    number = int(data[:4].copy().view("<u4")[0]) if len(data) >= 4 else numel + 1
    at = 4 + 12 * number
    if number > numel or len(data) < at:
        raise ValueError(f"{len(data)} bytes are too few")
    rows = data[4:at].copy().view("<u4").reshape(number, 3).tolist()
    pieces, end = [Piece(*row) for row in rows], 0
    for piece in pieces:
        if not end <= piece.start < piece.stop <= numel or not 0 < piece.columns <= piece.stop - piece.start:
            raise ValueError("matrices that overlap, or are not in the vector")
        end = piece.stop
    return pieces, at
