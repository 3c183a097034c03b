"""A cut module: its nodes in order, their inputs, and the nodes that must stay together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

COMPUTES = ("call_module", "call_function", "call_method")


class OverwrittenValue(NamedTuple):
    """The value that an in-place node overwrites."""

    value: str
    has_other_names: bool  # views of it are read by others


@dataclass(frozen=True)
class Cut:
    """A module as a graph; parameters and submodules are the user's own objects.

    Only *leaders* are placed on machines. Every other node goes where its leader is: the parts of a tuple stay
    with the node that made it, and numbers that describe a tensor (its sizes) with that tensor.
    """

    module: fx.GraphModule
    how: str  # pieces, sequential, fx or export
    leaders: Mapping[str, str]  # every node -> the node it stays with; leaders -> themselves
    writers: Mapping[str, OverwrittenValue]  # nodes that write into what they read
    guards: Callable[..., Any] | None = None  # raises when inputs are of a shape that was not traced
    nodes: Mapping[str, fx.Node] = field(init=False)
    inputs: tuple[str, ...] = field(init=False)  # the module's inputs, which every machine has

    def __post_init__(self) -> None:
        every = self.module.graph.nodes
        object.__setattr__(self, "nodes", {node.name: node for node in every if node.op in COMPUTES})
        object.__setattr__(self, "inputs", tuple(node.name for node in every if node.op == "placeholder"))

    @property
    def output(self) -> fx.Node:
        return self.module.graph.output_node()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the values that the module returns."""
        return tuple(dict.fromkeys(node.name for node in self.output.all_input_nodes if node.op != "get_attr"))

    @property
    def units(self) -> tuple[str, ...]:
        """The leaders, which a placement places, in the order in which they compute."""
        return tuple(name for name in self.nodes if self.leaders[name] == name)

    def reads(self, name: str) -> tuple[str, ...]:
        """Return the values a node reads: the module's inputs and other nodes' values, not parameters."""
        return tuple(dict.fromkeys(node.name for node in self.nodes[name].all_input_nodes if node.op != "get_attr"))

    def members(self, unit: str) -> tuple[str, ...]:
        return tuple(name for name in self.nodes if self.leaders[name] == unit)

    def what(self, unit: str) -> str:
        """Return the kind of a node for display: the class of a module, or the name of a function."""
        node = self.nodes[unit]
        if node.op == "call_module":
            return type(self.module.get_submodule(str(node.target))).__name__
        return str(getattr(node.target, "__name__", node.target))

    def layer(self, unit: str) -> str:
        """Return the name of a unit's submodule; empty if it is a function."""
        node = self.nodes[unit]
        return str(node.target) if node.op == "call_module" else ""

    def unit_edges(self) -> list[tuple[str, str, str]]:
        """Return (value, the unit that makes it, another unit that reads it)."""
        edges = {
            (value, self.leaders[value], self.leaders[name])
            for name in self.nodes
            for value in self.reads(name)
            if value in self.nodes and self.leaders[value] != self.leaders[name]
        }
        position = {name: number for number, name in enumerate(self.nodes)}
        return sorted(edges, key=lambda edge: tuple(position[word] for word in edge))

    def parameters_of(self, names: Sequence[str]) -> dict[str, nn.Parameter]:
        """Return the parameters that these nodes use, under their names in the module."""
        found: dict[str, nn.Parameter] = {}
        for name in names:
            node = self.nodes[name]
            if node.op == "call_module":
                inner = self.module.get_submodule(str(node.target))
                found |= {f"{node.target}.{word}": p for word, p in inner.named_parameters()}
            for source in node.all_input_nodes:
                value = attribute(self.module, source) if source.op == "get_attr" else None
                if isinstance(value, nn.Parameter):
                    found[str(source.target)] = value
        return found

    def buffers_of(self, names: Sequence[str]) -> list[Tensor]:
        """Return the buffers and constants that these nodes use, in submodules or directly."""
        found: list[Tensor] = []
        for name in names:
            node = self.nodes[name]
            if node.op == "call_module":
                found += self.module.get_submodule(str(node.target)).buffers()
            for source in node.all_input_nodes:
                value = attribute(self.module, source) if source.op == "get_attr" else None
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    found.append(value)
        return found

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the call's arguments by the names of the graph's inputs; refuse shapes that were not traced."""
        if self.how == "export":
            flat = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
            if self.guards is not None:
                self.guards(*flat)
            return dict(zip(self.inputs, flat, strict=True))
        given = dict(zip(self.inputs, args, strict=False)) | dict(kwargs or {})
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        defaults = {node.name: node.args[0] for node in placeholders if node.args}
        bound = {node.name: given.get(node.name, given.get(str(node.target))) for node in placeholders}
        missing = [n for n in self.inputs if n not in given and n not in defaults and bound[n] is None]
        if missing or len(args) > len(self.inputs):
            raise ValueError(
                f"the model takes {len(self.inputs)} inputs ({', '.join(self.inputs)}) and was given {len(args)} "
                f"and {', '.join(kwargs or {}) or 'none by name'}."
            )
        return {name: defaults[name] if name in defaults and name not in given else bound[name] for name in bound}

    def answer(self, values: Mapping[str, Any]) -> Any:
        """Return the module's result, built from its output values."""

        def value_of(node: fx.Node) -> Any:
            return attribute(self.module, node) if node.op == "get_attr" else values[node.name]

        result: Any = fx.map_arg(self.output.args[0], value_of)
        if self.how != "export":
            return result
        spec = self.module._out_spec
        assert isinstance(spec, pytree.TreeSpec)
        return pytree.tree_unflatten(list(result), spec)


def attribute(module: nn.Module, node: fx.Node) -> Any:
    """Return the parameter, buffer or constant of a get_attr node."""
    value: Any = module
    for word in str(node.target).split("."):
        value = getattr(value, word)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
