"""Pytrees (lists, tuples and dicts of numbers, strings and tensors) as a typed structure and raw bytes.

The structure has everything except the contents of tensors, which lie one after the other, each on a 64-byte boundary,
in the memory of the transport. Received structures are checked before anything is allocated.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rainband.transports.frames import BadFrame

ALIGNMENT = 64
MAX_DIMS = 64  # as many as torch allows
MAX_NUMEL = 1 << 48

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}

Number = None | bool | int | float | str


class TensorNode(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """A tensor: its shape in memory order, slowest dimension first, and the order of its own dimensions."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()  # its own dimension at each position of `shape`; empty: the same order

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def check(self) -> None:
        """Raise BadFrame if this does not describe a tensor."""
        if self.dtype not in DTYPES:
            raise BadFrame(f"a tensor of the unknown dtype {self.dtype!r}.")
        if len(self.shape) > MAX_DIMS or min(self.shape, default=0) < 0:
            raise BadFrame(f"a tensor of the impossible shape {self.shape}.")
        if prod(max(1, size) for size in self.shape) > MAX_NUMEL:  # also where another dimension is 0
            raise BadFrame(f"a tensor of the shape {self.shape} has too many elements.")
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise BadFrame(f"{self.order} is no order of the dimensions of {self.shape}.")


class ListNode(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    items: tuple[Node, ...]


class TupleNode(msgspec.Struct, frozen=True, array_like=True, tag="tuple"):
    items: tuple[Node, ...]


class SizeNode(msgspec.Struct, frozen=True, array_like=True, tag="size"):
    sizes: tuple[int, ...]


class DictNode(msgspec.Struct, frozen=True, array_like=True, tag="dict"):
    keys: tuple[Number, ...]
    values: tuple[Node, ...]


Node = TensorNode | ListNode | TupleNode | SizeNode | DictNode | Number

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Node)


class Outgoing(NamedTuple):
    """A pytree that is ready to be sent."""

    structure: bytes
    tensors: list[tuple[int, Tensor]]  # offset, and the tensor in memory order
    num_bytes: int  # of the tensors, with padding

    def fill(self, memory: Tensor) -> None:
        """Copy the tensors' contents into bytes of memory."""
        for at, tensor in self.tensors:
            raw = memory[at : at + tensor.numel() * tensor.element_size()]
            raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def copied(self) -> memoryview | None:
        """Return a copy of the tensors' contents, or None if there are none."""
        if not self.num_bytes:
            return None
        memory = fresh_memory(self.num_bytes)
        self.fill(as_tensor(memory))
        return memory


def as_tensor(body: memoryview | None) -> Tensor:
    """Return received bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8) if body is None else torch.frombuffer(body, dtype=torch.uint8)


def fresh_memory(num_bytes: int) -> memoryview:
    """Return new memory, aligned for every dtype."""
    return memoryview(torch.empty(num_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]


def outgoing(pytree: Any) -> Outgoing:
    """Split a pytree into structure and tensors, without copying tensors."""
    found: list[Tensor] = []
    try:
        structure = _encoder.encode(_node(pytree, found))
    except OverflowError:
        raise ValueError("a whole number of more than 64 bits cannot be sent: make it a float or a tensor.") from None
    except RecursionError:
        raise ValueError(
            "a value to be sent is nested too deeply, or contains itself: let the model pass tensors, or flat lists "
            "and dicts of them."
        ) from None
    places, end = _places([tensor.numel() * tensor.element_size() for tensor in found])
    return Outgoing(structure, [(at, t) for at, t in zip(places, found, strict=True) if t.numel()], end)


def incoming(structure: bytes, memory: Tensor, copy: bool = True) -> Any:
    """Build a pytree from its structure and the bytes in `memory`, which may be longer. Raises BadFrame.

    Tensors are copies, or, without `copy`, views of that memory, which must not be used for anything else.
    """
    try:
        node = _decoder.decode(structure)
        specs: list[TensorNode] = []
        _collect(node, specs)
        for spec in specs:
            spec.check()
        places, end = _places([spec.num_bytes for spec in specs])
        if end > memory.numel():
            raise BadFrame(f"tensors of {end} bytes are announced, and {memory.numel()} have come.")
        tensors = iter([_tensor(spec, memory, at, copy) for spec, at in zip(specs, places, strict=True)])
        return _pytree(node, tensors)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a received message is not a pytree of values: {error}") from None


def _places(sizes: list[int]) -> tuple[list[int], int]:
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return places, at


def _node(value: Any, found: list[Tensor]) -> Node:
    if isinstance(value, Tensor):
        return _tensor_node(value, found)
    kind = type(value)  # exact types only: attributes of a subclass would be lost
    if kind is list:
        return ListNode(tuple(_node(item, found) for item in value))
    if kind is tuple:
        return TupleNode(tuple(_node(item, found) for item in value))
    if kind is torch.Size:
        return SizeNode(tuple(value))
    if kind is dict:
        for key in value:
            if not _is_number(key):
                raise _refused(key, "a key of a dict")
        return DictNode(tuple(value), tuple(_node(item, found) for item in value.values()))
    if not _is_number(value):
        raise _refused(value, "a value")
    number: Number = value
    return number


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _refused(value: Any, where: str) -> ValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ValueError(
        f"{where} of type {kind} cannot be sent to another worker: values that cross are lists, tuples and dicts of "
        "numbers, strings, None and tensors. Cut the model elsewhere."
    )


def _tensor_node(tensor: Tensor, found: list[Tensor]) -> TensorNode:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(
            f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device} cannot be sent to another worker: dense "
            f"ones of {', '.join(DTYPES)} can. Cut the model elsewhere."
        )
    tensor = tensor.detach()
    order: tuple[int, ...] = ()
    if not tensor.is_contiguous():  # channels last, transposed: sent in memory order, which the receiver restores
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        tensor = tensor.permute(order)
    found.append(tensor)
    return TensorNode(name, tuple(tensor.shape), order)


def _collect(node: Node, specs: list[TensorNode]) -> None:
    match node:
        case TensorNode():
            specs.append(node)
        case ListNode() | TupleNode():
            for item in node.items:
                _collect(item, specs)
        case DictNode():
            if len(node.keys) != len(node.values):
                raise BadFrame(f"a dict of {len(node.keys)} keys and {len(node.values)} values.")
            for item in node.values:
                _collect(item, specs)


def _tensor(spec: TensorNode, memory: Tensor, at: int, copy: bool) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if not prod(spec.shape):
        tensor = torch.empty(spec.shape, dtype=dtype)
    else:
        tensor = memory[at : at + spec.num_bytes].view(dtype).view(spec.shape)
        tensor = tensor.clone() if copy else tensor
    if not spec.order:
        return tensor
    return tensor.permute([spec.order.index(dim) for dim in range(len(spec.order))])


def _pytree(node: Node, tensors: Any) -> Any:
    match node:
        case TensorNode():
            return next(tensors)
        case ListNode():
            return [_pytree(item, tensors) for item in node.items]
        case TupleNode():
            return tuple(_pytree(item, tensors) for item in node.items)
        case SizeNode():
            return torch.Size(node.sizes)
        case DictNode():
            return {key: _pytree(item, tensors) for key, item in zip(node.keys, node.values, strict=True)}
    return node
