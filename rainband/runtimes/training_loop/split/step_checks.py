"""Checks around each step() of the optimizers of a loop whose gradients are averaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rainband.model.flat_parameters import is_finite
from rainband.runtimes.training_loop.split.tensors import LocalGradients
from rainband.runtimes.training_loop.step_hooks import found_infinite

if TYPE_CHECKING:
    from rainband.runtimes.training_loop.split.gradients import GradientExchange


OWN_LOADER = (
    "rainband: this loop uses its own data loader, so every worker trains on all of the data. To share its batches, "
    "iterate over run.loader(loader), or use run.batches(dataset, batch_size=...), or run.part(batch)."
)
LOCAL = (
    "rainband: torch.autograd.grad has computed a gradient of {name}, which is that of a worker's part of the batch: "
    "the result is not that of one process. For the gradient of the whole batch, use backward() and read p.grad; of a "
    "number that follows from it, such as a norm, take run.mean(number)."
)
NOT_SHARED = (
    "rainband: {name} steps parameters that are neither in the model nor in an optimizer of rainband.join, so each "
    "worker trains its own on its parts of the batches: pass all of them, as in rainband.join([model, head], "
    "[optimizer, other]). (Copies of the model for one batch, as in meta-learning, are those of a part of it.)"
)


class StepChecks:
    """Refuses steps with gradients that were not averaged, and averages the losses of closures."""

    def __init__(self, gradients: GradientExchange) -> None:
        self.gradients = gradients
        self.handles: list[RemovableHandle] = []
        self.unstepped = 0  # samples whose gradients no step has used yet
        self.kept: Sequence[Tensor | None] = ()  # their mean; zero_grad() only replaces it
        self.fresh: set[int] = set()  # parameters whose gradients were averaged since the last step of their optimizer
        self.known: set[int] = set()  # optimizers that were looked at
        self.thread = threading.get_ident()
        self.local = LocalGradients(lambda number: number in gradients.hooks.queued)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
            self.handles.append(optimizer.register_step_post_hook(self._after_step))
        if self.gradients.num_workers > 1:
            self.handles.append(register_optimizer_step_pre_hook(self._before_any_step))

    def remove(self) -> None:
        self.local.remove()
        for handle in self.handles:
            handle.remove()

    def begin_round(self) -> None:
        """Settle the round before, and report if it used gradients that are not averaged."""
        self.settle()
        if self.gradients.num_workers > 1:
            tensors = self.gradients.tensors
            if self.local.name is not None and self.gradients.exchange.is_first:
                self.gradients.tell(LOCAL.format(name=self.local.name))
            self.local.begin_round(tensors.names, tensors.parameters)

    def exchanged(self, samples: int, gradients: Sequence[Tensor | None]) -> None:
        """Note the mean gradient of a batch of samples."""
        self.unstepped += samples
        self.kept = gradients

    def settle(self) -> None:
        """Count what a GradScaler has left out: gradients that are not finite, and no step before the next batch."""
        if self.unstepped and not is_finite(self.kept):
            self.gradients.exchange.leave_out(self.unstepped)
            self.unstepped = 0
        self.kept = ()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self.gradients.tensors.look()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if callable(closure):
            averaged = self._averaged(optimizer, closure)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": averaged}
            return (args[0], averaged, *args[2:]), kwargs
        if self.gradients.num_workers > 1:
            self._check_averaged(optimizer)
        return None

    def _before_any_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Report an optimizer of parameters that the workers do not share."""
        if threading.get_ident() == self.thread and id(optimizer) not in self.known:
            self.known.add(id(optimizer))
            shared = {id(parameter) for parameter in self.gradients.tensors.parameters}
            others = any(id(p) not in shared for group in optimizer.param_groups for p in group["params"])
            if others and self.gradients.exchange.is_first:
                self.gradients.tell(NOT_SHARED.format(name=type(optimizer).__name__))

    def _averaged(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over the workers, so that line searches agree."""

        def averaged() -> Any:
            loss = closure()
            if self.gradients.num_workers > 1:
                self._check_averaged(optimizer)
            if loss is None:
                return None
            if isinstance(loss, Tensor):
                return torch.full_like(loss.detach(), self.gradients.losses.mean(float(loss.detach())))
            return self.gradients.losses.mean(float(loss))

        return averaged

    def _check_averaged(self, optimizer: Optimizer) -> None:
        tensors = self.gradients.tensors
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if own & tensors.unsynced:
            raise ValueError(
                "optimizer.step() was called with gradients of run.no_sync() that were not averaged: call the last "
                "backward() before a step outside run.no_sync()."
            )
        name = tensors.not_averaged(own - self.fresh)
        if name is not None:
            raise ValueError(
                f"the gradient of {name} was not computed by loss.backward(), so the workers could not average it: "
                "use backward() in place of torch.autograd.grad. (Then `p.grad` may also be replaced.)"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        gradients = self.gradients
        gradients.exchange.stepped()
        if found_infinite(optimizer):
            gradients.exchange.leave_out(self.unstepped)
        self.unstepped, self.kept = 0, ()
        self.fresh -= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients.tensors.note_step()
        if not gradients.uses_loaders and gradients.part is not None:
            if not gradients.losses.report_evaluation() and gradients.num_workers > 1 and gradients.exchange.is_first:
                gradients.tell(OWN_LOADER)
            gradients.begin_own_round()
