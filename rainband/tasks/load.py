"""Find a task by its name: a built-in task, which is a file in this folder, or the user's own module:name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

from rainband.plugins import Family, find, names_of
from rainband.settings import as_dict, build
from rainband.tasks.task import Task

METHODS = ("model", "data", "loss", "evaluate")
NUMBERS = ("batch_size", "epochs")


def _is_task(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in METHODS)


TASKS = Family("task", "tasks", _is_task, frozenset(("load", "source", "task")))


def task_names() -> list[str]:
    return names_of(TASKS)


def load_task(spec: str, settings: Mapping[str, object]) -> Task:
    """Build the task named `spec`; settings may be text, as typed, or values."""
    found = find(TASKS, spec)
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


def _contract() -> str:
    return ", ".join([*NUMBERS, *(f"{method}()" for method in METHODS)])
