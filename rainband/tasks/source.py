"""Read the settings and docstring of a built-in task from its source, because importing it would import torch."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rainband.settings import Setting, check_value, docs_in, fields_of

PLAIN = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class TaskFile:
    """The description of a built-in task that `rainband explain` prints."""

    name: str
    class_name: str
    text: str  # the docstring of the file
    file: Path
    settings: list[Setting]
    twin: type  # a dataclass with the same fields and nothing else


def read_task(name: str) -> TaskFile:
    file = Path(__file__).with_name(f"{name}.py")
    source = file.read_text(encoding="utf-8")
    module = ast.parse(source)
    (task,) = [node for node in module.body if isinstance(node, ast.ClassDef) and _has_method(node, "evaluate")]
    twin = dataclasses.make_dataclass(task.name, list(_fields(task)), frozen=True)
    docs = docs_in(ast.get_source_segment(source, task) or "")
    settings = [dataclasses.replace(setting, doc=docs.get(setting.name, "")) for setting in fields_of(twin)]
    return TaskFile(name, task.name, (ast.get_docstring(module) or "").strip(), file, settings, twin)


def check_values(task: TaskFile, settings: Mapping[str, Any]) -> None:
    """Raise an error for a wrong value, with the name under which it was typed."""
    for name, value in settings.items():
        check_value(task.twin, name, value, f"task.{name}")


def _has_method(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(item, ast.FunctionDef) and item.name == name for item in node.body)


def _fields(task: ast.ClassDef) -> Iterator[tuple[str, Any, Any]]:
    for node in task.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = MISSING if node.value is None else ast.literal_eval(node.value)
            yield node.target.id, _type(node.annotation), dataclasses.field(default=default)


def _type(annotation: ast.expr) -> Any:
    match annotation:
        case ast.Name(id=name) if name in PLAIN:
            return PLAIN[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left) | _type(right)
    raise AssertionError(f"the settings of a built-in task must have plain types, not {ast.unparse(annotation)}")
