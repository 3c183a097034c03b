"""Tensors of a model whose layers are split: how those of the whole model are made of the shards'."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """A tensor of a split model, and which part of the whole model's tensor it is."""

    name: str
    indices: Sequence[int]  # along the dimension in which the tensor is split


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the whole model. Seen as `view`, it is split along one dimension."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dimension: int
    shards: tuple[TensorShard, ...]

    def write(self, out: Tensor, shard: Callable[[str], Tensor]) -> None:
        """Copy the shards into `out`, one at a time; `shard` returns one by its name."""
        for part in self.shards:
            size = [*self.view[: self.dimension], len(part.indices), *self.view[self.dimension + 1 :]]
            values = shard(part.name).detach().reshape(size)
            out.view(self.view).index_copy_(self.dimension, torch.tensor(list(part.indices)), values)


def joined_tensors(tensors: dict[str, Tensor], whole: Sequence[WholeTensor]) -> dict[str, Tensor]:
    """Return the tensors of the whole model from those of a split one."""
    shards = {shard.name for one in whole for shard in one.shards}
    found = {name: tensor for name, tensor in tensors.items() if name not in shards}
    for one in whole:
        found[one.name] = out = torch.empty(one.shape, dtype=tensors[one.shards[0].name].dtype)
        one.write(out, tensors.__getitem__)
    return found


def write_whole(path: Path, offset: int, one: WholeTensor, dtype: torch.dtype, shard: Callable[[str], Tensor]) -> None:
    """Write a tensor at this offset of a file, in the file's memory: the whole tensor is never in the process's own."""
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = prod(one.shape) * dtype.itemsize
    if not size:
        return
    with path.open("r+b") as file, mmap.mmap(file.fileno(), offset - start + size, offset=start) as memory:
        out: Any = torch.frombuffer(memory, dtype=torch.uint8, offset=offset - start, count=size)
        one.write(out.view(dtype).view(one.shape), shard)
        del out  # the memory cannot be closed while a tensor uses it
