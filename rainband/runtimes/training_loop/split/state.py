"""The state of a worker, which another one receives when it joins, returns, or has missed an update.

`collect` returns lists, dicts, numbers and tensors, which travel without pickle, and `apply` puts them into the objects
of another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.model.containers import bytes_of, marked, restored
from rainband.runtimes.training_loop.split.tensors import SharedTensors


class HasState(Protocol):
    """An object with a state, such as a scheduler, a GradScaler or an average of the parameters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class ReadsPasses(Protocol):
    """The open passes over the data: how far each of them was read."""

    def collect(self) -> Any: ...

    def apply(self, state: Any) -> None: ...


class LoopState:
    """The state of one worker: parameters, gradients, buffers, optimizers, registered objects."""

    def __init__(self, tensors: SharedTensors, optimizers: Sequence[Optimizer], generator: torch.Generator) -> None:
        self.tensors = tensors
        self.optimizers = optimizers
        self.generator = generator
        self.registered: list[HasState] = []
        self.is_sum = False  # the loss is a sum over samples
        self.stopped: str | None = None  # the reason for which the run ends
        self.begun = False  # the loop has come to its first batch, through passes that were over before it joined
        self.generator_state = generator.get_state()  # before the current batch was drawn
        self.received: Any = None
        self.passes: ReadsPasses | None = None  # what the loop's loaders have read

    def register(self, objects: Sequence[HasState]) -> None:
        """Add objects to the state; raise ValueError for one without a state."""
        for given in objects:
            check_has_state(given)
            self.registered.append(given)

    def collect(self) -> Any:
        """Return the state as a pytree of tensors, numbers and strings."""
        tensors = self.tensors
        return {
            "parameters": [parameter.data for parameter in tensors.parameters],
            "gradients": [parameter.grad for parameter in tensors.parameters],  # accumulated over earlier batches
            "buffers": [buffer for _, buffer in tensors.model.named_buffers()],
            "optimizers": [marked(optimizer.state_dict()) for optimizer in self.optimizers],
            "registered": self._collect_registered(),
            "generator": self.generator_state,
            "passes": None if self.passes is None else self.passes.collect(),
            "stopped": self.stopped,
            "is_sum": self.is_sum,
        }

    def _collect_registered(self) -> list[Any]:
        """Return the states of the registered objects: as received, if this loop has not registered its own yet."""
        if self.received is not None:
            received: list[Any] = self.received["registered"]
            return received
        return [marked(given.state_dict()) for given in self.registered]

    @torch.no_grad()
    def apply(self, state: Any) -> None:
        """Replace this worker's state by one that `collect` returned on another worker."""
        tensors = self.tensors
        _same_number("parameters", tensors.parameters, state["parameters"])
        for parameter, value, gradient in zip(tensors.parameters, state["parameters"], state["gradients"], strict=True):
            parameter.copy_(value)
            _put_gradient(parameter, gradient)
        buffers = [buffer for _, buffer in tensors.model.named_buffers()]
        _same_number("buffers", buffers, state["buffers"])
        for own, value in zip(buffers, state["buffers"], strict=True):
            own.copy_(value)
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(restored(values))
        self.received = state  # applied again when the loop has gone through passes that are over
        if self.begun:
            self._apply_registered(state)
        else:  # the script has not registered its objects yet, and has not drawn from the generator
            self.generator.set_state(state["generator"])
        self.stopped, self.is_sum = state["stopped"], state["is_sum"]
        if self.passes is not None:
            self.passes.apply(state["passes"])
        for buffer in tensors.buffers:
            buffer.keep()
        tensors.note_exchange()
        tensors.note_step()

    def end_catching_up(self) -> None:
        """Apply the received state again: the loop has registered objects, and stepped schedulers of earlier passes."""
        if self.received is not None and self.received["registered"]:
            for optimizer, values in zip(self.optimizers, self.received["optimizers"], strict=True):
                optimizer.load_state_dict(restored(values))
            self._apply_registered(self.received)
        self.begun, self.received = True, None

    def _apply_registered(self, state: Any) -> None:
        _same_number("registered objects", self.registered, state["registered"])
        for given, values in zip(self.registered, state["registered"], strict=True):
            given.load_state_dict(restored(values))

    def fingerprint(self) -> int:
        """Return a hash of the parameters."""
        digest = xxhash.xxh3_64()
        for parameter in self.tensors.parameters:
            digest.update(bytes_of(parameter))
        return digest.intdigest() >> 1

    def has_changed(self) -> bool:
        """Return True, once, if the loop itself has changed parameters, as re-initializing a layer does."""
        self.tensors.look()
        changed, self.tensors.changed_by_loop = self.tensors.changed_by_loop, False
        return changed


def check_has_state(given: HasState) -> None:
    """Raise ValueError if an object has no state, or one that no checkpoint can hold: now, not at the first of them."""
    if not callable(getattr(given, "state_dict", None)) or not callable(getattr(given, "load_state_dict", None)):
        raise ValueError(
            f"run.register needs objects with state_dict and load_state_dict, and {type(given).__name__} has "
            "none: register the scheduler, the GradScaler or the averaged model itself."
        )
    try:
        marked(given.state_dict())
    except ValueError as error:
        raise ValueError(f"run.register({type(given).__name__}): {error}") from None


def _put_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None or parameter.grad is None:
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    else:
        parameter.grad.copy_(gradient)


def _same_number(kind: str, own: Sequence[object], received: Sequence[object]) -> None:
    if len(own) != len(received):
        raise ValueError(
            f"this worker has {len(own)} {kind}, and the worker that sent its state has {len(received)}: all workers "
            "must run the same script, with the same arguments."
        )
