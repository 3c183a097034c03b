"""Find a strategy or a task by its name: a file in its folder, or module:name of the user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rainband.errors import did_you_mean
from rainband.settings import build
from rainband.strategy import Strategy


class Family(NamedTuple):
    """Plugins of one kind: the built-in ones are classes, each in a file of its own below one folder of the package."""

    kind: str  # "strategy" or "task"
    folder: str
    is_plugin: Callable[[object], bool]
    no_plugins: frozenset[str] = frozenset()  # other files in this folder


def _is_strategy(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Strategy)


STRATEGIES = Family("strategy", "strategies", _is_strategy)


def names_of(family: Family) -> list[str]:
    """Return the names of the built-in plugins, without importing them."""
    return sorted(_modules_of(family))


def _modules_of(family: Family) -> dict[str, str]:
    """Return the module of each built-in plugin, by name; sub-folders only group files."""
    root = Path(__file__).parent
    files = (file.relative_to(root) for file in (root / family.folder).rglob("*.py") if not file.stem.startswith("_"))
    return {
        file.stem: ".".join(("rainband", *file.with_suffix("").parts))
        for file in files
        if file.stem not in family.no_plugins
    }


def find(family: Family, name: str) -> Any:
    """Return the class of a built-in plugin, or whatever the user's module has under this name."""
    if ":" in name:
        return _find_in_module(family, *name.split(":", 1))
    if name not in (names := names_of(family)):
        raise ValueError(
            f"no {family.kind} named '{name}'{did_you_mean(name, names)}: choose from {', '.join(names)}, "
            f"or type module:name for your own {family.kind}."
        )
    default = f"rainband.{family.folder.replace('/', '.')}.{name}"
    module = importlib.import_module(_modules_of(family).get(name, default))
    classes = [value for value in vars(module).values() if inspect.isclass(value) and family.is_plugin(value)]
    (found,) = [cls for cls in classes if cls.__module__ == module.__name__]
    return found


def _find_in_module(family: Family, module_name: str, name: str) -> object:
    module = _import_users_module(module_name)
    if not hasattr(module, name):
        names = _defined_in(module, family)
        what = f"it has {', '.join(names)}" if names else f"it defines no {family.kind}"
        raise ValueError(f"{module_name} has no '{name}'{did_you_mean(name, names)}: {what}.")
    return getattr(module, name)


def _defined_in(module: Any, family: Family) -> list[str]:
    """Return the names of the plugins in a user's module, without what it imports; of tasks, also what makes one."""
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
    }
    makers = [name for name, value in own.items() if inspect.isfunction(value)] if family is not STRATEGIES else []
    return [name for name, value in own.items() if family.is_plugin(value)] + makers


def search_current_folder() -> str:
    """Let modules in the current folder be imported, here and in the processes of a run; return the folder."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # permanently, because a module may import others later
    return folder


def _import_users_module(name: str) -> Any:
    folder = search_current_folder()
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"'{name}' is not the name of a module: type module:name, such as mylab:mine.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        hint = where_to_run(name)
        raise ValueError(f"no module named '{name}', neither installed nor in {folder}. {hint}") from error


def where_to_run(module: str) -> str:
    """Return what to type if this module of the user's is not found."""
    if module.endswith(".py"):
        return f"Omit the ending: {module.removesuffix('.py')}."
    return f"Run the command in the folder that contains {module.replace('.', '/')}.py."


def strategy_names() -> list[str]:
    return names_of(STRATEGIES)


def find_strategy(name: str) -> type[Strategy]:
    """Return the strategy's class."""
    found = find(STRATEGIES, name)
    if not _is_strategy(found):
        raise ValueError(
            f"{name} is not a strategy: make it a dataclass that inherits from rainband.strategy.Strategy."
        )
    cls: type[Strategy] = found
    if missing := sorted(cls.__abstractmethods__):
        raise ValueError(f"{name} has no method {' and '.join(missing)}, which every strategy requires: define it.")
    return cls


def typed_name(strategy: Strategy) -> str:
    """Return the name that users type for a strategy: that of its file, or of the class of their own."""
    folder, _, name = type(strategy).__module__.rpartition(".")
    is_built_in = folder.startswith("rainband.strategies") and name in strategy_names()
    return name if is_built_in else type(strategy).__name__


def load_strategy(name: str, settings: Mapping[str, object]) -> Strategy:
    """Return the strategy with these settings, checked against its fields."""
    return build(find_strategy(name), settings)
