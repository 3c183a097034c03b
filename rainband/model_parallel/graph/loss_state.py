"""Find what a task's loss changes: compare the values that its code can reach, before a call and after it.

Reached are the task's attributes, and the closures, defaults, attributes and named globals of its loss and of the
user's functions and classes that the loss names, each with everything inside. Not reached: what libraries keep, running
generators, files, imports inside a function, and what is past the first `MOST` objects or `MOST_BYTES` of tensors.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from logging import Logger
from random import Random
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

if TYPE_CHECKING:
    from rainband.tasks.task import Task

MOST = 50_000  # objects; a dataset held as a list may have millions
MOST_BYTES = 1 << 28  # of tensors and arrays whose values are compared; of others, torch's count of changes
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
PLAIN = (bool, int, float, complex, str, bytes, type(None))
OURS = __name__.partition(".")[0]


class LossState:
    """A snapshot of what a task's loss can reach."""

    def __init__(self, task: Task) -> None:
        self._kept: list[object] = []  # so that no new object gets the id of one of them
        self._known: set[int] = set()
        self._waiting: deque[tuple[str, Any]] = deque()
        self._bytes_left = MOST_BYTES
        self.values: dict[str, object] = {}
        self._add("the task", task)
        self._add("the loss", task.loss)
        while self._waiting and len(self._kept) < MOST:
            self._look_into(*self._waiting.popleft())

    def changed_since(self, before: LossState) -> str | None:
        """Return the name of a value that is not what it was, or None."""
        for name in [*before.values, *(name for name in self.values if name not in before.values)]:
            if before.values.get(name) != self.values.get(name):
                return name
        return None

    def _add(self, name: str, value: Any) -> None:
        """Note the value under this name, and look into it later."""
        if isinstance(value, PLAIN):
            self.values[name] = type(value), repr(value)
            return
        if not isinstance(value, MethodType):  # methods are new objects each time
            self.values[name] = id(value)
        if id(value) not in self._known:
            self._known.add(id(value))
            self._kept.append(value)
            self._waiting.append((name, value))

    def _look_into(self, name: str, value: Any) -> None:
        size = getattr(value, "nbytes", 0) if isinstance(value, torch.Tensor | np.ndarray) else 0
        hashes = size <= self._bytes_left
        self._bytes_left -= size * hashes
        content = _content(value, hashes)
        if content is not None:
            self.values[f"{name} (its values)"] = content
        for inner, found in _inside(value):
            self._add(_full_name(name, inner), found)


def _full_name(name: str, inner: str) -> str:
    if inner.startswith("the global "):
        return inner
    return f"the task's '{inner[1:]}'" if name == "the task" and inner.startswith(".") else f"{name}{inner}"


def _content(value: Any, hashes: bool) -> object:
    """Return what changes when this object changes in place, if its attributes and items do not show it."""
    match value:
        case torch.Tensor():
            return (
                value.shape,
                None if value.is_inference() else value._version,
                _hash_of_tensor(value) if hashes else None,
            )
        case np.ndarray() if hashes and not value.dtype.hasobject:
            return value.shape, xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())
        case torch.Generator():
            return xxhash.xxh3_64_hexdigest(value.get_state().numpy().tobytes())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr(value.get_state(legacy=False))
        case Random():
            return hash(value.getstate())
        case set() | frozenset():
            return frozenset(_name_of_item(item) for item in value)
        case bytearray() | count():
            return repr(value)
    return None


def _hash_of_tensor(tensor: torch.Tensor) -> str | None:
    """Return a hash of a dense tensor in main memory."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return None
    if tensor.is_quantized or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else ""


def _name_of_item(item: Any) -> str:
    return repr(item) if isinstance(item, PLAIN) else f"{type(item).__name__} {id(item)}"


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object holds, each with its name."""
    match value:
        case torch.Tensor() | np.ndarray() | ModuleType() | BuiltinFunctionType() | CodeType() | Logger():
            return
        case FunctionType():
            yield from _inside_function(value)
            return
        case MethodType():
            yield "", value.__func__
            yield "", value.__self__
            return
        case partial():
            yield ".func", value.func
            yield from ((f".args[{index}]", found) for index, found in enumerate(value.args))
            yield from ((f".{name}", found) for name, found in value.keywords.items())
        case type():
            if _is_of_the_user(value.__module__):
                yield from ((f".{name}", found) for name, found in list(vars(value).items()) if not _is_special(name))
                yield from (("", base) for base in value.__bases__)
            return
        case property():
            yield "", value.fget
        case staticmethod() | classmethod():
            yield "", value.__func__
        case dict():
            yield from ((f"[{_name_of_item(key)}]", found) for key, found in list(value.items()))
        case list() | tuple() | deque():
            yield from ((f"[{index}]", found) for index, found in enumerate(list(value)))
    yield from ((f".{name}", found) for name, found in list(getattr(value, "__dict__", {}).items()))
    yield from _slots(value)
    yield "'s class", type(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ()) if _is_of_the_user(kind.__module__) else ()
        for name in [slots] if isinstance(slots, str) else slots:
            if not _is_special(name) and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _inside_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return what a function of the user can change: its closure, defaults and attributes, and the globals it names."""
    if not _is_of_the_user(function.__module__):
        return
    for name, variable in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"'s variable {name}", variable.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"'s default {index}", found) for index, found in enumerate(function.__defaults__ or ()))
    yield from ((f"'s default {name}", found) for name, found in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", found) for name, found in vars(function).items())
    globals_, module = function.__globals__, function.__module__
    attributes = set(function.__code__.co_names)
    for name in sorted(_named(function.__code__)):
        if name not in globals_:
            continue
        found = globals_[name]
        yield f"the global {module}.{name}", found
        if isinstance(found, ModuleType) and _is_of_the_user(found.__name__):
            for attribute in sorted(attributes & vars(found).keys()):
                yield f"the global {found.__name__}.{attribute}", vars(found)[attribute]


def _named(code: CodeType) -> set[str]:
    """Return the globals that code names, also in functions inside it."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    inner: Iterable[CodeType] = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*map(_named, inner))


def _is_of_the_user(module: str | None) -> bool:
    """Return False for Python's own modules, installed packages and this library."""
    name = (module or "").partition(".")[0]
    if name in sys.stdlib_module_names - {"__main__"} or name in (OURS, "torch", "numpy"):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not file.startswith(LIBRARIES)
