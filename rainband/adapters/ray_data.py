"""A `ray.data.Dataset` as the dataset of a task: `rainband.fit(rainband.ModuleTask(Net, dataset, loss_fn))`.

Ray Data streams rows, and training picks samples at random. So `fit` reads the rows once, in the driver, and the
workers get them as tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rainband.tasks.task import ModuleTask, is_of_ray

if TYPE_CHECKING:
    from torch import Tensor

TaskType = TypeVar("TaskType")


def with_rows(task: TaskType) -> TaskType:
    """Return a task whose Ray dataset has been read; any other task as it is."""
    if not isinstance(task, ModuleTask) or not is_of_ray(task.dataset):
        return task
    from torch.utils.data import TensorDataset

    return dataclasses.replace(task, dataset=TensorDataset(*columns_of(task.dataset)))


def columns_of(dataset: Any) -> list[Tensor]:
    """Read the two columns of a Ray dataset, inputs and targets; raise ValueError if it has others."""
    import numpy as np
    import torch

    names = dataset.columns()
    if names is None or len(names) != 2:
        raise ValueError(
            f"the Ray dataset has the columns {', '.join(names or ['(none)'])}, and a task needs two, inputs and "
            'targets: choose them with dataset.select_columns(["inputs", "targets"]).'
        )
    with _in_order():
        batches = list(dataset.iter_batches(batch_size=None, batch_format="numpy"))
    columns = []
    for name in names:
        arrays = [batch[name] for batch in batches]
        wrong = {str(array.dtype) for array in arrays if array.dtype.kind not in "biuf"}
        shapes = {array.shape[1:] for array in arrays}
        if wrong or len(shapes) != 1:
            found = f"values of type {', '.join(sorted(wrong))}" if wrong else f"samples of the shapes {sorted(shapes)}"
            raise ValueError(
                f"the column {name} of the Ray dataset has {found}, and a task needs numbers of one shape: convert "
                "them with dataset.map."
            )
        columns.append(torch.from_numpy(np.concatenate(arrays)))
    return columns


@contextmanager
def _in_order() -> Iterator[None]:
    """Have Ray deliver rows in their order, so that a run can be repeated; afterwards as the user has set it."""
    from ray.data import DataContext

    options = DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before
