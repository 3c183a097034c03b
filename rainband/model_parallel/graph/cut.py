"""Cut a module into a graph with the user's pieces, torch.fx or torch.export, and verify the result.

Each graph is run once against the module itself, with the same random numbers, on the given example. That
finds silent errors of tracing: random numbers or sizes that became constants, control flow
that was frozen. The same run records which nodes write into their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from rainband.model.seeds import random_numbers_from
from rainband.model.unchanged import same_buffers
from rainband.model_parallel.graph.graph import COMPUTES, Cut, OverwrittenValue, attribute, tensors_in
from rainband.model_parallel.graph.split_marks import InPieces
from rainband.model_parallel.graph.trace import by_export, by_fx, by_pieces, is_getitem


class CutError(ValueError):
    """No tool can make a graph of the module; the message has the reason of each."""


def cut(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Cut:
    """Cut a module; `args` and `kwargs` are an example of its inputs, with a batch of at least two samples.

    A cut is valid for the mode (train or eval) of the module, if the module's code depends on it. Of a model without
    values (device meta) only shapes are compared.
    """
    args, kwargs = _on_its_device(model, (tuple(args), dict(kwargs or {})))
    reasons = []
    for how, make in _ways(model, args, kwargs):
        try:
            module = make()
            guards = _remove_guards(module)
            return _verified(model, module, how, guards, args, kwargs)
        except Exception as error:  # tools raise exceptions of any kind
            reasons.append(f"{how}: {_first_lines(error)}")
    raise CutError(
        f"{type(model).__name__} cannot be cut.\n  " + "\n  ".join(reasons) + "\n"
        "Give it a method pieces() that returns modules to run one after the other, make it an nn.Sequential, or mark "
        "the submodule in question with rainband.model_parallel.graph.split_marks.whole."
    )


def _on_its_device(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return the inputs without values if the model has none."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return call
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), call)


def device_of(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a model without values also makes tensors without values."""
    return torch.device("meta") if any(p.is_meta for p in model.parameters()) else nullcontext()


def _ways(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], fx.GraphModule]]]:
    if isinstance(model, InPieces):
        yield "pieces", lambda: by_pieces(model, model.pieces())
        return  # a model that says where to cut must not be cut elsewhere
    if isinstance(model, nn.Sequential):
        yield "sequential", lambda: by_fx(model)
        yield "sequential", lambda: by_pieces(model, list(model))
        return
    yield "fx", lambda: by_fx(model)
    yield "export", lambda: by_export(model, args, kwargs)


def _first_lines(error: Exception) -> str:
    """Return the informative part of a tool's message: some are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{' '.join(lines[:3]) or 'no reason given'} ({type(error).__name__})"


def _remove_guards(module: fx.GraphModule) -> Callable[..., Any] | None:
    """Remove torch.export's check of the inputs, which reads all of them; Cut.bind checks them instead."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            guards = module.get_submodule("_guards_fn")
            module.graph.erase_node(node)
            return guards
    return None


def _verified(
    model: nn.Module,
    module: fx.GraphModule,
    how: str,
    guards: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Cut:
    """Return the cut after comparing it with the model, for two seeds."""
    for node in reversed(list(module.graph.nodes)):
        if is_getitem(node) and not node.users:
            module.graph.erase_node(node)
    if not any(node.op in COMPUTES for node in module.graph.nodes):
        raise ValueError("the graph has no nodes")
    rough = Cut(module, how, {node.name: node.name for node in module.graph.nodes}, {}, guards)
    with same_buffers(model), torch.no_grad(), device_of(model):
        seen = _compare(model, rough, args, kwargs)
    writers = _redirect_readers(module, seen.writes)
    module.recompile()
    return Cut(module, how, _leaders(rough, seen.numbers), writers, guards)


def _compare(model: nn.Module, rough: Cut, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Watch:
    tensors = [*model.parameters(), *tensors_in((tuple(args), dict(kwargs)))]
    for seed in (0, 1):
        args_copy, kwargs_copy = pytree.tree_map(_copy, (tuple(args), dict(kwargs)))
        with random_numbers_from(seed, tensors):
            expected = model(*args_copy, **kwargs_copy)
        watch = _Watch(rough)
        bound = rough.bind(*pytree.tree_map(_copy, (tuple(args), dict(kwargs))))
        with random_numbers_from(seed, tensors):
            got = rough.answer(watch.run_all(bound))
        if not _are_close(expected, got):
            raise ValueError(
                "its graph gives other numbers than the module: something in its code is drawn or decided while "
                "tracing (random numbers made in forward, control flow on numbers)"
            )
    return watch


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_close(expected: Any, got: Any) -> bool:
    wanted, wanted_spec = pytree.tree_flatten(expected)
    given, given_spec = pytree.tree_flatten(got)
    if len(wanted) != len(given) or wanted_spec.num_leaves != given_spec.num_leaves:
        return False
    return all(
        a.shape == b.shape and (a.is_meta or torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True))
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a == b
        for a, b in zip(wanted, given, strict=True)
    )


class _Watch(fx.Interpreter):
    """Runs the graph node by node and records which nodes write into memory that others read."""

    def __init__(self, rough: Cut) -> None:
        super().__init__(rough.module)
        self.rough = rough
        self.values: dict[str, Any] = {}
        self.writes: dict[str, list[str]] = {}  # node -> values that were changed by it
        self.numbers: set[str] = set()  # nodes whose value has no tensor

    def run_all(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        self.values = dict(bound)
        for node in self.rough.nodes.values():
            self._run(node)
        return self.values

    def _run(self, node: fx.Node) -> None:
        def value_of(source: fx.Node) -> Any:
            if source.op == "get_attr":
                return attribute(self.rough.module, source)
            return self.values[source.name]

        before = self._versions()
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        value = getattr(self, node.op)(node.target, args, kwargs)
        after = self._versions()
        if changed := [name for name in before if before[name] != after[name]]:
            self.writes[node.name] = changed
        self.values[node.name] = value
        if not tensors_in(value):
            self.numbers.add(node.name)

    def _versions(self) -> dict[str, list[int]]:
        return {name: [t._version for t in tensors_in(value)] for name, value in self.values.items()}


def _redirect_readers(module: fx.GraphModule, writes: Mapping[str, Sequence[str]]) -> dict[str, OverwrittenValue]:
    """Make the order of writes explicit: a node that reads after an in-place write reads the writer's value instead.

    Afterwards no node depends on memory that another overwrites, so each may be on another machine.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    order = {name: number for number, name in enumerate(nodes)}
    writers = {}
    for name, changed in writes.items():
        writer = nodes[name]
        direct = [source for source in writer.all_input_nodes if source.name in changed]
        others = [nodes[value] for value in changed if nodes[value] not in direct]
        later = [user for value in others for user in value.users if order[user.name] > order[name]]
        if len(direct) != 1 or later:
            raise ValueError(
                f"node {name} writes into memory that is read later under another name "
                f"({', '.join(changed)}): write y = x + 1 instead of x += 1 there"
            )

        def comes_later(user: fx.Node, after: int = order[name]) -> bool:
            return order[user.name] > after

        direct[0].replace_all_uses_with(writer, delete_user_cb=comes_later)
        writers[name] = OverwrittenValue(direct[0].name, bool(others))
    return writers


def _leaders(rough: Cut, numbers: set[str]) -> dict[str, str]:
    """Return the leader of each node, see `Cut`."""
    leaders: dict[str, str] = {}

    def leader(name: str) -> str:
        if name not in leaders:
            leaders[name] = name  # ends the search where nodes point at each other
            follows = _followed(rough, name, numbers)
            leaders[name] = leader(follows) if follows else name
        return leaders[name]

    for name in rough.nodes:
        leader(name)
    return leaders


def _followed(rough: Cut, name: str, numbers: set[str]) -> str | None:
    node = rough.nodes[name]
    computed = [value for value in rough.reads(name) if value in rough.nodes]
    if is_getitem(node) and computed and name not in numbers:
        return computed[0]
    if name in numbers:
        made_from = [value for value in computed if value not in numbers]
        users = [user.name for user in node.users if user.name in rough.nodes]
        return next(iter(made_from or users), None)
    if not node.users:  # it counts something in a buffer: with the node that comes next
        later = list(rough.nodes)[list(rough.nodes).index(name) + 1 :]
        return next(iter(later), None)
    return None
