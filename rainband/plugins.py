"""Find a strategy by its name: a file in strategies/, or module:Class of the user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rainband.errors import did_you_mean
from rainband.settings import build
from rainband.strategy import Strategy


def strategy_names() -> list[str]:
    """The built-in strategies, by their files; nothing is imported for it."""
    folder = Path(__file__).parent / "strategies"
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


def find_strategy(name: str) -> type[Strategy]:
    """The strategy's class."""
    if ":" in name:
        return _from_outside(name)
    if name not in strategy_names():
        names = strategy_names()
        raise ValueError(
            f"no strategy named {name!r}{did_you_mean(name, names)}: choose from {', '.join(names)}, or give "
            "module:Class."
        )
    module = importlib.import_module(f"rainband.strategies.{name}")
    [cls] = [
        member
        for member in vars(module).values()
        if inspect.isclass(member) and member.__module__ == module.__name__ and issubclass(member, Strategy)
    ]
    return cls


def load_strategy(name: str, settings: Mapping[str, object]) -> Strategy:
    """The strategy with these settings, checked against its fields."""
    return build(find_strategy(name), settings)


def _from_outside(name: str) -> type[Strategy]:
    module_name, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        message = f"cannot load the strategy {name}: {error}. Give module:Class, importable from here."
        raise ValueError(message) from None
    if not inspect.isclass(cls) or not issubclass(cls, Strategy):
        raise ValueError(f"{name} is no strategy: a strategy is a dataclass that inherits from rainband.Strategy.")
    return cls
