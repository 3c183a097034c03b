"""Convert key=value words to the fields of a frozen dataclass, and describe these fields.

    parse_pairs(["n_push=4"])               {"n_push": "4"}
    build(Downpour, {"n_push": "4"})        Downpour(n_push=4)
    as_dict(Downpour(n_push=4))             {"n_push": 4, ...}, from which `build` makes an equal one
    fields_of(Downpour)                     the rows that `rainband explain downpour` prints

A field may be an int, float, bool or str, a Literal, a tuple of these, or a union of these and None.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import numbers
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass

from rainband.errors import did_you_mean

T = typing.TypeVar("T")

RENAMED = {
    "schedule": "lr_schedule",
    "warmup": "warmup_fraction",
    "low": "min_bound",
    "high": "max_bound",
    "tau_last": "tau_end",
    "warm_batches": "warm_start_batches",
    "compensation_memory": "compensation_decay",
    "batch": "data_fraction",
    "overlap": "overlap_fraction",
    "micros": "batches_per_update",
    "double_buffered": "pipedream_2bw",
}  # names of earlier development versions, for hints
WORDS_FOR_BOOL = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """The description of one field."""

    name: str
    type: str  # in words: "a whole number"
    default: object  # dataclasses.MISSING if a value is required
    doc: str  # the comment beside the field in the source, or ""


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Split ["n_push=4", "lr=0.1"] into {"n_push": "4", "lr": "0.1"}."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ValueError(f"'{pair}' is not a setting: write name=value, such as {name or 'n_push'}=4.")
        if name in settings:
            raise ValueError(f"{name} is set twice, to {settings[name]} and to {value.strip()}: keep one of them.")
        settings[name] = value.strip()
    return settings


def build(cls: type[T], settings: Mapping[str, object], called: str = "") -> T:
    """Make a `cls` from settings that are text, as typed, or values, as read from a file.

    An error about an unknown setting calls the class `called`.
    """
    kinds = _kinds_of(cls)
    for name in settings:
        if name not in kinds:
            raise ValueError(_no_such_setting(called or cls.__name__, name, sorted(kinds)))
    for field in _settable(cls):
        if field.name not in settings and _default_of(field) is MISSING:
            kind = kinds[field.name]
            raise ValueError(f"{cls.__name__} requires {field.name}={kind.example}: it is {kind.expected}.")
    return cls(**{name: _convert(name, value, kinds[name]) for name, value in settings.items()})


def check_value(cls: type, name: str, value: object, shown_as: str) -> None:
    """Raise if a field of `cls` cannot have this value; `shown_as` is its name in the error."""
    _convert(shown_as, value, _kinds_of(cls)[name])


def check_arguments(cls: type, arguments: Mapping[str, object]) -> None:
    """Raise if a call cls(**arguments) has a wrong name or value; other than `build`, it converts no text."""
    accepted = inspect.signature(cls).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
    try:
        kinds = _kinds_of(cls)
    except NameError:  # a class inside a function, whose annotations cannot be read
        kinds = {}
    for name, value in arguments.items():
        if name not in accepted and not takes_any:
            raise TypeError(_no_such_setting(cls.__name__, name, sorted(accepted)))
        if name not in kinds or (isinstance(value, numbers.Number) and not isinstance(value, int | float)):
            continue  # a number of another library behaves like one of Python's
        kind = kinds[name]
        try:
            found = kind.read(value)
        except (ValueError, OverflowError):
            found = None
        if isinstance(value, str) != isinstance(found, str) or (found is None and value is not None):
            such_as = f", such as {name}={kind.example}" if kind.example and kind.read is not _read_str else ""
            raise ValueError(f"{name}={value!r}: expected {kind.expected}{such_as}")


def as_dict(instance: object) -> dict[str, object]:
    """Return the settings of `instance` by name, ready for `build` or a log line."""
    return {field.name: getattr(instance, field.name) for field in _settable(type(instance))}


def as_plain(instance: object) -> dict[str, object]:
    """Return the settings of `instance` without those that JSON cannot express; an infinite number becomes text."""
    return {name: _without_infinity(value) for name, value in as_dict(instance).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _without_infinity(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def fields_of(cls: type) -> list[Setting]:
    """Describe the settings of `cls`, in the order of its fields."""
    kinds, docs = _kinds_of(cls), _docs_of(cls)
    return [
        Setting(field.name, kinds[field.name].expected, _default_of(field), docs.get(field.name, ""))
        for field in _settable(cls)
    ]


def _settable(cls: type) -> list[dataclasses.Field[object]]:
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a dataclass, so it has no settings"
    return [field for field in dataclasses.fields(cls) if field.init]


def _default_of(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _hint(name: str, known: list[str]) -> str:
    new = RENAMED.get(name, "")
    return f" (it is now {new})" if new in known else did_you_mean(name, known)


def _no_such_setting(owner: str, name: str, known: list[str]) -> str:
    return f"{owner} has no setting '{name}'{_hint(name, known)}: it has {', '.join(known) or 'none'}."


@dataclass(frozen=True)
class _Kind:
    read: Callable[[object], object]  # raises ValueError when the value is not of this kind
    expected: str  # "a whole number"
    example: str  # "4"; "" if text cannot express one


def _convert(name: str, value: object, kind: _Kind) -> object:
    try:
        return kind.read(value)
    except (ValueError, OverflowError):
        such_as = f", such as {name}={kind.example}" if kind.example else ""
        raise ValueError(f"{name}={value}: expected {kind.expected}{such_as}") from None


def _kinds_of(cls: type) -> dict[str, _Kind]:
    hints = typing.get_type_hints(cls)
    return {field.name: _kind_of(hints[field.name]) for field in _settable(cls)}


def _kind_of(annotation: object) -> _Kind:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _one_of(args)
    if origin in (typing.Union, types.UnionType):
        return _first_of([_kind_of(arg) for arg in args])
    if origin is tuple and args[-1] is ...:
        return _many(_kind_of(args[0]))
    if origin is tuple:
        return _exactly([_kind_of(arg) for arg in args])
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    return _Kind(_not_text, "a value made in Python, not text", "")


def _read_int(value: object) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    if isinstance(value, str | int | float):
        return int(value)
    raise ValueError


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    if math.isnan(number := float(value)):
        raise ValueError  # a mistake, and not equal to itself
    return number


def _read_bool(value: object) -> bool:
    word = str(value).lower()
    if word not in WORDS_FOR_BOOL:
        raise ValueError
    return WORDS_FOR_BOOL[word]


def _read_str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _read_none(value: object) -> None:
    if value is not None and str(value).lower() != "none":
        raise ValueError


def _not_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError
    return value


_PLAIN: dict[object, _Kind] = {
    int: _Kind(_read_int, "a whole number", "4"),
    float: _Kind(_read_float, "a number", "0.1"),
    bool: _Kind(_read_bool, "true or false", "true"),
    str: _Kind(_read_str, "text", "name"),
    type(None): _Kind(_read_none, "none", "none"),
}


def _one_of(choices: tuple[object, ...]) -> _Kind:
    by_word = {str(choice): choice for choice in choices}

    def read(value: object) -> object:
        if str(value) not in by_word:
            raise ValueError
        return by_word[str(value)]

    return _Kind(read, f"one of {', '.join(by_word)}", next(iter(by_word)))


def _first_of(kinds: list[_Kind]) -> _Kind:
    # none first and text last: every word is text.
    by_strictness = sorted(kinds, key=lambda kind: (kind.read is _read_str) - (kind.read is _read_none))

    def read(value: object) -> object:
        for kind in by_strictness:
            try:
                return kind.read(value)
            except ValueError:
                continue
        raise ValueError

    return _Kind(read, " or ".join(kind.expected for kind in kinds), kinds[0].example)


def _many(kind: _Kind) -> _Kind:
    def read(value: object) -> tuple[object, ...]:
        return tuple(kind.read(item) for item in _items(value))

    example = ",".join([kind.example] * 2)
    return _Kind(read, f"values separated by commas, each {kind.expected}", example)


def _exactly(kinds: list[_Kind]) -> _Kind:
    def read(value: object) -> tuple[object, ...]:
        return tuple(kind.read(item) for kind, item in zip(kinds, _items(value), strict=True))

    example = ",".join(kind.example for kind in kinds)
    return _Kind(read, f"{len(kinds)} values separated by commas: {', '.join(k.expected for k in kinds)}", example)


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")] if value.strip() else []
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError


def _docs_of(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):  # a field that is declared again has the comment of the later class
        if dataclasses.is_dataclass(owner):
            docs |= _docs_in_source(owner)
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
    try:
        return docs_in(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}  # typed at a prompt: there is no file


def docs_in(source: str) -> dict[str, str]:
    """Return the comments beside the fields of a class, by field, from its source."""
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines = source.splitlines()
    return {
        node.target.id: _comment_after(lines, node) or _text_below(after) or _comment_above(lines, node)
        for node, after in zip(definition.body, [*definition.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _comment_after(lines: list[str], node: ast.AnnAssign) -> str:
    assert node.end_lineno is not None and node.end_col_offset is not None
    # ast counts bytes, and the line may hold more than ASCII before the comment.
    rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
    return rest.removeprefix("#").strip() if rest.startswith("#") else ""


def _comment_above(lines: list[str], node: ast.AnnAssign) -> str:
    margin = " " * node.col_offset + "#"  # deeper comments belong to the line before
    first = node.lineno - 1
    while first > 0 and lines[first - 1].startswith(margin):
        first -= 1
    return " ".join(line.strip().removeprefix("#").strip() for line in lines[first : node.lineno - 1])


def _text_below(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text).partition("\n")[0]
    return ""
