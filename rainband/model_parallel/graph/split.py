"""Split layers of a model by name: `split(model, {"fc1": Columns(2)})` returns a model whose shards can be placed.

    fc1=2  fc1=columns:2     a linear layer, each shard computes some of its outputs
    fc1=rows:2               a linear layer, each shard takes some of its inputs
    mlp=pair:2  0:3=pair:2   linear, elementwise, linear: nothing crosses in between
    conv=2x2  0:5=2x2        convolutions, pooling and locally connected layers, by tiles of the image

A name is that of a submodule, or of some children of an nn.Sequential one after the other: 0:3 are its first three.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model.unchanged import same_buffers
from rainband.model_parallel.graph.split_linear import AsPair, ByColumns, ByRows
from rainband.model_parallel.graph.tiles import Tiled
from rainband.model_parallel.placement.split_words import parse_split


@dataclass(frozen=True)
class Columns:
    ways: int


@dataclass(frozen=True)
class Rows:
    ways: int


@dataclass(frozen=True)
class LayerPair:
    ways: int


@dataclass(frozen=True)
class Tiles:
    rows: int
    columns: int
    input_size: tuple[int, int] | None = None  # of the images; None: seen when the model runs on the example


How = Columns | Rows | LayerPair | Tiles
NAMES = "_rainband_split_names"  # attribute of a split layer: a Replaced
WORDS: dict[str, type[Columns | Rows | LayerPair]] = {"columns": Columns, "rows": Rows, "pair": LayerPair}


class Replaced(NamedTuple):
    """The layers that a split one replaces."""

    children: int  # of its parent
    names: tuple[str, ...]  # theirs, or those of the children of the nn.Sequential that it replaces
    is_sequential: bool


@dataclass(frozen=True)
class _Target:
    """Some layers of a model: the children `keys` of `parent`."""

    name: str
    parent: nn.Module
    keys: tuple[str, ...]

    @property
    def named(self) -> dict[str, nn.Module]:
        """Return the named layers; of a Sequential that is named as a whole, its children."""
        found = {key: self.parent.get_submodule(key) for key in self.keys}
        return dict(found[self.keys[0]].named_children()) if self.is_sequential else found

    @property
    def is_sequential(self) -> bool:
        return len(self.keys) == 1 and isinstance(self.parent.get_submodule(self.keys[0]), nn.Sequential)

    def replace(self, module: nn.Module) -> None:
        setattr(module, NAMES, Replaced(len(self.keys), tuple(self.named), self.is_sequential))
        setattr(self.parent, self.keys[0], module)
        for key in self.keys[1:]:
            delattr(self.parent, key)


def split(
    model: nn.Module, hows: Mapping[str, How], example: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Replace layers by their shards, with the same values; change the model in place, and return it.

    `example` and `kwargs` are inputs of the model, which determine the image sizes of tiled layers.
    """
    targets = {name: _find(model, name) for name in hows}
    for target in targets.values():
        _check_layers(model, target)
    sizes = _image_sizes(model, {n: targets[n] for n, how in hows.items() if isinstance(how, Tiles)}, example, kwargs)
    shards = {name: _shards(targets[name], how, sizes.get(name)) for name, how in hows.items()}
    for name, module in shards.items():  # when nothing can be wrong any more
        targets[name].replace(module)
    return model


def joined(model: nn.Module) -> nn.Module:
    """Undo `split`: shards become ordinary layers again, under their old names and with their present values."""
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            layers = _whole_layers(child)
            if layers is None:
                continue
            usual = Replaced(1, tuple(map(str, range(len(layers)))), not isinstance(child, ByColumns | ByRows))
            count, names, is_sequential = getattr(child, NAMES, usual)
            if count > 1:  # they were some of the parent's children
                _put_back(parent, key, dict(zip(names, layers, strict=True)))
            elif not is_sequential:
                setattr(parent, key, layers[0])
            else:
                setattr(parent, key, nn.Sequential(OrderedDict(zip(names, layers, strict=True))))
    return model


def _whole_layers(module: nn.Module) -> list[nn.Module] | None:
    if isinstance(module, ByColumns | ByRows):
        return [module.as_linear()]
    if isinstance(module, AsPair):
        return [module.first.as_linear(), module.between, module.second.as_linear()]
    return list(module.as_layers()) if isinstance(module, Tiled) else None


def _put_back(parent: nn.Module, key: str, layers: Mapping[str, nn.Module]) -> None:
    """Replace one child by others, in the order in which an nn.Sequential runs them."""
    after = dict(list(parent.named_children())[1 + [name for name, _ in parent.named_children()].index(key) :])
    for name in [key, *after]:
        delattr(parent, name)
    for name, module in {**layers, **after}.items():
        parent.add_module(name, module)


def read_split(words: str) -> tuple[str, How]:
    """Parse splits as typed, such as fc1=2."""
    typed = parse_split(words)
    if typed.kind == "tiles":
        rows, columns = typed.grid
        return typed.layer, Tiles(rows, columns)
    return typed.layer, WORDS[typed.kind](*typed.grid)


def _find(model: nn.Module, name: str) -> _Target:
    path, _, last = name.rpartition(".")
    modules = dict(model.named_modules())
    parent = modules.get(path)
    if parent is not None and isinstance(parent, nn.Sequential) and (part := re.fullmatch(r"(\d+):(\d+)", last)):
        keys = [key for key, _ in parent.named_children()][int(part[1]) : int(part[2])]
        if keys:
            return _Target(name, parent, tuple(keys))
    if parent is not None and last in dict(parent.named_children()):
        return _Target(name, parent, (last,))
    known = [f"{n} ({type(m).__name__})" for n, m in modules.items() if isinstance(m, nn.Linear | nn.Sequential) and n]
    raise ValueError(
        f"the model has no layer '{name}' to split: it has {', '.join(known) or 'none that can be'}. A part of an "
        "nn.Sequential is named 0:3."
    )


def _check_layers(model: nn.Module, target: _Target) -> None:
    """Raise ValueError if shards would not compute what the layers do, or would be trained in another way."""
    mine = {id(p) for layer in target.named.values() for p in layer.parameters()}
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    reason = ""
    if any(uses.count(key) > 1 for key in mine):
        reason = "shares a parameter with another layer, which shards would not"
    elif any(not p.requires_grad for layer in target.named.values() for p in layer.parameters()):
        reason = "has frozen parameters"
    elif any(m._forward_hooks or m._forward_pre_hooks for layer in target.named.values() for m in layer.modules()):
        reason = "has hooks, which its shards would not run"
    elif strange := [
        layer
        for layer in target.named.values()
        if isinstance(layer, nn.Linear | nn.Conv2d) and type(layer) not in (nn.Linear, nn.Conv2d)
    ]:
        reason = f"is a {type(strange[0]).__name__}, which may compute something else than an nn.Linear or nn.Conv2d"
    if reason:
        raise ValueError(f"'{target.name}' {reason}: split another layer.")


def _shards(target: _Target, how: How, image_size: tuple[int, int] | None) -> nn.Module:
    layers = list(target.named.values())
    kinds = ", ".join(type(layer).__name__ for layer in layers)
    if isinstance(how, Tiles):
        size = how.input_size or image_size
        if size is None:
            raise ValueError(f"tiles of '{target.name}' need the size of its images: give input_size, or an example.")
        return Tiled(nn.Sequential(*layers), size, how.rows, how.columns)
    if isinstance(how, LayerPair):
        if len(layers) == 3 and isinstance(layers[0], nn.Linear) and isinstance(layers[2], nn.Linear):
            return AsPair(layers[0], layers[1], layers[2], how.ways)
        raise ValueError(
            f"'{target.name}' is {kinds}: a pair is linear, something elementwise, linear, one after the other in an "
            "nn.Sequential (0:3=pair:2)."
        )
    if len(layers) == 1 and isinstance(layers[0], nn.Linear):
        return ByColumns(layers[0], how.ways) if isinstance(how, Columns) else ByRows(layers[0], how.ways)
    raise ValueError(
        f"'{target.name}' is {kinds}: only an nn.Linear is split by columns or rows; convolutions are by tiles (=2x2)."
    )


def _image_sizes(
    model: nn.Module, targets: Mapping[str, _Target], example: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, tuple[int, int]]:
    """Return height and width of these layers' inputs, from one run on the example."""
    if not targets or not (example or kwargs):
        return {}
    seen: dict[str, tuple[int, int]] = {}
    hooks = []
    for name, target in targets.items():

        def note(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = (args[0].shape[-2], args[0].shape[-1])

        hooks.append(target.parent.get_submodule(target.keys[0]).register_forward_pre_hook(note))
    device = next((p.device for p in model.parameters()), None)  # meta, where the model has no values
    args, words = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (tuple(example), dict(kwargs or {})))
    try:
        with same_buffers(model), torch.no_grad():
            model(*args, **words)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
