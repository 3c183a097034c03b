"""The versions of one stage's parameters: flat vectors, of which the optimizer steps the newest.

A version is one vector per dtype; its parameters are slices of it, which torch.func.functional_call hands to the
stage's module. Making a version costs one copy of the vectors, or none if nothing needs the version before it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.model_parallel.schedules.version_rule import LiveVersions
from rainband.protocol.layout import ITEM_BYTES, Layout, LayoutEntry, arrange

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class VersionMemory:
    """The memory of one version: its vectors, and its parameters as autograd leaves."""

    vectors: tuple[Tensor, ...]
    leaves: Mapping[str, Tensor]


class Versions:
    """The parameters of a stage on one machine, in as many versions as its schedule needs at the same time."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: MakeOptimizer, own: Sequence[str] | None = None
    ) -> None:
        """`own`: names whose Parameter objects are updated here, so that the user's module has the newest values."""
        self.trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self.layout = layout = _arranged(parameters)
        self.specs = {spec.name: spec for spec in self.layout.parameters}
        vectors = tuple(torch.zeros(v.numel, dtype=getattr(torch, v.dtype), device=v.device) for v in layout.vectors)
        self.counts = LiveVersions()
        self.live: dict[int, VersionMemory] = {0: self._memory(vectors)}
        self.spare: list[tuple[Tensor, ...]] = []
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            values = self._slice(vectors, name)
            values.copy_(parameter.detach())
            is_own = own is None or name in own
            self.masters[name] = parameter if is_own else nn.Parameter(values, name in self.trained)
        self._point_masters_at(vectors)
        trained = [master for master in self.masters.values() if master.requires_grad]
        self.optimizer = optimizer(trained) if trained else None

    @property
    def newest(self) -> int:
        return self.counts.newest

    @property
    def peak(self) -> int:
        """Most versions in memory at the same time."""
        return self.counts.peak

    def leaves(self, version: int) -> Mapping[str, Tensor]:
        assert version in self.live, f"version {version} was released, there are {sorted(self.live)}"
        return self.live[version].leaves

    def update(self, gradients: Mapping[str, Tensor | None], later: Container[int], stash: bool = True) -> None:
        """Step from the newest version to the next, in the same memory if nothing needs the newest again.

        `later`: versions that later forwards use. Without `stash` the newest is always overwritten.
        """
        newest = self.newest
        old = self.live[newest].vectors
        if self.counts.update(later, stash):
            new = old
            del self.live[newest]
        else:
            new = self._copy(old)
            self._point_masters_at(new)
        for name, master in self.masters.items():
            master.grad = gradients.get(name)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.live[self.newest] = self._memory(new)

    def release(self, later: Container[int]) -> None:
        """Let later versions reuse the memory of those that nothing needs any more."""
        for version in self.counts.release(later):
            self.spare.append(self.live.pop(version).vectors)

    def restart(self) -> None:
        """Count versions from 0 again; only the newest is left."""
        self.live = {0: self.live.pop(self.newest)}
        self.counts.restart()

    def num_bytes(self) -> int:
        """Return the size of all memories, in use or spare."""
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
        # .data: autograd's version counters must not object to an optimizer that overwrites this memory on purpose.
        leaves = {name: self._slice(vectors, name).data.requires_grad_(name in self.trained) for name in self.specs}
        return VersionMemory(vectors, leaves)

    def _slice(self, vectors: tuple[Tensor, ...], name: str) -> Tensor:
        spec = self.specs[name]
        return vectors[spec.vector][spec.start : spec.start + spec.numel].view(spec.shape)

    def _point_masters_at(self, vectors: tuple[Tensor, ...]) -> None:
        for name, master in self.masters.items():
            master.data = self._slice(vectors, name)


def _arranged(parameters: Mapping[str, nn.Parameter]) -> Layout:
    def entry(name: str, p: nn.Parameter) -> LayoutEntry:
        dtype = str(p.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"parameter '{name}' is {dtype}; allowed are {', '.join(ITEM_BYTES)}: make it a buffer.")
        return LayoutEntry(name, tuple(p.shape), dtype, str(p.device))

    return arrange([entry(name, parameter) for name, parameter in parameters.items()])


def by_object(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return each object once, under its first name, and the first name of every name."""
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(value), name) for name, value in named.items()}
    return {name: named[name] for name in first.values()}, canonical
