"""The contents of a server as bytes and tensors, from which another server becomes its copy.

Everything that decides what the server does next is in them: parameters, optimizers, accepted batches, clocks, buffered
gradients, readers that wait. They are numbers, texts, collections of these, tensors and message types: no code, and
the receiver gives them to objects that it has made itself from the same assignment.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import torch
from torch import Tensor

from rainband.protocol.accepted_set import AcceptedSet
from rainband.protocol.data_plan import BatchRange, DataPlan
from rainband.protocol.messages import AnyMessage, Peer
from rainband.protocol.saved_state import SavedBlock
from rainband.rules.clocks import Clocks
from rainband.rules.rule import Rule
from rainband.server.block import Block
from rainband.server.block_accounting import BlockAccounting
from rainband.server.progress_report import ProgressReport
from rainband.server.readers import Readers
from rainband.server.validation import PushValidator

if TYPE_CHECKING:
    from rainband.server.server import Server

STRUCTS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind for kind in (*get_args(AnyMessage), Peer, BatchRange, DataPlan)
}
OWN = (Block, BlockAccounting, AcceptedSet, Rule, Clocks, Readers, PushValidator, ProgressReport)
# Made from the assignment, or copied in another way.
MADE = frozenset(("buffer", "codec", "commands", "blocks", "observer", "parameters", "schedule", "spec", "values"))
BIGGEST = 1 << 63  # larger numbers, such as masks of 64 batches, are texts


def contents_of(server: Server) -> tuple[bytes, Tensor]:
    """Return the contents of a server, and the bytes of its tensors."""
    tensors: list[Tensor] = []
    packed = {
        "server": [server.term, server.adjusted, _pack(server.began, tensors)],
        "parts": [_attributes(part, tensors) for part in (server.readers, server.progress, server.validator)],
        "blocks": [[index, _parameters(b, tensors), _attributes(b, tensors)] for index, b in server.blocks.items()],
    }
    kinds = [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in tensors]
    raw = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    return msgspec.msgpack.encode([packed, kinds]), torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)


def fill_server(server: Server, contents: bytes, values: Tensor | None) -> None:
    """Give a server, which has the same blocks, these contents; ValueError if they do not fit."""
    packed, kinds = msgspec.msgpack.decode(contents)
    tensors = list(_cut(kinds, values))
    unpack = _Unpacker(tensors)
    server.promote(packed["server"][0])
    server.adjusted, server.began = packed["server"][1], unpack.value(packed["server"][2])
    for part, attributes in zip((server.readers, server.progress, server.validator), packed["parts"], strict=True):
        unpack.fill(part, attributes)
    for index, parameters, attributes in packed["blocks"]:
        block = server.blocks[index]
        unpack.fill(block, attributes)
        _fill_parameters(block, unpack.value(parameters))


def _parameters(block: Block, tensors: list[Tensor]) -> Any:
    parameters = block.parameters
    optimizer, numbers, absent = parameters.saved_state()
    first = {name: [values, list(absent)] for name, (values, absent) in parameters.first_state.items()}
    return _pack(
        {
            "values": block.values.clone(),
            "buffers": [tensor.clone() for tensor in block.buffer.tensors],
            "optimizer": optimizer,
            "numbers": numbers,
            "absent": absent,
            "lr_factor": parameters.lr_factor,
            "first": first,
            "groups_of": parameters.groups_of,
            "groups": parameters.groups,
            "first_groups": parameters.first_groups,
        },
        tensors,
    )


def _fill_parameters(block: Block, given: dict[str, Any]) -> None:
    parameters = block.parameters
    saved = SavedBlock(
        version=block.version,
        first_open=0,
        lr_factor=given["lr_factor"],
        numbers=given["numbers"],
        absent=given["absent"],
    )
    parameters.restore(given["values"], given["optimizer"], saved)
    parameters.first_state = {name: (values, tuple(absent)) for name, (values, absent) in given["first"].items()}
    parameters.first_groups, parameters.groups_of = given["first_groups"], given["groups_of"]
    if parameters.groups_of:
        parameters.optimizer.update_groups(given["groups"])
        parameters.groups = given["groups"]
    for mine, theirs in zip(block.buffer.tensors, given["buffers"], strict=True):
        mine.copy_(theirs)
    block.buffer.begin_at(block.version)


def _attributes(thing: object, tensors: list[Tensor]) -> dict[str, Any]:
    """Return the attributes of one of our objects that change while a server runs."""
    return {
        name: _attributes(value, tensors) if isinstance(value, OWN) else _pack(value, tensors)
        for name, value in vars(thing).items()
        if name not in MADE and not isinstance(value, Callable)  # type: ignore[arg-type]
    }


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as msgpack has it: a list of a letter for its kind, and its contents; plain values as they are."""
    match value:
        case None | bool() | float() | str() | bytes():
            return value
        case int():
            return value if -BIGGEST <= value < BIGGEST else ["i", hex(value)]
        case Tensor():
            tensors.append(value.detach().clone().reshape(-1))
            return ["t", len(tensors) - 1]
        case Counter():
            return ["c", _pairs(value, tensors)]
        case dict():
            return ["d", _pairs(value, tensors)]
        case list() | tuple() | set() | frozenset() | deque():
            letter = {list: "l", tuple: "u", set: "s", frozenset: "f", deque: "q"}.get(type(value), "")
            if letter:
                return [letter, [_pack(one, tensors) for one in value]]
        case msgspec.Struct() if STRUCTS.get(type(value).__name__) is type(value):
            return ["m", type(value).__name__, msgspec.msgpack.encode(value)]
    raise ValueError(f"a {type(value).__name__} of a server cannot be copied: {value!r:.100}")


def _pairs(value: dict[Any, Any], tensors: list[Tensor]) -> list[Any]:
    return [[_pack(key, tensors), _pack(one, tensors)] for key, one in value.items()]


def _cut(kinds: list[tuple[str, int]], values: Tensor | None) -> list[Tensor]:
    """Return the tensors that were put one after the other."""
    found, at = [], 0
    whole = torch.empty(0, dtype=torch.uint8) if values is None else values
    for name, numel in kinds:
        dtype: torch.dtype = getattr(torch, name)
        num_bytes = numel * dtype.itemsize
        if at + num_bytes > whole.numel():
            raise ValueError(f"the contents of a server are cut off after {whole.numel()} bytes")
        found.append(whole[at : at + num_bytes].clone().view(dtype))
        at += num_bytes
    return found


class _Unpacker:
    """Makes values of what was packed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def value(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        letter, contents = packed[0], packed[1]
        match letter:
            case "i":
                return int(contents, 16)
            case "t":
                return self.tensors[contents]
            case "c" | "d":
                pairs = {self.value(key): self.value(one) for key, one in contents}
                return Counter(pairs) if letter == "c" else pairs
            case "m":
                return msgspec.msgpack.decode(packed[2], type=STRUCTS[contents])
        kinds: dict[str, Callable[[list[Any]], Any]] = {"l": list, "u": tuple, "s": set, "f": frozenset, "q": deque}
        return kinds[letter]([self.value(one) for one in contents])

    def fill(self, thing: object, attributes: dict[str, Any]) -> None:
        """Give one of our objects these attributes; what others share with it stays shared."""
        known = vars(thing)
        if unknown := attributes.keys() - known.keys():
            raise ValueError(f"a {type(thing).__name__} has no {', '.join(sorted(unknown))}")
        for name, packed in attributes.items():
            before = known[name]
            if isinstance(before, OWN):
                self.fill(before, packed)
                continue
            value = self.value(packed)
            if isinstance(before, dict) and isinstance(value, dict):
                before.clear()
                before.update(value)
            else:
                known[name] = value
