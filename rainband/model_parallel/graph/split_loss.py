"""Split a task's loss into the model's inputs and a function of its answer: the model is on several machines.

Every machine calls the loss up to the call of the model, to get its inputs. The machine with the model's answer calls
the loss again, with a copy of the batch and the same random numbers, and this time the model returns the answer. A loss
that would notice the difference is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model.seeds import all_random_states, restore_random_states
from rainband.model.unchanged import same_buffers
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.graph import Cut, tensors_in
from rainband.model_parallel.graph.loss_state import LossState
from rainband.model_parallel.graph.split import read_split, split
from rainband.model_parallel.graph.split_tensors import whole_tensors
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.profile import Profile

if TYPE_CHECKING:
    from rainband.model.whole_tensors import WholeTensor
    from rainband.tasks.task import Data, Task

USED = ("forward", "training", "call_super_init")
HELD = ("_parameters", "_buffers", "_modules")  # empty in the stand-in, which a loss would not notice
WITHOUT = "or train the whole model on each worker (without stages)"


@dataclass(frozen=True)
class LossMicrobatch:
    """A microbatch: the model's inputs, and the mean loss of its answer."""

    args: Sequence[Any]
    loss: Callable[[Any], Tensor]
    samples: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Asked(BaseException):  # not an Exception, which a loss may catch
    """Raised by the stand-in for the model when the loss calls it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs


class _LossRefused(BaseException):  # not an Exception, which a loss may catch
    """Raised by the stand-in for the model when the loss does what only one process can."""


class _StandIn(nn.Module):
    """Stands for the model inside a task's loss, which may only call it.

    Notes what it raised, because a loss may catch even a BaseException.
    """

    def __init__(self) -> None:
        super().__init__()
        self._raised: list[BaseException] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_modes(args, kwargs)
        self._raise(_Asked(args, kwargs))

    def _raise(self, error: BaseException) -> NoReturn:
        self._raised.append(error)
        raise error

    def _check_modes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if text := _refused_mode(args, kwargs):
            self._raise(_LossRefused(text))

    def _refuse_use(self, what: str) -> NoReturn:
        self._raise(_LossRefused(_refused_use(what)))

    @property
    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the first call, if there was one."""
        return next((error.call for error in self._raised if isinstance(error, _Asked)), None)

    def __getattribute__(self, name: str) -> Any:
        if name in HELD or (not name.startswith("_") and name not in USED):
            self._refuse_use(f"model.{name}")
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("__"):
            self._refuse_use(f"model.{name}")
        raise AttributeError(name)

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse_use("model[...]")

    def __iter__(self) -> NoReturn:
        self._refuse_use("the layers of the model")

    def __len__(self) -> NoReturn:
        self._refuse_use("len(model)")

    def __bool__(self) -> bool:
        return True  # as a module without len() is


def _compute(task: Task, model: _StandIn, batch: Any) -> Any:
    """Return the task's loss, or None if it only called for an answer; raise ValueError for what it may not do."""
    try:
        return task.loss(model, batch)
    except (_Asked, _LossRefused):
        return None
    except Exception:
        if not model._raised:
            raise
        return None
    finally:
        for error in model._raised:
            if isinstance(error, _LossRefused):
                raise ValueError(str(error)) from None


class _Answering(_StandIn):
    """A stand-in that returns the model's answer, once."""

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], answer: Any) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = [answer]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._answers:
            self._raise(
                _LossRefused("the task's loss calls its model twice: over several machines it may be called once.")
            )
        if not _are_equal((args, kwargs), self._inputs):
            text = (
                "the task's loss gives its model other inputs when it is called again with the same batch and random "
                "numbers, as machines that compute one model together do: draw random numbers from torch's, numpy's or "
                f"Python's global generator, not from one of your own, and count nothing in the loss, {WITHOUT}."
            )
            self._raise(_LossRefused(text))
        return self._answers.pop()


def _refused_use(what: str) -> str:
    return (
        f"the task's loss uses {what}: over several machines it may only call its model, because no machine has all of "
        "it. For a penalty on the parameters, set weight_decay, or compute it in the model's forward and return it "
        f"with the answer, {WITHOUT}."
    )


def _refused_mode(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call is refused: it would change how the whole model is computed, and not how its stages are."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        mode = "under torch.autocast: enter it in the forward of a submodule that is marked with split_marks.whole"
    elif not torch.is_grad_enabled():
        mode = "without gradients: call it outside torch.no_grad"
    elif any(tensor.requires_grad for tensor in tensors_in((tuple(args), dict(kwargs)))):
        mode = "with inputs that require gradients: compute what needs these gradients in the model's forward"
    else:
        return None
    return f"over several machines the task's loss cannot call its model {mode}, {WITHOUT}."


def _are_equal(one: Any, other: Any) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(map(_is_equal, leaves, others))


def _is_equal(one: Any, other: Any) -> bool:
    """Compare two leaves; NaN equals NaN, and objects of unknown kinds are taken for equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    known = (bool, int, float, complex, str, bytes, type(None))
    return one == other or one != one if isinstance(one, known) and isinstance(other, known) else True


class LossCall:
    """A task's loss of one batch: the model's inputs, and the loss as a function of its answer."""

    def __init__(self, task: Task, batch: Any, *, gets_answer: bool = True) -> None:
        """`gets_answer`: this machine also computes the loss; it stores a copy of the batch until then."""
        self.task = task
        if gets_answer:
            self.batch, self.states = copy.deepcopy(batch), all_random_states()
        self.args, self.kwargs = inputs_of(task, batch)

    def loss(self, answer: Any) -> Tensor:
        """Return the loss of the model's answer, computed with the random numbers that one process would draw."""
        restore_random_states(self.states)
        loss: Tensor = _compute(self.task, _Answering((self.args, self.kwargs), answer), self.batch)
        return loss


def inputs_of(task: Task, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the task's loss calls the model for this batch."""
    model = _StandIn()
    before = vars(model).keys() | set()
    _compute(task, model, batch)
    if model._call is None:
        raise ValueError("the task's loss does not call the model, so there is nothing to run on several machines.")
    if changed := vars(model).keys() - before:
        raise ValueError(_refused_use(f"model.{min(changed)} = ..."))
    return model._call


def check_loss(task: Task, model: nn.Module, batch: Any) -> None:
    """Compute the loss of a batch as several machines do; raise ValueError if they could not."""
    states = all_random_states()
    call = LossCall(task, batch)
    with same_buffers(model), torch.no_grad():
        answer = model(*call.args, **call.kwargs)
    call.loss(pytree.tree_map_only(Tensor, lambda t: t.requires_grad_(t.is_floating_point()), answer))
    restore_random_states(states)
    check_calls(task, call.batch)


def check_calls(task: Task, batch: Any) -> None:
    """Raise ValueError if the loss counts its calls, or draws from its own generator, before it calls the model."""
    states = all_random_states()
    inputs_of(task, copy.deepcopy(batch))  # fills what it caches
    before = LossState(task)
    inputs_of(task, batch)
    changed = LossState(task).changed_since(before)
    restore_random_states(states)
    if changed:
        raise ValueError(
            f"the task's loss sets {changed} before it calls the model: over several machines it is called several "
            "times for each batch. Set and count nothing there, and draw random numbers from torch's, numpy's or "
            f"Python's global generator, {WITHOUT}."
        )


def build_model(task: Task) -> nn.Module:
    """Return the task's model; without values if the task is `deferred`: each machine then initializes its own part."""
    if not getattr(task, "deferred", False):
        return task.model()
    with torch.device("meta"):
        return task.model()


def split_layers(task: Task, model: nn.Module, data: Data, splits: Mapping[str, str]) -> list[WholeTensor]:
    """Split layers of a task's model, as `--split LAYER=HOW`; return how the whole model's tensors are made of it."""
    if not splits:
        return []
    before = list(model.modules())
    hows = dict(read_split(f"{layer}={how}") for layer, how in splits.items())
    split(model, hows, *inputs_of(task, data.batch(range(min(2, len(data))))))
    return whole_tensors(model, before)


def cut_task(task: Task, model: nn.Module, data: Data, batch_size: int) -> tuple[Cut, tuple[Any, ...], dict[str, Any]]:
    """Return the task's model, cut, and an example of its inputs."""
    size = min(batch_size, len(data))
    if size < 2:
        raise ValueError("a model is cut with an example of at least two samples: use a larger batch size.")
    args, kwargs = inputs_of(task, data.batch(range(size)))
    return cut(model, args, kwargs), args, kwargs


def measure_samples(task: Task, cut: Cut, data: Data, samples: int, name: str = "", threads: int | None = 1) -> Profile:
    """Return the profile for this many samples (or all there are), with a worker's number of torch threads.

    `threads` is None: times are those of the multiplications, the same in every call.
    """
    args, kwargs = inputs_of(task, data.batch(range(min(samples, len(data)))))
    if threads is None:
        return measure(cut, args, kwargs, model=name, counted=True)
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
        call = LossCall(task, data.batch(chosen))
        microbatches.append(LossMicrobatch(call.args, call.loss, len(chosen), call.kwargs))
    return microbatches
