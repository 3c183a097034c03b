"""Tasks: a model, its data and its loss. One file per built-in task, and the classes to write your own."""

from __future__ import annotations

from rainband.tasks.load import load_task, task_names
from rainband.tasks.task import (
    Data,
    DatasetData,
    ModuleTask,
    Task,
    TensorData,
    accuracy_and_loss,
    fingerprint,
    parameter_groups,
)

__all__ = [
    "Data",
    "DatasetData",
    "ModuleTask",
    "Task",
    "TensorData",
    "accuracy_and_loss",
    "fingerprint",
    "load_task",
    "parameter_groups",
    "task_names",
]
