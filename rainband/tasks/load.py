"""Find a task by its name: a built-in task, which is a file in this folder, or the user's own module:name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rainband.errors import did_you_mean
from rainband.settings import as_dict, build
from rainband.tasks.task import Task

NOT_TASKS = {"__init__", "load", "source", "task"}  # every other file in this folder is a task
METHODS = ("model", "data", "loss", "evaluate")
NUMBERS = ("batch_size", "epochs")


def task_names() -> list[str]:
    """Return the names of the built-in tasks, without importing them."""
    return sorted({file.stem for file in Path(__file__).parent.glob("*.py")} - NOT_TASKS)


def load_task(spec: str, settings: Mapping[str, object]) -> Task:
    """Build the task named `spec`; settings may be text, as typed, or values."""
    found = _find(spec)
    if not inspect.isclass(found) and callable(found) and not _is_task(found):
        found = found()
    if missing := [name for name in METHODS if not callable(getattr(found, name, None))]:
        raise ValueError(f"{spec} is not a task: it has no {', '.join(missing)}. A task has {_contract()}.")
    task = _configured(spec, found, settings)
    if missing := [name for name in NUMBERS if not isinstance(getattr(task, name, None), int)]:
        raise ValueError(f"{spec} is not a task: {', '.join(missing)} must be whole numbers of at least 1.")
    for name in NUMBERS:
        if getattr(task, name) < 1:
            raise ValueError(f"{name}={getattr(task, name)}: {name} must be at least 1.")
    return cast(Task, task)


def _configured(spec: str, found: Any, settings: Mapping[str, object]) -> object:
    cls = found if inspect.isclass(found) else type(found)
    if not dataclasses.is_dataclass(cls):
        if settings:
            raise ValueError(
                f"{spec} has no settings, so omit {', '.join(settings)}, or make {cls.__name__} a dataclass."
            )
        return found() if found is cls else found
    if found is cls:
        return build(cls, settings)
    return build(cls, as_dict(found) | dict(settings)) if settings else found


def _find(spec: str) -> Any:
    if ":" in spec:
        return _find_in_module(*spec.split(":", 1))
    if spec not in (names := task_names()):
        raise ValueError(
            f"no task named '{spec}'{did_you_mean(spec, names)}: choose from {', '.join(names)}, "
            "or type module:name for your own task."
        )
    module = importlib.import_module(f"rainband.tasks.{spec}")
    (found,) = [value for value in vars(module).values() if _is_task_class_of(module, value)]
    return found


def _is_task_class_of(module: ModuleType, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__ and _is_task(value)


def _is_task(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in METHODS)


def _find_in_module(module_name: str, name: str) -> object:
    module = _import_users_module(module_name)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise ValueError(f"{module_name} has no '{name}'{did_you_mean(name, names)}: it has {', '.join(names)}.")
    return getattr(module, name)


def _import_users_module(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # permanently, because the module may import others later
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"'{name}' is not the name of a module: type module:name, such as mylab:mine.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        hint = f" Omit the ending: {name.removesuffix('.py')}." if name.endswith(".py") else ""
        raise ValueError(f"no module named '{name}', neither installed nor in {folder}.{hint}") from error


def _contract() -> str:
    return ", ".join([*NUMBERS, *(f"{method}()" for method in METHODS)])
