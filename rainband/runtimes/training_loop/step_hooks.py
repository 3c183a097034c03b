"""Hooks around the user's optimizer.step(): they take the gradients, and leave the rest of the step unchanged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

OnStep = Callable[[Optimizer, float], None]  # the optimizer, and the factor that undoes a GradScaler's scale
OnInfinite = Callable[[], None]
Closure = Callable[[], Any]
SCALING = ("grad_scale", "found_inf")  # attributes that a GradScaler sets on a fused optimizer during a step


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers of other libraries, which have no hooks."""
    inside = optimizer
    while not hasattr(inside, "_optimizer_step_pre_hooks"):
        inside = getattr(inside, "optimizer", None)
        if inside is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer and wraps none: pass such an optimizer."
            )
    found: Optimizer = inside
    return found


class StepHooks:
    """Take the gradients of each step. Schedulers still count it, profilers see it, and other hooks run.

    During the step the parameters have no gradients, so that it changes nothing. A strategy that lets the user's
    optimizer step calls `step_now`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], on_step: OnStep, on_infinite: OnInfinite) -> None:
        self.on_step = on_step
        self.on_infinite = on_infinite
        self.stepping: Optimizer | None = None
        self.closure: Closure | None = None  # of the current step
        self.aside: list[tuple[nn.Parameter, Tensor | None]] | None = None
        self.before = {o: o.register_step_pre_hook(self._before) for o in optimizers}
        self.after = {o: o.register_step_post_hook(self._after) for o in optimizers}
        for optimizer, handle in self.after.items():  # first, so that other hooks find the gradients restored
            _ordered(optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)

    def be_last(self) -> None:
        """Run after all other hooks, which may change the gradients, also after those added later."""
        for optimizer, handle in self.before.items():
            _ordered(optimizer._optimizer_step_pre_hooks).move_to_end(handle.id)

    def remove(self) -> None:
        for handle in (*self.before.values(), *self.after.values()):
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._is_inside():
            return None  # a subclass whose step() calls super().step()
        args, kwargs, self.closure = _with_closure_run(args, kwargs)
        self.stepping, self.aside = optimizer, None
        try:
            if found_infinite(optimizer):
                self.on_infinite()
            else:
                self.on_step(optimizer, _unscale(optimizer))
        finally:
            self.stepping = None
        self._put_aside(optimizer)
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stepping is not None:
            return
        for parameter, gradient in self.aside or ():
            parameter.grad = gradient
        self.aside = None
        self.be_last()

    def _is_inside(self) -> bool:
        """Return True inside a step. New gradients mean that the last step raised an error before its end."""
        if self.stepping is not None:
            return True
        return self.aside is not None and all(parameter.grad is None for parameter, _ in self.aside)

    def _put_aside(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.aside = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def step_now(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Let the user's optimizer step with these gradients, which are not scaled."""
        optimizer = self.stepping
        assert optimizer is not None, "a strategy may step only during a step of the user"
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if id(p) in own]
        kept = [parameter.grad for parameter, _ in pairs]
        scaling = {name: vars(optimizer).pop(name) for name in SCALING if name in vars(optimizer)}
        try:
            for parameter, gradient in pairs:
                parameter.grad = gradient
            _bare_step(optimizer, self.closure)
        finally:
            vars(optimizer).update(scaling)
            for (parameter, _), gradient in zip(pairs, kept, strict=True):
                parameter.grad = gradient


def _with_closure_run(args: Any, kwargs: Any) -> tuple[Any, Any, Closure | None]:
    """Run the closure now and pass its loss on: during the step its gradients would be too late.

    Also return what stands for the closure in a step on this worker: its first call has been made.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return args, kwargs, None
    with torch.enable_grad():
        loss = closure()
    made = [loss]

    def again() -> Any:
        return made.pop() if made else closure()

    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}, again
    return (args[0], lambda: loss, *args[2:]), kwargs, again


def found_infinite(optimizer: Optimizer) -> bool:
    """Return True if a GradScaler has found infinities; it calls a fused optimizer's step() nevertheless."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found > 0)


def _unscale(optimizer: Optimizer) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _ordered(hooks: Any) -> OrderedDict[int, Any]:
    return cast("OrderedDict[int, Any]", hooks)


def _bare_step(optimizer: Optimizer, closure: Closure | None) -> None:
    """Step without hooks: they run around the user's call."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer, *(() if closure is None else (closure,)))
