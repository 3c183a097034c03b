"""A module as a torch.fx graph, opened as far as it can be: by the user's pieces, by torch.fx, or by torch.export."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from rainband.model_parallel.graph.split_marks import is_whole, refuse_lost_parameters


class OpeningTracer(fx.Tracer):
    """A torch.fx tracer that keeps a submodule it cannot trace as one node."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}  # submodule -> why it is one node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_whole(m):
            return True
        return super().is_leaf_module(m, module_qualified_name) and not isinstance(m, nn.TransformerEncoder)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(m, nn.TransformerEncoder) and not is_whole(m):
            if len(args) == 1 and not kwargs:  # with masks, its own forward is needed
                return self._layers_of(m, args[0])
            return self._as_one_node(m, args, kwargs)
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # a user's forward may fail on proxies in any way
            self.reasons[self.path_of_module(m)] = str(error)
            for node in list(reversed(self.graph.nodes))[: len(self.graph.nodes) - before]:
                self.graph.erase_node(node)
            return self._as_one_node(m, args, kwargs)

    def _as_one_node(self, m: nn.Module, args: Any, kwargs: Any) -> fx.Proxy:
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def _layers_of(self, encoder: nn.TransformerEncoder, value: Any) -> Any:
        """Compute what nn.TransformerEncoder computes without masks: its own forward cannot be traced."""
        for layer in encoder.layers:
            value = layer(value)
        return value if encoder.norm is None else encoder.norm(value)


def by_fx(model: nn.Module) -> fx.GraphModule:
    tracer = OpeningTracer()
    graph = tracer.trace(model)  # sets tracer.root
    return fx.GraphModule(tracer.root, graph)


def by_pieces(model: nn.Module, pieces: Sequence[nn.Module]) -> fx.GraphModule:
    """Return a chain with one node per piece of the user's; pieces keep their names in the model."""
    refuse_lost_parameters(model, pieces)
    names = {id(module): name for name, module in model.named_modules()}
    root, graph = nn.Module(), fx.Graph()
    value: Any = None
    for number, piece in enumerate(pieces):
        name = names.get(id(piece), "") or f"piece{number}"
        _put(root, name, piece)
        given = tuple(graph.placeholder(word) for word in _inputs_of(piece)) if number == 0 else (value,)
        value = graph.call_module(name, given)
    graph.output(value)
    return fx.GraphModule(root, graph)


def _inputs_of(piece: nn.Module) -> list[str]:
    known = inspect.signature(piece.forward).parameters.values()
    return [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.add_module(last, module)


def by_export(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Trace with torch.export, with dimension 0 of every tensor free, so that batches may have any size."""
    free = pytree.tree_map(_batch_is_free, (tuple(args), dict(kwargs)))
    shapes = dict(zip(_argument_names(model, args), free[0], strict=True)) | free[1]
    module = torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes).module()
    assert isinstance(module, fx.GraphModule)
    return module


def _argument_names(model: nn.Module, args: Sequence[Any]) -> list[str]:
    return list(inspect.signature(model.forward).parameters)[: len(args)]


def _batch_is_free(value: Any) -> Any:
    return {0: torch.export.Dim.DYNAMIC} if isinstance(value, Tensor) and value.dim() else None


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
