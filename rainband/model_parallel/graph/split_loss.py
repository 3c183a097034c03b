"""Split a task's loss into the model's inputs and a function of its answer: the model is on several machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.graph import Cut
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.profile import Profile

if TYPE_CHECKING:
    from rainband.tasks.task import Data, Task


@dataclass(frozen=True)
class LossMicrobatch:
    """A microbatch: the model's inputs, and the mean loss of its answer."""

    args: Sequence[Any]
    loss: Callable[[Any], Tensor]
    samples: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Asked(Exception):
    """Raised by the stand-in for the model when the loss calls it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs


class _Asking(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Asked(args, kwargs)


class _Answering(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answers = [answer]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.answers:
            raise ValueError("the task's loss calls its model twice: over several machines it may be called once.")
        return self.answers.pop()


def inputs_of(task: Task, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the task's loss calls the model for this batch."""
    try:
        task.loss(_Asking(), batch)
    except _Asked as asked:
        return asked.call
    except AttributeError as error:
        raise ValueError(
            f"the task's loss uses more of its model than its answer ({error}): over several machines it may only "
            "call it."
        ) from None
    raise ValueError("the task's loss does not call the model, so there is nothing to run on several machines.")


def loss_of(task: Task, batch: Any) -> Callable[[Any], Tensor]:
    """Return the task's loss as a function of the model's answer."""
    return lambda answer: task.loss(_Answering(answer), batch)


def build_model(task: Task) -> nn.Module:
    """Return the task's model; without values if the task is `deferred`: each machine then initializes its own part."""
    if not getattr(task, "deferred", False):
        return task.model()
    with torch.device("meta"):
        return task.model()


def cut_task(task: Task, model: nn.Module, data: Data, batch_size: int) -> tuple[Cut, tuple[Any, ...], dict[str, Any]]:
    """Return the task's model, cut, and an example of its inputs."""
    size = min(batch_size, len(data))
    if size < 2:
        raise ValueError("a model is cut with an example of at least two samples: use a larger batch size.")
    args, kwargs = inputs_of(task, data.batch(range(size)))
    return cut(model, args, kwargs), args, kwargs


def measure_samples(task: Task, cut: Cut, data: Data, samples: int, name: str = "", threads: int = 1) -> Profile:
    """Return the profile for this many samples (or all there are), with a worker's number of torch threads."""
    args, kwargs = inputs_of(task, data.batch(range(min(samples, len(data)))))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return measure(cut, args, kwargs, model=name, repeats=3)
    finally:
        torch.set_num_threads(before)


def microbatches_of(task: Task, data: Data, indices: Sequence[Sequence[int]]) -> list[LossMicrobatch]:
    """Return the microbatches of a pipeline, one for each list of samples."""
    microbatches = []
    for chosen in indices:
        batch = data.batch(chosen)
        args, kwargs = inputs_of(task, batch)
        microbatches.append(LossMicrobatch(args, loss_of(task, batch), len(chosen), kwargs))
    return microbatches
