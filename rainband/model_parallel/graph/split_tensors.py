"""Describe of which tensors of the whole model the parameters of split layers are shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from rainband.model.layers import LocallyConnected2d
from rainband.model.whole_tensors import TensorShard, WholeTensor
from rainband.model_parallel.graph.split import NAMES, Replaced
from rainband.model_parallel.graph.split_linear import AsPair, ByColumns, ByRows, linear_shards
from rainband.model_parallel.graph.tiles import ConvolutionTile, Tiled


def whole_tensors(model: nn.Module, before: Collection[nn.Module] = ()) -> list[WholeTensor]:
    """Return how the tensors of the whole model are made of the shards'. `before`: modules that stay as they are."""
    known = {id(module) for module in before}
    names = {id(p): name for name, p in model.named_parameters()}  # of tiles that share a weight: the first
    found: list[WholeTensor] = []
    for path, module in model.named_modules():
        layers = None if id(module) in known else _shards_of(module)
        if layers is None:
            continue
        parent = path.rpartition(".")[0]
        replaced: Replaced = getattr(module, NAMES)
        for key, layer in zip(replaced.names, layers, strict=True):
            prefix = ".".join(filter(None, (path if replaced.is_sequential else parent, key)))
            found += [one.named(f"{prefix}.{word}", names) for word, one in layer.items()]
    return found


@dataclass(frozen=True)
class _SplitTensor:
    """The parameters that are shards of one tensor."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dimension: int
    shards: tuple[tuple[Tensor, Sequence[int]], ...]

    def named(self, name: str, names: Mapping[int, str]) -> WholeTensor:
        shards = tuple(TensorShard(names[id(parameter)], tuple(indices)) for parameter, indices in self.shards)
        return WholeTensor(name, self.shape, self.view, self.dimension, shards)


def _shards_of(module: nn.Module) -> list[dict[str, _SplitTensor]] | None:
    """Return, for each layer that a split one replaces, its tensors; None: it is no split layer."""
    if not hasattr(module, NAMES):
        return None
    if isinstance(module, ByColumns):
        return [_of_columns(module)]
    if isinstance(module, ByRows):
        return [_of_rows(module)]
    if isinstance(module, AsPair):
        return [_of_columns(module.first), {}, _of_rows(module.second)]
    return _of_tiles(module) if isinstance(module, Tiled) else None


def _of_columns(layer: ByColumns) -> dict[str, _SplitTensor]:
    shards = linear_shards(layer.layer_shards)
    ranges, begin = [], 0
    for shard in shards:
        ranges.append(range(begin, begin := begin + shard.out_features))
    weight = (begin, shards[0].in_features)
    found = {
        "weight": _SplitTensor(weight, weight, 0, tuple((s.weight, r) for s, r in zip(shards, ranges, strict=True)))
    }
    biases = tuple((s.bias, r) for s, r in zip(shards, ranges, strict=True) if s.bias is not None)
    return found | ({"bias": _SplitTensor((begin,), (begin,), 0, biases)} if biases else {})


def _of_rows(layer: ByRows) -> dict[str, _SplitTensor]:
    shards = linear_shards(layer.layer_shards)
    edges = [sum(layer.sizes[:n]) for n in range(len(layer.sizes) + 1)]
    weight = (shards[0].out_features, edges[-1])
    pairs = tuple((s.weight, range(*edge)) for s, edge in zip(shards, pairwise(edges), strict=True))
    return {"weight": _SplitTensor(weight, weight, 1, pairs)} | _unsplit("bias", layer.bias)


def _of_tiles(module: Tiled) -> list[dict[str, _SplitTensor]]:
    found = []
    for number, blank in enumerate(module.blank_layers):
        names = [f"tile{tile}_layer{number}" for tile in range(module.shape[0] * module.shape[1])]
        tiles = [module.get_submodule(name) for name in names]
        first = tiles[0]
        if isinstance(first, ConvolutionTile):
            found.append(_unsplit("weight", first.weight) | _unsplit("bias", first.bias))
        elif isinstance(first, LocallyConnected2d) and isinstance(blank, LocallyConnected2d):
            local = [tile for tile in tiles if isinstance(tile, LocallyConnected2d)]
            pixels = [module.pixels[name] for name in names]
            shape = tuple(blank.weight.shape)
            weights = tuple((tile.weight, where) for tile, where in zip(local, pixels, strict=True))
            of_layer = {"weight": _SplitTensor(shape, shape, 0, weights)}
            if blank.bias is not None:
                size = tuple(blank.bias.shape)
                biases = tuple((t.bias, where) for t, where in zip(local, pixels, strict=True) if t.bias is not None)
                of_layer["bias"] = _SplitTensor(size, (size[0], size[1] * size[2]), 1, biases)
            found.append(of_layer)
        else:
            found.append({})
    return found


def _unsplit(word: str, parameter: Tensor | None) -> dict[str, _SplitTensor]:
    """Return a tensor that has another name in the split model, and nothing else."""
    if parameter is None:
        return {}
    shape = tuple(parameter.shape)
    return {word: _SplitTensor(shape, shape, 0, ((parameter, range(shape[0])),))}
