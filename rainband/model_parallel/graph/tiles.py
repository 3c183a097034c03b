"""Local layers (convolutions, locally connected layers, pooling) cut into image tiles, for different machines.

A tile needs a border of its neighbors' values, its halo. Each strip of it is a node of the neighbor, so only the strip
crosses machines, once for each layer that needs it. A convolution's weights are shared by all tiles; a
locally connected layer's are divided among them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.model.layers import LocallyConnected2d


class Window(NamedTuple):
    """A local layer in one direction: the input range of each output pixel."""

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def outputs(self, inputs: int) -> int:
        return (inputs + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def sees(self, begin: int, end: int, inputs: int) -> Seen:
        """Return the input range of output pixels begin to end; pixels outside the image are padding."""
        first = begin * self.stride - self.padding
        last = (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1
        return Seen(max(0, first), min(inputs, last), max(0, -first), max(0, last - inputs))


class Seen(NamedTuple):
    begin: int
    end: int
    zeros_before: int
    zeros_after: int


class Overlap(NamedTuple):
    """A part of a tile, in the tile's own coordinates."""

    tile: int
    begin: int
    end: int


def bounds(length: int, tiles: int) -> list[int]:
    """Return where tiles begin, and the end: about equal, none empty."""
    if not 1 <= tiles <= length:
        raise ValueError(f"cannot cut {length} rows or columns into {tiles} tiles: choose from 1 to {length}.")
    return [length * n // tiles for n in range(tiles + 1)]


def overlaps(edges: list[int], begin: int, end: int) -> list[Overlap]:
    """Return the tiles that hold pixels begin to end, with their parts of that range."""
    found = []
    for tile, (first, last) in enumerate(pairwise(edges)):
        low, high = max(first, begin), min(last, end)
        if low < high:
            found.append(Overlap(tile, low - first, high - first))
    return found


ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Identity)


class Tiled(nn.Module):
    """The same function as `layers`, computed by rows x columns tiles."""

    def __init__(self, layers: nn.Sequential, input_size: tuple[int, int], rows: int, columns: int) -> None:
        super().__init__()
        self.shape = (rows, columns)
        self.num_layers = len(layers)
        self.pixels: dict[str, list[int]] = {}  # of a shard of a locally connected layer: its pixels of the layer
        self.blank_layers = [copy.deepcopy(layer).to("meta") for layer in layers]  # the original layers, without values
        height, width = input_size
        above, across = bounds(height, rows), bounds(width, columns)
        self._cut_input(above, across)
        for number, layer in enumerate(layers):
            vertical, horizontal = _windows(layer)
            below = bounds(vertical.outputs(above[-1]), rows)
            right = bounds(horizontal.outputs(across[-1]), columns)
            for tile in range(rows * columns):
                r, c = divmod(tile, columns)
                seen = (
                    vertical.sees(below[r], below[r + 1], above[-1]),
                    horizontal.sees(right[c], right[c + 1], across[-1]),
                )
                self._add_halo(tile, number, seen, above, across)
                here = (below[r], below[r + 1], right[c], right[c + 1])
                name = f"tile{tile}_layer{number}"
                self.pixels[name] = _pixel_indices(here, right[-1])
                self.add_module(name, _tile_of(layer, here, self.pixels[name]))
            above, across = below, right
        self.output_size = (above[-1], across[-1])

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.shape
        values = [self._modules[f"tile{tile}_input"](x) for tile in range(rows * columns)]  # type: ignore[misc]
        for number in range(self.num_layers):
            values = [self._next(tile, number, values) for tile in range(rows * columns)]
        lines = [torch.cat(values[r * columns : (r + 1) * columns], dim=3) for r in range(rows)]
        return torch.cat(lines, dim=2)

    def as_layers(self) -> nn.Sequential:
        """Return the original layers with the present values of the tiles."""
        layers: list[nn.Module] = []
        for number, blank in enumerate(self.blank_layers):
            tiles = [self.get_submodule(f"tile{tile}_layer{number}") for tile in range(self.shape[0] * self.shape[1])]
            if isinstance(blank, LocallyConnected2d):
                pixels = [self.pixels[f"tile{tile}_layer{number}"] for tile in range(len(tiles))]
                layers.append(_joined(blank, [p for p in tiles if isinstance(p, LocallyConnected2d)], pixels))
            elif isinstance(blank, nn.Conv2d) and isinstance(tiles[0], ConvolutionTile):
                layer = copy.deepcopy(blank)
                layer.weight, layer.bias = tiles[0].weight, tiles[0].bias
                layers.append(layer)
            else:
                layers.append(copy.deepcopy(blank))
        return nn.Sequential(*layers)

    def _next(self, tile: int, number: int, values: Sequence[Tensor]) -> Any:
        halo = self.get_submodule(f"tile{tile}_layer{number}_halo")
        assert isinstance(halo, Assemble)
        parts = []
        for source in halo.sources:
            strip = self._modules.get(f"tile{source}_layer{number}_to{tile}")
            parts.append(values[source] if strip is None else strip(values[source]))
        return self.get_submodule(f"tile{tile}_layer{number}")(halo(*parts))

    def _cut_input(self, above: list[int], across: list[int]) -> None:
        columns = self.shape[1]
        for tile in range(self.shape[0] * columns):
            r, c = divmod(tile, columns)
            self.add_module(f"tile{tile}_input", Strip(above[r], above[r + 1], across[c], across[c + 1]))

    def _add_halo(self, tile: int, number: int, seen: tuple[Seen, Seen], above: list[int], across: list[int]) -> None:
        down = overlaps(above, seen[0].begin, seen[0].end)
        over = overlaps(across, seen[1].begin, seen[1].end)
        sources = [up.tile * self.shape[1] + side.tile for up in down for side in over]
        for up in down:
            for side in over:
                source = up.tile * self.shape[1] + side.tile
                size = (above[up.tile + 1] - above[up.tile], across[side.tile + 1] - across[side.tile])
                if (up.begin, up.end, side.begin, side.end) != (0, size[0], 0, size[1]):
                    name = f"tile{source}_layer{number}_to{tile}"
                    self.add_module(name, Strip(up.begin, up.end, side.begin, side.end))
        zeros = (seen[1].zeros_before, seen[1].zeros_after, seen[0].zeros_before, seen[0].zeros_after)
        self.add_module(f"tile{tile}_layer{number}_halo", Assemble(sources, len(over), zeros))


class Strip(nn.Module):
    """A part of an image in memory of its own, because it may be sent."""

    _rainband_whole = True

    def __init__(self, top: int, bottom: int, left: int, right: int) -> None:
        super().__init__()
        self.box = (top, bottom, left, right)

    def forward(self, x: Tensor) -> Tensor:
        top, bottom, left, right = self.box
        return x[:, :, top:bottom, left:right].contiguous()


class Assemble(nn.Module):
    """A tile with its halo, from strips row by row, and zeros where the image ends."""

    _rainband_whole = True

    def __init__(self, sources: list[int], columns: int, zeros: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.sources, self.columns, self.zeros = sources, columns, zeros

    def forward(self, *strips: Tensor) -> Tensor:
        lines = [strips[n : n + self.columns] for n in range(0, len(strips), self.columns)]
        joined = [line[0] if len(line) == 1 else torch.cat(line, dim=3) for line in lines]
        image = joined[0] if len(joined) == 1 else torch.cat(joined, dim=2)
        return functional.pad(image, self.zeros) if any(self.zeros) else image


class ConvolutionTile(nn.Module):
    """A convolution of an input that is padded already, with the weights of the original layer."""

    _rainband_whole = True

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        self.stride, self.dilation, self.groups = convolution.stride, convolution.dilation, convolution.groups

    def reset_parameters(self) -> None:
        """Initialize the weights as nn.Conv2d does."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def _windows(layer: nn.Module) -> tuple[Window, Window]:
    """Return the windows of a layer, vertical and horizontal."""
    if isinstance(layer, ELEMENTWISE):
        return Window(), Window()
    if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        parts = zip(layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
    elif isinstance(layer, LocallyConnected2d):
        parts = zip(layer.kernel_size, layer.stride, layer.padding, (1, 1), strict=True)
    elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d) and _is_plain(layer):
        kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
        parts = zip(kernel, stride, (0, 0), (1, 1), strict=True)
    else:
        raise ValueError(
            f"{layer} cannot be cut into tiles: Conv2d with zeros as padding, LocallyConnected2d, MaxPool2d and "
            "AvgPool2d without padding, and what works on each element can. Take a part of the model that has only "
            "these."
        )
    vertical, horizontal = [Window(*part) for part in parts]
    return vertical, horizontal


def _is_plain(layer: nn.MaxPool2d | nn.AvgPool2d) -> bool:
    dilated = isinstance(layer, nn.MaxPool2d) and _pair(layer.dilation) != (1, 1)
    return _pair(layer.padding) == (0, 0) and not layer.ceil_mode and not dilated


def _pixel_indices(here: tuple[int, int, int, int], width: int) -> list[int]:
    """Return the indices of the pixels in rows and columns `here`, of an output of this width."""
    top, bottom, left, right = here
    return [row * width + column for row in range(top, bottom) for column in range(left, right)]


def _tile_of(layer: nn.Module, here: tuple[int, int, int, int], pixels: list[int]) -> nn.Module:
    """Return the module that computes one tile of a layer: output rows and columns `here`."""
    if isinstance(layer, nn.Conv2d):
        return ConvolutionTile(layer)
    if isinstance(layer, LocallyConnected2d):
        return _local_tile(layer, here, pixels)
    return copy.deepcopy(layer)  # has no parameters and works on any part; a copy, so that it is a node of its own


def _local_tile(layer: LocallyConnected2d, here: tuple[int, int, int, int], pixels: list[int]) -> LocallyConnected2d:
    top, bottom, left, right = here
    pairs = zip(layer.kernel_size, layer.stride, (bottom - top, right - left), strict=True)
    height_in, width_in = [(count - 1) * stride + kernel for kernel, stride, count in pairs]
    tile = LocallyConnected2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        (height_in, width_in),
        layer.stride,
        bias=layer.bias is not None,
    ).to(layer.weight)
    with torch.no_grad():
        tile.weight.copy_(layer.weight[pixels])
        if tile.bias is not None and layer.bias is not None:
            tile.bias.copy_(layer.bias[:, top:bottom, left:right])
    return tile


def _joined(blank: nn.Module, tiles: Sequence[LocallyConnected2d], pixels: Sequence[list[int]]) -> LocallyConnected2d:
    layer = copy.deepcopy(blank).to_empty(device=tiles[0].weight.device)
    assert isinstance(layer, LocallyConnected2d)
    with torch.no_grad():
        for tile, numbers in zip(tiles, pixels, strict=True):
            layer.weight[numbers] = tile.weight
            if layer.bias is not None and tile.bias is not None:
                layer.bias.flatten(1)[:, numbers] = tile.bias.flatten(1)
    return layer


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
