"""One stage of a pipeline on one machine: forward, backward and update at versions of its parameters; no messages.

A forward draws its random numbers from a seed of its own (seed, stage, microbatch), so dropout is the same in every
schedule and when the forward is recomputed. Buffers, such as BatchNorm's running statistics, have no versions: they
follow the microbatches in the order in which this machine computes them, each once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.utils import _pytree as pytree

from rainband.model.seeds import random_numbers_from
from rainband.model_parallel.execution.versions import MakeOptimizer, Versions, by_object
from rainband.model_parallel.graph.graph import tensors_in


@dataclass(frozen=True)
class SavedForward:
    """The values that a backward needs from its forward."""

    given: Sequence[Any]  # inputs
    results: Sequence[Any]  # outputs, with their autograd graph; empty if the forward is recomputed
    leaves: Mapping[str, Tensor]  # the parameters that it used


class Stage:
    """The fragments of a stage, with their parameters in versions."""

    def __init__(
        self,
        number: int,
        modules: Mapping[int, fx.GraphModule],
        optimizer: MakeOptimizer,
        *,
        own: Sequence[str] | None = None,
        replica: int = 0,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        """`modules`: by fragment. `own`: see Versions; None: all. Replicas other than the first copy the buffers."""
        self.number, self.modules = number, modules
        self.seed, self.recompute = seed, recompute
        self.prefix = {index: "" if len(modules) == 1 else f"{index}." for index in modules}
        named = {
            self.prefix[index] + name: parameter
            for index, module in modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        parameters, self.canonical = by_object(named)
        self.versions = Versions(parameters, optimizer, own)
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.buffers = {
            index: {name: b.clone() if replica else b for name, b in module.named_buffers()}
            for index, module in modules.items()
        }
        self.played = 0  # microbatches of earlier runs
        self.kept: dict[tuple[int, int], SavedForward] = {}  # by microbatch and fragment
        self.totals: dict[int, dict[str, Tensor]] = {}  # update -> weighted sum of gradients; absent: there was none

    def forward(self, index: int, microbatch: int, version: int, given: Sequence[Any]) -> Sequence[Any]:
        """Run a microbatch through a fragment: `given` are the values it reads; return its outputs, detached.

        A returned tensor requires a gradient if `backward` needs one for it.
        """
        leaves = self.versions.leaves(version)
        with torch.set_grad_enabled(not self.recompute):
            results = self._run(index, microbatch, leaves, given, self.buffers[index])
        self.kept[microbatch, index] = SavedForward(given, () if self.recompute else results, leaves)
        learns = bool(self.trained) or any(tensor.requires_grad for tensor in tensors_in(list(given)))

        def detached(tensor: Tensor) -> Tensor:
            wants = tensor.is_floating_point() and learns if self.recompute else tensor.requires_grad
            return tensor.detach().requires_grad_(wants)

        made: Sequence[Any] = pytree.tree_map_only(Tensor, detached, results)
        return made

    def backward(
        self,
        index: int,
        microbatch: int,
        version: int,
        gradients: Sequence[Sequence[Tensor | None]],
        update: int,
        weight: float,
    ) -> list[list[Tensor | None]]:
        """Return the gradients of a fragment's inputs from those of its outputs.

        The parameters' gradients, times `weight`, are added to the total of `update`.
        """
        kept = self.kept.pop((microbatch, index))
        results, leaves = kept.results, kept.leaves
        if self.recompute:
            leaves = self.versions.leaves(version)
            copies = {name: b.clone() for name, b in self.buffers[index].items()}  # counted in the forward already
            with torch.enable_grad():
                results = self._run(index, microbatch, leaves, kept.given, copies)
        read = tensors_in(list(kept.given))
        names = self.canonical_of(index)
        trained = [name for name in self.trained if name in names.values()]
        found = _gradients(results, gradients, [*read, *(leaves[name] for name in trained)])
        self._add(update, dict(zip(trained, found[len(read) :], strict=True)), weight)
        given_back = iter(found)
        return [[next(given_back) for _ in tensors_in(value)] for value in kept.given]

    def begin(self, played: int) -> None:
        """Start a new run of the table: the newest version becomes version 0."""
        assert not self.kept and not self.totals
        self.played = played
        self.versions.restart()

    def update(self, total: Mapping[str, Tensor], later: Container[int], stash: bool = True) -> None:
        """Make the next version from a total of gradients; see Versions.update."""
        self.versions.update(total, later, stash)

    def canonical_of(self, index: int) -> dict[str, str]:
        """Return the first name here of each parameter of a fragment's module."""
        prefix = self.prefix[index]
        return {n.removeprefix(prefix): first for n, first in self.canonical.items() if n.startswith(prefix)}

    def _run(
        self,
        index: int,
        microbatch: int,
        leaves: Mapping[str, Tensor],
        given: Sequence[Any],
        buffers: Mapping[str, Tensor],
    ) -> Sequence[Any]:
        parameters = {name: leaves[first] for name, first in self.canonical_of(index).items()}
        seed = ((self.seed * 1_000_003 + self.played + microbatch) * 1009 + index) % 2**63
        with random_numbers_from(seed, [*leaves.values(), *tensors_in(list(given))]):
            results: Sequence[Any] = functional_call(
                self.modules[index], {**parameters, **buffers}, tuple(given), tie_weights=False
            )
        return results

    def _add(self, update: int, gradients: Mapping[str, Tensor | None], weight: float) -> None:
        total = self.totals.setdefault(update, {})
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in total:
                total[name].add_(gradient, alpha=weight)
            else:
                total[name] = gradient if weight == 1.0 else gradient * weight


class AtVersion:
    """Computes one microbatch at one version of a stage's parameters, which is held until the backward is done."""

    def __init__(
        self, stage: Stage, microbatch: int, version: int, update: int, weight: float, stash: bool = True
    ) -> None:
        """`stash`: the backward uses the version of the forward, otherwise the newest."""
        self.stage, self.microbatch, self.version = stage, microbatch, version
        self.update, self.weight, self.stash = update, weight, stash
        self.holds = False

    def forward(self, index: int, given: Sequence[Any]) -> Sequence[Any]:
        if self.stash and not self.holds:
            self.holds = True
            self.stage.versions.counts.hold(self.version)
        return self.stage.forward(index, self.microbatch, self.version, given)

    def backward(self, index: int, gradients: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor | None]]:
        version = self.version if self.stash else self.stage.versions.newest
        return self.stage.backward(index, self.microbatch, version, gradients, self.update, self.weight)

    def forget(self) -> None:
        if self.holds:
            self.holds = False
            self.stage.versions.counts.drop(self.version)
        for index in self.stage.modules:
            self.stage.kept.pop((self.microbatch, index), None)


def _gradients(
    results: Sequence[Any], gradients: Sequence[Sequence[Tensor | None]], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return one gradient, or None, for each leaf."""
    pairs = [
        (tensor, gradient)
        for value, column in zip(results, gradients, strict=True)
        for tensor, gradient in zip(tensors_in(value) if column else (), column, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    wanting = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanting:
        return [None] * len(leaves)
    roots, incoming = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, wanting, incoming, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]
