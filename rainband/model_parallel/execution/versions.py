"""The versions of one stage's parameters: flat vectors, of which the newest is the one an optimizer steps.

A version is one vector per dtype, and its parameters are slices of it, handed to the stage's module by
torch.func.functional_call. Making a version costs one copy of a vector, or none if nobody needs the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.protocol.layout import ITEM_BYTES, Layout, LayoutEntry, arrange

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class VersionMemory:
    """One version: its vectors, and its parameters as leaves of autograd."""

    vectors: tuple[Tensor, ...]
    leaves: Mapping[str, Tensor]


class Versions:
    """The parameters of a stage on one machine, in as many versions as its schedule needs at once."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: MakeOptimizer, own: Sequence[str] | None = None
    ) -> None:
        """`own`: names whose Parameter objects live here, so that the user's module always has the newest values."""
        self.trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self.layout = _arranged(parameters)
        self.places = {spec.name: spec for spec in self.layout.parameters}
        vectors = tuple(
            torch.zeros(v.numel, dtype=getattr(torch, v.dtype), device=v.device) for v in self.layout.vectors
        )
        self.live: dict[int, VersionMemory] = {0: self._memory(vectors)}
        self.newest = 0
        self.spare: list[tuple[Tensor, ...]] = []
        self.peak = 1
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            home = self._slice(vectors, name)
            home.copy_(parameter.detach())
            mine = own is None or name in own
            self.masters[name] = parameter if mine else nn.Parameter(home, name in self.trained)
        self._point_masters_at(vectors)
        trained = [master for master in self.masters.values() if master.requires_grad]
        self.optimizer = optimizer(trained) if trained else None

    def leaves(self, version: int) -> Mapping[str, Tensor]:
        assert version in self.live, f"version {version} is gone, there are {sorted(self.live)}"
        return self.live[version].leaves

    def update(self, gradients: Mapping[str, Tensor | None], overwrite: bool) -> None:
        """Step from the newest version to the next; `overwrite`: in its own memory, because nobody needs it again."""
        old = self.live[self.newest].vectors
        new = old if overwrite else self._copy(old)
        if overwrite:
            del self.live[self.newest]
        else:
            self._point_masters_at(new)
        for name, master in self.masters.items():
            master.grad = gradients.get(name)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.newest += 1
        self.live[self.newest] = self._memory(new)
        self.peak = max(self.peak, len(self.live))

    def release(self, version: int) -> None:
        """Nobody needs an old version any more; its memory serves the next one."""
        assert version != self.newest
        self.spare.append(self.live.pop(version).vectors)

    def restart(self) -> None:
        """Count versions from 0 again, beginning with the newest; there is no other."""
        assert len(self.live) == 1
        self.live = {0: self.live.pop(self.newest)}
        self.newest = 0

    def num_bytes(self) -> int:
        """Of all memories, in use or spare."""
        memories = [memory.vectors for memory in self.live.values()] + self.spare
        return sum(vector.numel() * vector.element_size() for vectors in memories for vector in vectors)

    def _copy(self, vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.spare:
            return tuple(vector.clone() for vector in vectors)
        copies = self.spare.pop()
        for copy, vector in zip(copies, vectors, strict=True):
            copy.copy_(vector)
        return copies

    def _memory(self, vectors: tuple[Tensor, ...]) -> VersionMemory:
        # .data: an optimizer that overwrites this memory on purpose must not be told off by autograd's counters.
        leaves = {name: self._slice(vectors, name).data.requires_grad_(name in self.trained) for name in self.places}
        return VersionMemory(vectors, leaves)

    def _slice(self, vectors: tuple[Tensor, ...], name: str) -> Tensor:
        spec = self.places[name]
        return vectors[spec.vector][spec.start : spec.start + spec.numel].view(spec.shape)

    def _point_masters_at(self, vectors: tuple[Tensor, ...]) -> None:
        for name, master in self.masters.items():
            master.data = self._slice(vectors, name)


def _arranged(parameters: Mapping[str, nn.Parameter]) -> Layout:
    def entry(name: str, p: nn.Parameter) -> LayoutEntry:
        dtype = str(p.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"parameter '{name}' is {dtype}, not {', '.join(ITEM_BYTES)}: make it a buffer.")
        return LayoutEntry(name, tuple(p.shape), dtype, str(p.device))

    return arrange([entry(name, parameter) for name, parameter in parameters.items()])


def by_object(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Each object once, under its first name; and every name with that first name."""
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(value), name) for name, value in named.items()}
    return {name: named[name] for name in first.values()}, canonical
