"""Layers in shards: the same numbers as the whole layer, forward and backward, whole and on several machines."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from rainband.model.layers import LocallyConnected2d
from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_linear import AsPair, ByColumns, ByRows
from rainband.model_parallel.graph.tiles import Tiled, Window, bounds, overlaps
from rainband.model_parallel.placement.shard_names import tile_of
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)


def whole_numbers(module: nn.Module) -> nn.Module:
    """Parameters from -2 to 2: then sums are exact in any order, and equality can be asked for."""
    torch.manual_seed(0)
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    return module


def images(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(-3, 4, shape).double()


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (module(x) ** 2).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


# ---- the layer ----


def plainly(layer: LocallyConnected2d, x: Tensor) -> Tensor:
    """Compute the layer as its docstring defines it, by unfolding and one einsum."""
    (height, width), (rows, columns) = layer.kernel_size, layer.output_size
    windows = functional.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    windows = windows.view(len(x), layer.in_channels, height * width, rows * columns)
    weight = layer.weight.view(rows * columns, layer.out_channels, height * width, layer.in_channels)
    y = torch.einsum("ncal,loac->nol", windows, weight).reshape(len(x), layer.out_channels, rows, columns)
    return y if layer.bias is None else y + layer.bias


SHAPES = [
    {"kernel_size": 3, "input_size": (5, 7)},
    {"kernel_size": (2, 3), "input_size": (6, 5), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "input_size": 8, "stride": 3, "padding": 1, "bias": False},
    {"kernel_size": 1, "input_size": 1},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_locally_connected_layer_is_its_equation_forward_and_backward(shape: dict[str, object]) -> None:
    layer = whole_numbers(LocallyConnected2d(2, 3, **shape))  # type: ignore[arg-type]
    assert isinstance(layer, LocallyConnected2d)
    x, y = (images(4, 2, *layer.input_size).requires_grad_() for _ in range(2))
    assert torch.equal(layer(x), plainly(layer, y))
    (layer(x) ** 2).sum().backward()
    found = [x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    layer.zero_grad()
    (plainly(layer, y) ** 2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(found, [y.grad, *(p.grad for p in layer.parameters())], strict=True))


def test_an_output_pixel_has_weights_of_its_own() -> None:
    """Two places, one weight each: 1 and 10."""
    layer = LocallyConnected2d(1, 1, 1, (1, 2), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 10.0]).view(2, 1, 1))
    assert layer(torch.tensor([[[[3.0, 4.0]]]])).flatten().tolist() == [3.0, 40.0]


def test_the_gradient_of_images_is_not_computed_when_nobody_wants_it() -> None:
    layer = LocallyConnected2d(1, 2, 3, 6)
    layer(torch.randn(2, 1, 6, 6)).sum().backward()
    assert layer.weight.grad is not None


def test_wrong_images_and_kernels_are_reported() -> None:
    with pytest.raises(ValueError, match=r"a kernel of \(5, 5\) does not fit into an image of \(4, 4\)"):
        LocallyConnected2d(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"a batch of shape \(2, 1, 5, 4\): this layer requires \(N, 1, 4, 4\)"):
        LocallyConnected2d(1, 1, 3, 4)(torch.zeros(2, 1, 5, 4))


# ---- linear ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ways", [1, 2, 3, 6])
@pytest.mark.parametrize("split", [ByColumns, ByRows])
def test_a_split_linear_layer_gives_the_same_forward_and_backward(
    split: type[ByColumns] | type[ByRows], ways: int, bias: bool
) -> None:
    linear = whole_numbers(nn.Linear(7, 6, bias))
    assert isinstance(linear, nn.Linear)
    x = images(4, 7)
    shards = split(linear, ways)
    assert torch.equal(shards(x), linear(x))
    expected = gradients(linear, x)
    gradients(shards, x)
    with torch.no_grad():
        for p in shards.parameters():
            p.copy_(p.grad if p.grad is not None else p)  # then the whole layer made of them is the gradient
    assert all(torch.equal(p, expected[name]) for name, p in shards.as_linear().named_parameters())


def test_a_pair_gives_the_same_and_sends_only_its_input_and_its_parts_of_the_sum() -> None:
    first, second = whole_numbers(nn.Linear(4, 6)), whole_numbers(nn.Linear(6, 3))
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    x = images(5, 4)
    pair = nn.Sequential(nn.Identity(), AsPair(first, nn.ReLU(), second, ways=2))
    assert torch.equal(pair(x), second(first(x).relu()))
    graph = cut(pair, (x,))
    there = [unit for unit in graph.units if "layer_shards_1" in unit or unit == "_1_between_1"]
    parts = Partitioned(graph, {unit: int(unit in there) for unit in graph.units})
    assert torch.equal(parts(x), second(first(x).relu()))
    assert [(m.destination, tuple(m.payload.shape)) for m in parts.messages] == [(1, (5, 4)), (0, (5, 3))]


def test_rows_send_each_machine_only_its_inputs() -> None:
    linear = whole_numbers(nn.Linear(8, 2))
    assert isinstance(linear, nn.Linear)
    model = nn.Sequential(nn.Tanh(), ByRows(linear, 4)).double()
    x = images(3, 8)
    graph = cut(model, (x,))
    shards = [unit for unit in graph.units if "layer_shards" in unit]
    parts = Partitioned(graph, {unit: shards.index(unit) if unit in shards else 0 for unit in graph.units})
    torch.testing.assert_close(parts(x), linear(x.tanh()))
    assert [m.payload.numel() for m in parts.messages if m.source == 0] == [3 * 2] * 3


def test_impossible_splits_are_reported() -> None:
    with pytest.raises(ValueError, match="cannot split 6 outputs 7 ways: choose from 1 to 6"):
        ByColumns(nn.Linear(4, 6), 7)
    with pytest.raises(ValueError, match="the first layer has 6 outputs and the second 5 inputs"):
        AsPair(nn.Linear(4, 6), nn.ReLU(), nn.Linear(5, 3), 2)


# ---- regions ----


@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    length=st.integers(8, 20),
    tiles=st.integers(1, 3),
)
def test_tiles_see_exactly_what_their_places_see(
    kernel: int, stride: int, padding: int, dilation: int, length: int, tiles: int
) -> None:
    window = Window(kernel, stride, padding, dilation)
    outputs = window.outputs(length)
    if outputs < tiles:
        return
    edges = bounds(outputs, tiles)
    for begin, end in pairwise(edges):
        wanted = [p * stride - padding + k * dilation for p in range(begin, end) for k in range(kernel)]
        inside = [place for place in wanted if 0 <= place < length]
        seen = window.sees(begin, end, length)
        if inside:
            assert (seen.begin, seen.end) == (min(inside), max(inside) + 1) or seen.end - seen.begin >= len(set(inside))
        assert seen.zeros_before == max(0, -min(wanted)) and seen.zeros_after == max(0, max(wanted) + 1 - length)
        found = overlaps(bounds(length, 3), seen.begin, seen.end)
        assert sum(one.end - one.begin for one in found) == seen.end - seen.begin


# ---- tiles ----


def local_net() -> nn.Sequential:
    net = whole_numbers(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.ReLU(inplace=True),
            LocallyConnected2d(3, 4, 3, (10, 12), padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 2, 3, stride=2, padding=1, bias=False),
        )
    )
    assert isinstance(net, nn.Sequential)
    return net


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (3, 1), (2, 2), (2, 3)])
def test_tiles_give_the_same_image(grid: tuple[int, int]) -> None:
    net, x = local_net(), images(2, 2, 10, 12)
    assert torch.equal(Tiled(net, (10, 12), *grid)(x), net(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, dilation=2, padding=2),
        nn.Conv2d(2, 4, (1, 5), stride=(1, 2), groups=2),
        nn.AvgPool2d(3, stride=2),
        LocallyConnected2d(2, 2, 4, (9, 11), stride=2, padding=1),
    ],
    ids=str,
)
def test_every_kind_of_local_layer_can_be_tiled(layer: nn.Module) -> None:
    net, x = nn.Sequential(whole_numbers(layer)), images(2, 2, 9, 11)
    torch.testing.assert_close(Tiled(net, (9, 11), 2, 3)(x), net(x), rtol=0, atol=1e-12)


def test_on_four_machines_gradients_are_those_of_the_whole_net() -> None:
    net, x = local_net(), images(2, 2, 10, 12)
    expected = gradients(net, x)
    net.zero_grad()
    tiled = Tiled(net, (10, 12), 2, 2)
    graph = cut(tiled, (x,))
    parts = Partitioned(graph, {unit: tile_of(unit) or 0 for unit in graph.units})
    parts.loss_and_gradients(lambda answer: (answer**2).sum(), (x,))
    assert torch.equal(net[0].weight.grad, expected["0.weight"])  # shared by all tiles
    assert torch.equal(net[5].weight.grad, expected["5.weight"])
    corner = tiled.get_submodule("tile3_layer2").weight.grad  # places of rows 5 to 9 and columns 6 to 11
    assert torch.equal(corner, expected["2.weight"].view(10, 12, 4, 27)[5:, 6:].reshape(30, 4, 27))


def test_only_halos_cross() -> None:
    """One 3 x 3 convolution of a 6 x 8 image on two machines, side by side: a column of 6 pixels each way."""
    net = nn.Sequential(nn.Identity(), nn.Conv2d(1, 1, 3, padding=1)).double()
    x = images(1, 1, 6, 8)
    graph = cut(Tiled(net, (6, 8), 1, 2), (x,))
    parts = Partitioned(graph, {unit: tile_of(unit) or 0 for unit in graph.units})
    assert torch.equal(parts(x), net(x))
    sizes = {m.value: m.payload.numel() for m in parts.messages}
    assert sizes == {"tile0_layer1_to1": 6, "tile1_layer1_to0": 6, "tile1_layer1": 6 * 4}  # the last: the answer


def test_tiles_keep_nothing_in_common_but_a_convolutions_weights() -> None:
    net = local_net()
    tiled = Tiled(net, (10, 12), 2, 2)
    names = [name for name, _ in tiled.named_parameters()]
    assert sum("layer2" in name for name in names) == 2 * 4 and sum("layer0" in name for name in names) == 2
    before = copy.deepcopy(net[2].weight)
    with torch.no_grad():
        tiled.get_submodule("tile0_layer2").weight.zero_()
    assert torch.equal(net[2].weight, before)


def test_what_cannot_be_tiled_is_reported() -> None:
    with pytest.raises(ValueError, match=r"Flatten.* cannot be cut into tiles"):
        Tiled(nn.Sequential(nn.Flatten()), (4, 4), 2, 2)
    with pytest.raises(ValueError, match="cannot cut 4 rows or columns into 5 tiles"):
        Tiled(nn.Sequential(nn.ReLU()), (4, 4), 5, 1)
