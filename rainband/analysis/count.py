"""Count the work and depth of a task's gradient: one batch, forward and backward, watched operation by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from rainband.analysis.kinds import levels_of
from rainband.analysis.work import Levels
from rainband.model.seeds import global_generators_from
from rainband.tasks.task import Task

OUTSIDE = "(loss)"  # operations outside of the model


class TensorOp(NamedTuple):
    """An operation on tensors: its levels, and the operations (by number) whose results it needs."""

    layer: str
    levels: Levels
    needs: tuple[int, ...] = ()
    name: str = ""


class LayerWork(NamedTuple):
    """A layer's operations for one batch, forward and backward."""

    name: str
    what: str  # its class
    work: int
    depth: int  # scalar operations that follow each other
    parameters: int
    activation_bytes: int  # kept between forward and backward

    @property
    def parallelism(self) -> float:
        """Return the mean number of operations that can be done at the same time."""
        return self.work / self.depth if self.depth else 0.0


@dataclass(frozen=True)
class GradientWork:
    """The operations of one gradient, in an order in which they can be done."""

    operations: tuple[TensorOp, ...]
    batch_size: int
    layers: tuple[LayerWork, ...]

    @cached_property
    def work(self) -> int:
        return sum(sum(operation.levels) for operation in self.operations)

    @cached_property
    def depth(self) -> int:
        return depth_of(self.operations)

    @property
    def parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        return sum(layer.activation_bytes for layer in self.layers)


def depth_of(operations: Sequence[TensorOp], layer: str | None = None) -> int:
    """Return the longest chain of scalar operations; with a layer, only its own count."""
    ends: list[int] = []
    for operation in operations:
        own = len(operation.levels) if layer in (None, operation.layer) else 0
        ends.append(own + max((ends[number] for number in operation.needs), default=0))
    return max(ends, default=0)


def count_gradient(task: Task, model: nn.Module, batch: Any, size: int) -> GradientWork:
    """Compute one gradient of the task's loss, and return what was done."""
    model.train()
    watch = OperationCounter(model, batch)
    with global_generators_from(0), watch.tracker:
        with watch, torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor):
            loss = task.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return GradientWork(tuple(watch.operations), size, tuple(_layers(model, watch)))


class OperationCounter(TorchDispatchMode):
    """Notes every operation on tensors, and the layer that it belongs to."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = ModuleTracker()
        self.prefix = type(model).__name__
        self.operations: list[TensorOp] = []
        self.makers: dict[int, int] = {}  # memory -> the operation that wrote it last
        self.kept: dict[str, dict[int, int]] = defaultdict(dict)  # layer -> memory -> bytes
        given = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        self.given = {_memory(tensor) for tensor in [*model.parameters(), *model.buffers(), *given]}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        read, results = _tensors((args, kwargs)), _tensors(answer)
        known = {_memory(tensor) for tensor in read}
        made = {_memory(tensor) for tensor in results}
        if made <= known and not func._schema.is_mutable:
            return answer  # a view
        name = func._schema.name.removeprefix("aten::")
        needs = tuple(sorted({self.makers[memory] for memory in known if memory in self.makers}))
        for memory in made:
            self.makers[memory] = len(self.operations)
        self.operations.append(TensorOp(self.layer, levels_of(name, args, read, results), needs, name))
        return answer

    def saved(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is kept for the backward pass."""
        memory = _memory(tensor)
        if memory not in self.given and all(memory not in kept for kept in self.kept.values()):
            self.kept[self.layer][memory] = tensor.numel() * tensor.element_size()
        return tensor

    @property
    def layer(self) -> str:
        """Return the innermost module that computes now, as the model names it."""
        inside = [name for name in self.tracker.parents if name.split(".")[0] == self.prefix]
        if not inside:
            return OUTSIDE
        return max(inside, key=lambda name: (name.count("."), name)).removeprefix(self.prefix).removeprefix(".")


def _layers(model: nn.Module, watch: OperationCounter) -> list[LayerWork]:
    """Return a row for each module that computes something or has parameters of its own, in the order of computing."""
    modules = dict(model.named_modules())
    work: dict[str, int] = {}
    for operation in watch.operations:
        work[operation.layer] = work.get(operation.layer, 0) + sum(operation.levels)
    own, seen = dict[str, int](), set[int]()
    for name, module in modules.items():
        new = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(parameter) for parameter in new}
        own[name] = sum(parameter.numel() for parameter in new)
    names = [*work, *(name for name, number in own.items() if number and name not in work)]
    rows = []
    for name in names:
        activation_bytes = sum(watch.kept.get(name, {}).values())
        if work.get(name) or own.get(name) or activation_bytes:
            what = type(modules[name]).__name__ if name in modules else ""
            depth = depth_of(watch.operations, name)
            rows.append(
                LayerWork(name or "(model)", what, work.get(name, 0), depth, own.get(name, 0), activation_bytes)
            )
    return rows


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Return a key that is equal for tensors over the same memory, while it is in use."""
    return int(tensor.untyped_storage()._cdata)
