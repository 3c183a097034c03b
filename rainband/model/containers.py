"""State dictionaries as lists, dicts, numbers and tensors, which travel without pickle.

Containers of other types, such as the Counter of a MultiStepLR, are marked with the name of their type, and restored as
that type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TYPE = "container type"  # the key that marks a container which is not a plain list, tuple or dict
DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(dict, items),  # the optimizers' own state
}
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "deque": deque,
    "set": set,
    "frozenset": frozenset,
}


def marked(value: Any) -> Any:
    """Return lists, tuples, dicts, numbers, strings and tensors in place of other containers."""
    kind = type(value)
    if isinstance(value, dict):
        plain = {key: marked(item) for key, item in value.items()}
        return plain if kind is dict else {TYPE: kind.__name__, "items": plain}
    if isinstance(value, Tensor):
        return value.detach()
    if kind in (list, tuple):
        return kind(marked(item) for item in value)
    if kind.__name__ in LISTS:
        return {TYPE: kind.__name__, "items": [marked(item) for item in value]}
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return value.item()
    if value is None or kind in (bool, int, float, str, torch.Size):
        return value
    raise ValueError(
        f"a state_dict has a value of type {kind.__name__}, which another worker cannot receive: numbers, strings, "
        "tensors, lists, tuples and dicts are possible."
    )


def restored(value: Any) -> Any:
    """Return the containers that `marked` has replaced."""
    if isinstance(value, dict):
        if TYPE in value:
            name, items = value[TYPE], restored(value["items"])
            return LISTS[name](items) if name in LISTS else DICTS.get(name, dict)(items)
        return {key: restored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values, in order; a copy if they lie elsewhere, or in another order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
