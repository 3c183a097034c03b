"""Find a codec by what was typed, such as `topk:0.01` or `qsgd:bits=8,bucket=256`."""

from __future__ import annotations

import ast
from dataclasses import fields
from inspect import isclass
from pathlib import Path
from typing import Any

from rainband.codecs.codec import Codec
from rainband.plugins import Family, find, names_of
from rainband.settings import as_plain, build, parse_pairs


def _is_codec(value: object) -> bool:
    return isclass(value) and issubclass(value, Codec)


CODECS = Family("codec", "codecs", _is_codec, frozenset(("codec", "find", "packing", "pushes", "sparse")))


def codec_names() -> list[str]:
    return names_of(CODECS)


def codec_summary(name: str) -> str:
    """Return the first line of a codec's file, without importing it."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def find_codec(name: str) -> type[Codec]:
    """Return the codec's class."""
    found = find(CODECS, name)
    if not _is_codec(found):
        raise ValueError(f"{name} is not a codec: make it a dataclass that inherits from rainband.codecs.codec.Codec.")
    cls: type[Codec] = found
    return cls


def load_codec(typed: str) -> Codec:
    """Return the codec that a text names: NAME, NAME:VALUE of its first setting, or NAME:setting=value,...

    A codec of the user's own is module:Class, with settings after a second colon.
    """
    name, settings = _parts(typed)
    cls = find_codec(name)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    pairs = [word for word in settings.split(",") if word.strip()]
    if pairs and "=" not in pairs[0]:
        if not known:
            raise ValueError(f"{name} has no settings: type {name}, without :{settings}.")
        pairs[0] = f"{known[0]}={pairs[0].strip()}"
    return build(cls, parse_pairs(pairs), name)


def _parts(typed: str) -> tuple[str, str]:
    name, _, settings = typed.strip().partition(":")
    if name not in codec_names() and settings and settings.partition(":")[0].isidentifier():
        cls, _, settings = settings.partition(":")  # module:Class
        return f"{name}:{cls}", settings
    return name, settings


def text_of(codec: Codec | str) -> str:
    """Return a codec as it is typed and as a configuration has it; raise ValueError if there is none such."""
    if isinstance(codec, str):
        load_codec(codec)
        return codec.strip()
    if not isinstance(codec, Codec):
        raise ValueError(f'{codec!r} is not a codec: give a text such as "topk:0.01", or one of rainband.codecs.')
    cls = type(codec)
    name = cls.__module__.rpartition(".")[2]
    if not cls.__module__.startswith("rainband.codecs."):
        name = f"{cls.__module__}:{cls.__name__}"
    settings = ",".join(f"{key}={_word(value)}" for key, value in as_plain(codec).items())
    return f"{name}:{settings}" if settings else name


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
