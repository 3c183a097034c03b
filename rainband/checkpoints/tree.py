"""Nested state, such as that of optimizers and schedulers, as a text without its tensors, and the tensors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

MAX_DEPTH = 64


def split(value: Any) -> tuple[str, dict[str, Tensor]]:
    """Return lists, tuples, dicts, numbers, strings and tensors as a text and the tensors."""
    tensors: dict[str, Tensor] = {}
    return msgspec.json.encode(_plain(value, tensors, "")).decode(), tensors


def joined(text: str, tensor: Callable[[str], Tensor | None]) -> Any:
    """Return what `split` has split; `tensor` returns a tensor by its name. Raise ValueError for any other text."""
    try:
        return _nested(msgspec.json.decode(text), tensor, 0)
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"its structure cannot be read ({type(error).__name__}: {error})") from None


def _plain(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if hasattr(value, "untyped_storage"):  # a tensor; torch is not imported for this
        name = path or "value"
        while name in tensors:  # {"a": {"b": tensor}, "a/b": tensor}, {1: tensor, "1": tensor}
            name += "+"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        keys = [_plain(key, {}, "") for key in value]
        items = [_plain(item, tensors, f"{path}/{key}".lstrip("/")) for key, item in value.items()]
        return {"dict": [[key, item] for key, item in zip(keys, items, strict=True)]}
    if isinstance(value, list | tuple):
        items = [_plain(item, tensors, f"{path}/{i}".lstrip("/")) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": str(value)}
    if isinstance(value, float):
        return float(value)  # of numpy
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 63:
        return {"int": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{path} is a {type(value).__name__}, which no checkpoint can hold: use tensors, numbers and strings, in "
        "lists, tuples and dicts."
    )


def _nested(value: Any, tensor: Callable[[str], Tensor | None], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"its structure is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"its structure has {len(value)} kinds at one place")
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return tensor(content)
        case "dict":
            return {_nested(key, tensor, depth + 1): _nested(item, tensor, depth + 1) for key, item in content}
        case "list":
            return [_nested(item, tensor, depth + 1) for item in content]
        case "tuple":
            return tuple(_nested(item, tensor, depth + 1) for item in content)
        case "float":
            return float(content)
        case "int":
            return int(content)
    raise ValueError(f"its structure has the unknown kind {kind!r}")
