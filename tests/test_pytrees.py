"""Pytrees of values on their way: what goes in comes out, and what is no pytree is refused before memory is taken."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rainband.transports.frames import BadFrame
from rainband.transports.pytrees import ALIGNMENT, DTYPES, DictNode, ListNode, TensorNode, as_tensor, incoming, outgoing


def carried(pytree: Any) -> Any:
    """The pytree as another process would have it."""
    leaving = outgoing(pytree)
    body = leaving.copied()
    return incoming(leaving.structure, as_tensor(None if body is None else memoryview(bytearray(body))))


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, in type and order of memory."""
    if isinstance(a, Tensor):
        return type(b) is Tensor and (a.dtype, a.shape) == (b.dtype, b.shape) and raw(a).equal(raw(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return bool(a == b) or a != a  # a NaN is one also when it arrives


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


# ---- laws ------------------------------------------------------------------------------------------------------------

numbers = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(st.characters(codec="utf-8"))
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype and small shape, also empty or a single number, and lying in memory in any order."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    numel = torch.Size(shape).numel()
    tensor = (torch.arange(numel) * 7 % 5).to(dtype).view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    return tensor


pytrees = st.recursive(
    numbers | tensors() | st.lists(st.integers(0, 9)).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(numbers.filter(lambda key: key == key), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(pytrees)
def test_a_pytree_arrives_as_it_was_sent(pytree: Any) -> None:
    assert same(pytree, carried(pytree))


@given(st.lists(tensors(), max_size=4))
def test_each_tensor_begins_on_a_boundary_and_none_overlap(values: list[Tensor]) -> None:
    leaving = outgoing(values)
    end = 0
    for at, tensor in leaving.tensors:
        assert at % ALIGNMENT == 0
        assert at >= end
        end = at + tensor.numel() * tensor.element_size()
    assert end <= leaving.num_bytes


@given(st.binary(max_size=60), st.integers(0, 100))
def test_bytes_that_are_no_structure_are_refused_or_mean_something_small(structure: bytes, num_bytes: int) -> None:
    with suppress(BadFrame):
        incoming(structure, torch.zeros(num_bytes, dtype=torch.uint8))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_images_whose_channels_lie_last_lie_so_where_they_arrive() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    arrived = carried(image)
    assert arrived.stride() == image.stride() == (60, 1, 15, 3)
    assert arrived.equal(image)


def test_a_value_spread_over_a_dimension_arrives_written_out() -> None:
    spread = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    arrived = carried(spread)
    assert arrived.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    arrived[0, 0] = 9.0
    assert arrived.tolist() == [[9.0, 1.0, 1.0], [2.0, 2.0, 2.0]]


def test_what_arrives_is_cut_off_from_what_made_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    arrived = carried([parameter * 2, parameter])
    assert [type(tensor) for tensor in arrived] == [Tensor, Tensor]
    assert [tensor.requires_grad for tensor in arrived] == [False, False]


def test_what_arrives_does_not_change_with_the_memory_it_came_in() -> None:
    leaving = outgoing([torch.ones(4)])
    memory = torch.zeros(leaving.num_bytes, dtype=torch.uint8)
    leaving.fill(memory)
    arrived = incoming(leaving.structure, memory)
    memory.zero_()
    assert arrived[0].tolist() == [1.0, 1.0, 1.0, 1.0]


# ---- what cannot be sent ---------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, why",
    [
        ({1, 2}, "builtins.set"),
        (Point(1, 2), "test_pytrees.Point"),
        ({(1, 2): 3}, "a key of a dict of type builtins.tuple"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (2**64, "64 bits"),
    ],
)
def test_what_cannot_be_sent_is_reported_with_its_type(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        outgoing([value])


def test_a_list_that_contains_itself_cannot_be_sent() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        outgoing(endless)


# ---- what cannot be received -----------------------------------------------------------------------------------------


def structure(node: Any) -> bytes:
    return msgspec.msgpack.encode(node)


@pytest.mark.parametrize(
    "node, why",
    [
        (TensorNode("float32", (1 << 40,)), "4398046511104 bytes are announced, and 64 have come"),
        (TensorNode("float32", (17,)), "128 bytes are announced, and 64 have come"),
        (TensorNode("float32", (0, 1 << 62)), "too many elements"),
        (TensorNode("float32", (-1,)), "impossible shape"),
        (TensorNode("float32", (1,) * 65), "impossible shape"),
        (TensorNode("Tensor", (1,)), "unknown dtype 'Tensor'"),
        (TensorNode("float32", (1, 1), (0, 0)), "no order"),
        (DictNode((1, 2), (3,)), "2 keys and 1 values"),
        (ListNode((TensorNode("float32", (16,)), TensorNode("bool", (1,)))), "128 bytes are announced"),
        ("fine", ""),
    ],
)
def test_what_does_not_fit_is_refused_before_memory_is_taken(
    node: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", refuses_to_be_called)
    if not why:
        assert incoming(structure(node), memory) == node
        return
    with pytest.raises(BadFrame, match=why):
        incoming(structure(node), memory)


def refuses_to_be_called(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("memory was asked for")


@pytest.mark.parametrize("spoil", [lambda s: s[:-1], lambda s: s + b"\x00", lambda s: b"\x93" + s, lambda s: b""])
def test_a_spoilt_structure_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    leaving = outgoing([torch.ones(2), "x"])
    with pytest.raises(BadFrame):
        incoming(spoil(leaving.structure), torch.zeros(64, dtype=torch.uint8))


def test_an_endless_structure_is_refused() -> None:
    deep = b"\x92\xa4list\x91" * 100_000 + b"\x01"
    with pytest.raises(BadFrame):
        incoming(deep, torch.zeros(0, dtype=torch.uint8))
