"""The tensors that are equal on all workers: which a model and its optimizers have, and what a backward() changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules import module as torch_modules
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rainband.model.sync_batch_norm import share_statistics
from rainband.rounds.average import finite


class BackwardHooks:
    """Calls a function at the end of each backward() that accumulates gradients of the watched parameters."""

    def __init__(self, at_end: Callable[[set[int]], None]) -> None:
        self.at_end = at_end  # gets the IDs of the parameters whose gradients have changed
        self.handles: dict[int, RemovableHandle] = {}
        self.changed: set[int] = set()
        self.queued: set[int] = set()  # backward passes, by their numbers: one that failed never ends

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Watch these from now on; one that is frozen is watched when this is called after it was unfrozen."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self.handles:
                handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self.handles[id(parameter)] = handle

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()

    def _accumulated(self, parameter: Tensor) -> None:
        self.changed.add(id(parameter))
        number = torch._C._current_graph_task_id()
        if number not in self.queued:  # a backward pass inside another one (checkpointing) has its own number
            self.queued.add(number)
            Variable._execution_engine.queue_callback(lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        self.queued.discard(number)
        changed, self.changed = self.changed, set()
        self.at_end(changed)


class LocalGradients:
    """Notices torch.autograd.grad of shared parameters: its gradients are those of one worker's part of the batch.

    It watches in some rounds only: with a hook, PyTorch copies each gradient, which takes time.
    """

    def __init__(self, accumulates: Callable[[int], bool]) -> None:
        self.accumulates = accumulates  # whether this backward pass, by its number, adds to `p.grad`
        self.handles: list[RemovableHandle] = []
        self.running: set[int] = set()
        self.rounds = 0
        self.name: str | None = None  # of a parameter whose gradient was computed without adding it

    def begin_round(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Watch in the first rounds, and then more and more rarely."""
        self.remove()
        self.rounds += 1
        if self.rounds & (self.rounds - 1):
            return
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.requires_grad:
                self.handles.append(parameter.register_hook(partial(self._computed, name)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _computed(self, name: str, gradient: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number not in self.running:
            self.running.add(number)
            Variable._execution_engine.queue_callback(lambda: self._ended(number, name))

    def _ended(self, number: int, name: str) -> None:
        self.running.discard(number)
        if not self.accumulates(number):
            self.name = name


class GradientScaling:
    """Scales the gradients that backward() adds, until it is stopped."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.members = 0  # that take part in the round for which they are scaled

    def start(self, parameters: Sequence[nn.Parameter], factor: float, members: int) -> None:
        self.members = members
        if factor != 1.0:
            scale: Callable[[Tensor], Tensor] = lambda gradient: gradient * factor  # noqa: E731
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self.handles = [parameter.register_hook(scale) for parameter in trained]  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.members = 0


class SharedTensors:
    """The parameters and the floating-point buffers of a model and its optimizers, in an order equal on all workers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.buffers: list[SharedBuffer] = []
        self.unsynced: set[int] = set()  # parameters with gradients of this worker alone
        self.averaged: dict[int, int] = {}  # parameter -> the gradient that was averaged last, by their IDs
        self.versions = -1  # of all trained parameters, at the last step
        self.changed_by_loop = False
        self.handles: list[RemovableHandle] = []
        self.may_have_new = False  # a module or a parameter was registered somewhere
        self.num_optimized = 0
        self.looks = 0
        self.find()
        self._find_buffers()

    def attach(self) -> None:
        self.note_step()
        self.handles = [
            torch_modules.register_module_parameter_registration_hook(self._registered),
            torch_modules.register_module_module_registration_hook(self._registered),
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        self.may_have_new = True

    def find_new(self) -> list[nn.Parameter]:
        """Do what `find` does, if there may be new parameters; and, more and more rarely, in any case."""
        self.looks += 1
        optimized = sum([len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups])
        if not self.may_have_new and optimized == self.num_optimized and self.looks & (self.looks - 1):
            return []
        self.may_have_new, self.num_optimized = False, optimized
        return self.find()

    def find(self) -> list[nn.Parameter]:
        """Add the parameters that the model or the optimizers have got since the last call, and return them."""
        known = {id(parameter) for parameter in self.parameters}
        found = dict(self.model.named_parameters())
        for number, optimizer in enumerate(self.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    found[f"parameter {k} of group {group_number} of optimizer {number}"] = parameter
        new = {}
        for name, parameter in found.items():
            if id(parameter) not in known:
                known.add(id(parameter))
                new[name] = parameter
        self.parameters += new.values()
        self.names += new
        return list(new.values())

    def _find_buffers(self) -> None:
        found: dict[int, SharedBuffer] = {}
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    found.setdefault(id(buffer), SharedBuffer(module, name))
        self.buffers = list(found.values())

    def examples(self) -> list[Tensor]:
        """Return a tensor of the shape and dtype of each tensor of an exchange."""
        return [parameter.detach() for parameter in self.parameters] + [buffer.common for buffer in self.buffers]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, None where a parameter has none."""
        gradients = [parameter.grad for parameter in self.parameters]
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ValueError(
                    f"{name} has a sparse gradient, which workers cannot average: use sparse=False for this layer."
                )
        return gradients

    def hooked(self) -> str | None:
        """Return the name of a parameter on whose gradient the script has a hook of its own."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return name
        return None

    def note_exchange(self) -> None:
        """Remember that all gradients are equal on all workers now."""
        self.unsynced.clear()
        self.averaged = {id(p): id(p.grad) for p in self.parameters if p.grad is not None}

    def note_step(self) -> None:
        """Remember that the parameters are those of the optimizers, or of another worker's state."""
        self.versions = self._versions()

    def look(self) -> None:
        """Notice if the loop itself has changed parameters since. A change of `parameter.data` cannot be noticed."""
        if (now := self._versions()) != self.versions:
            self.versions, self.changed_by_loop = now, True

    def _versions(self) -> int:
        return sum([parameter._version for parameter in self.parameters if parameter.requires_grad])

    def not_averaged(self, among: set[int]) -> str | None:
        """Return the name of one of these parameters (IDs) whose gradient object was never averaged, and is not 0."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = parameter.grad
            if id(parameter) not in among or gradient is None or self.averaged.get(id(parameter)) == id(gradient):
                continue
            if bool(gradient.any()):  # loops may put zeros where there is no gradient
                return name
        return None


class SharedBuffer:
    """A floating-point buffer, such as the running mean of a BatchNorm layer; workers average what they add to it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module  # not the tensor, which the module may replace
        self.name = name
        self.common = self.tensor.detach().clone()  # its values at the last exchange, equal on all workers
        self.version = self._version()
        self.has_bad = False  # NaN or infinity was left out

    @property
    def tensor(self) -> Tensor:
        found = self.module._buffers[self.name]
        assert found is not None, f"the buffer {self.name} was removed from the model"
        return found

    def _version(self) -> tuple[int, int, int]:
        # batch_norm changes its statistics without raising their versions, and counts its batches
        counter = self.module._buffers.get("num_batches_tracked")
        return id(self.tensor), self.tensor._version, -1 if counter is None else counter._version

    def change(self) -> Tensor | None:
        """Return the difference to the last exchange; None if no forward pass has changed the buffer since."""
        uncounted = isinstance(self.module, _InstanceNorm) and self.module.training
        if self._version() == self.version and not uncounted:
            return None
        change = self.tensor - self.common
        if math.isfinite(change.sum().item()):
            return change
        if not (left_out := finite(change)).equal(change):
            self.has_bad = True
        return left_out

    def put(self, change: Tensor | None) -> None:
        """Set the buffer to its values at the last exchange plus a change; None: there is no change."""
        if change is not None:
            self.tensor.copy_(self.common.add_(change.to(self.common.device).view_as(self.common)))
        self.version = self._version()

    def keep(self) -> None:
        """Take the current values as those that are equal on all workers."""
        self.common.copy_(self.tensor)
        self.version = self._version()


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if another library already exchanges gradients of this model, or if they are sparse."""
    share_statistics(model)
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, nn.parallel.DistributedDataParallel) or "fsdp" in kind.__module__:
            raise ValueError(
                f"the model is wrapped in {kind.__name__}, which exchanges gradients itself: pass the bare model to "
                "rainband.join."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or kind.__name__} has sparse gradients, which workers cannot average: use sparse=False."
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise ValueError(f"{name} is distributed (DTensor) already: pass a model with ordinary parameters.")


# ---- numbers of the optimizers, such as learning rates ----


def numbers_of(optimizers: Sequence[Optimizer]) -> tuple[float, ...]:
    """Return the numbers of all parameter groups: learning rates, momentum, and what schedulers note there."""
    found: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in sorted(group, key=str):
                if name != "params":
                    value = group[name]
                    found += (value,) if type(value) is float else _as_numbers(value)
    return tuple(found)


def put_numbers(optimizers: Sequence[Optimizer], numbers: Sequence[float]) -> list[str]:
    """Replace the numbers of all parameter groups; return the names of those that differed."""
    rest, changed = list(numbers), []
    for group, name, value in _settings(optimizers):
        count = len(_as_numbers(value))
        new, rest = rest[:count], rest[count:]
        if new == _as_numbers(value):
            continue
        changed.append(name)
        if isinstance(value, Tensor):
            value.fill_(new[0])
        elif isinstance(value, tuple | list):
            group[name] = type(value)(type(old)(item) for old, item in zip(value, new, strict=True))
        else:
            group[name] = type(value)(new[0])
    return changed


def _settings(optimizers: Sequence[Optimizer]) -> list[tuple[dict[str, Any], str, Any]]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [
        (group, name, group[name])
        for group in groups
        for name in sorted(group, key=str)
        if name != "params" and _as_numbers(group[name])
    ]


def _as_numbers(value: Any) -> list[float]:
    if value is None or type(value) is bool:
        return []
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 else []
    if isinstance(value, tuple | list):
        return [float(item) for item in value] if all(_is_number(item) for item in value) else []
    return [float(value)] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
