"""One machine's side of one microbatch: a state machine that computes fragments; it does no I/O and never waits.

Each fragment is its own autograd graph: the values it reads are detached, and the gradients of a value are summed and
sent, both once per value and machine. The owner (`MicrobatchRun`) carries the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.utils import _pytree as pytree

from rainband.model.seeds import all_random_states, restore_random_states
from rainband.model_parallel.graph.fragments import FragmentLayout, as_module
from rainband.model_parallel.graph.graph import Cut, tensors_in

LOSS = -1  # stands for the loss, which reads the model's outputs like a fragment
Gradients = list[Tensor | None]  # of the tensors of one value


class FragmentCompute(Protocol):
    """A policy: computes the fragments of one machine for one microbatch, at weights of its choice."""

    def forward(self, index: int, given: Sequence[Any]) -> Sequence[Any]:
        """Return a fragment's outputs; a tensor requires a gradient if `backward` needs one for it."""

    def backward(self, index: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Return the gradients of a fragment's inputs from those of its outputs; accumulate those of parameters."""

    def forget(self) -> None:
        """Release what was saved for the backward."""


class AtLiveWeights:
    """Computes at the parameters that the modules have now; their gradients accumulate in `.grad`."""

    def __init__(self, modules: Mapping[int, fx.GraphModule]) -> None:
        self.modules = modules
        self.kept: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}

    def forward(self, index: int, given: Sequence[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self.modules[index](*given)
        self.kept[index] = given, results
        return results

    def backward(self, index: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        given, results = self.kept.pop(index)
        pairs = [
            (tensor, total)
            for result, totals in zip(results, gradients, strict=True)
            for tensor, total in zip(tensors_in(result), totals, strict=True)
            if total is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [total for _, total in pairs])
            self._separate(index, [total for _, total in pairs], given)
        return [[tensor.grad for tensor in tensors_in(value)] for value in given]

    def forget(self) -> None:
        self.kept.clear()

    def _separate(self, index: int, incoming: Sequence[Tensor], given: Sequence[Any]) -> None:
        """Give each parameter's gradient memory of its own.

        Gradients of stacked or summed values share memory, and autograd adds the next microbatch's in place.
        """
        found = [tensor.grad for tensor in tensors_in(list(given)) if tensor.grad is not None]
        taken = {gradient.data_ptr() for gradient in (*incoming, *found)}
        for parameter in self.modules[index].parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                if parameter.grad.data_ptr() in taken:
                    parameter.grad = parameter.grad.clone()
                taken.add(parameter.grad.data_ptr())


class Recomputing(AtLiveWeights):
    """Keeps only the inputs of fragments, and computes them again before the backward: less memory, more time."""

    def forward(self, index: int, given: Sequence[Any]) -> Sequence[Any]:
        module, states = self.modules[index], all_random_states()
        with torch.no_grad():
            results: Sequence[Any] = module(*given)
        if not torch.is_grad_enabled():
            return results
        self.kept[index] = given, [states]
        learns = any(tensor.requires_grad for tensor in [*tensors_in(list(given)), *module.parameters()])

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(learns and tensor.is_floating_point())

        return pytree.tree_map_only(Tensor, leaf, results)  # type: ignore[no-any-return]

    def backward(self, index: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        given, (states,) = self.kept[index]
        module, before = self.modules[index], all_random_states()
        copies = {name: buffer.clone() for name, buffer in module.named_buffers()}  # the forward has counted already
        restore_random_states(states)
        with torch.enable_grad():
            results = functional_call(module, copies, tuple(given), tie_weights=False)
        restore_random_states(before)
        self.kept[index] = given, results
        return super().backward(index, gradients)


@dataclass(frozen=True)
class FragmentMessage:
    """A value for a machine that reads it, or its gradient for the machine that made it."""

    kind: Literal["value", "gradient"]
    value: str
    source: int
    destination: int
    payload: Any  # a pytree of tensors and numbers; of a gradient: one tensor or None for each tensor of the value
    wants_gradient: tuple[bool, ...] = ()  # of a value: which of its tensors require one

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.payload))


class FragmentRun:
    """The values, gradients and progress of one machine for one microbatch."""

    def __init__(
        self,
        cut: Cut,
        layout: FragmentLayout,
        machine: int,
        modules: Mapping[int, fx.GraphModule] | None = None,
        compute: FragmentCompute | None = None,
    ) -> None:
        """`modules`: those of another run of the same machine, for a second microbatch at the same time."""
        self.layout, self.machine = layout, machine
        self.mine = [index for index, fragment in enumerate(layout.fragments) if fragment.machine == machine]
        self.modules = modules or {index: as_module(cut, layout.fragments[index]) for index in self.mine}
        self.compute = compute or AtLiveWeights(self.modules)
        self._clear()

    def _clear(self) -> None:
        self.compute.forget()
        self.inputs: dict[str, Any] = {}
        self.made: dict[str, Any] = {}  # with their autograd graph
        self.read: dict[str, Any] = {}  # detached: the values that fragments of this machine, and the loss, read
        self.leaves: dict[tuple[str, int], Any] = {}  # (value, reader) -> the same, as the reader's own leaves
        self.arrived: dict[str, dict[int, Gradients]] = {}  # value -> gradients by machine
        self.found: dict[tuple[str, int], Gradients] = {}  # (value, reader) -> gradients of that reader's leaves
        self.forward_done: set[int] = set()
        self.backward_done: set[int] = set()

    def give(self, inputs: Mapping[str, Any]) -> None:
        """Start a new microbatch; every machine gets the model's inputs."""
        self._clear()
        self.inputs = dict(inputs)

    def take(self, message: FragmentMessage) -> None:
        """Store a message; computes nothing."""
        assert message.destination == self.machine, f"machine {self.machine} got {message}"
        if message.kind == "value":
            assert message.value not in self.read, f"{message.value} arrived twice at machine {self.machine}"
            self.read[message.value] = _leaves(message.payload, message.wants_gradient)
        else:
            self.arrived.setdefault(message.value, {})[message.source] = message.payload

    def values_to_come(self) -> dict[str, int]:
        """Return the values that other machines send here, each with the machine that makes it."""
        needed = [value for index in self.mine for value in self.layout.fragments[index].reads]
        if self.machine == self.layout.answer_machine:
            needed += self.layout.outputs
        made = {v: self.layout.fragments[self.layout.maker[v]].machine for v in needed if v in self.layout.maker}
        return {value: machine for value, machine in made.items() if machine != self.machine}

    def gradients_to_come(self) -> list[tuple[str, int]]:
        """Return the values made here whose gradients arrive, each with the sending machine; call after the forward."""
        return [
            (value, machine)
            for value, made in self.made.items()
            if any(tensor.requires_grad for tensor in tensors_in(made))
            for machine in self.layout.destinations(value)
        ]

    def outputs(self) -> dict[str, Any]:
        """Return the model's output values, ready for a loss; only on the answer machine."""
        assert self.machine == self.layout.answer_machine
        return {value: self._given(value, LOSS) for value in self.layout.outputs}

    def _given(self, value: str, reader: int) -> Any:
        """Return the value that a fragment, or the loss, reads, as leaves of its own.

        Gradients of two leaves may share memory, and autograd adds to it in place.
        """
        if value not in self.read:
            return self.inputs.get(value)
        wants = tuple(tensor.requires_grad for tensor in tensors_in(self.read[value]))
        return self.leaves.setdefault((value, reader), _leaves(self.read[value], wants))

    def next_forward(self, among: Sequence[int] | None = None) -> int | None:
        """Return a fragment, of all or of some, whose inputs are here; None if there is none."""
        for index in self.mine if among is None else among:
            if index not in self.forward_done and self._is_here(self.layout.fragments[index].reads):
                return index
        return None

    def is_forward_done(self, fragments: Sequence[int]) -> bool:
        """Return True if these were computed, and the loss's inputs are here if it follows one of them."""
        answers = self.layout.answer_fragment in fragments
        return self.forward_done.issuperset(fragments) and (not answers or self._is_here(self.layout.outputs))

    def _is_here(self, values: Sequence[str]) -> bool:
        return all(value in self.read or value in self.inputs for value in values)

    def forward(self, index: int) -> list[FragmentMessage]:
        """Compute a fragment; return the messages for other machines."""
        fragment = self.layout.fragments[index]
        results = self.compute.forward(index, [self._given(value, index) for value in fragment.reads])
        self.forward_done.add(index)
        messages = []
        for value, result in zip(fragment.makes, results, strict=True):
            wants = tuple(tensor.requires_grad for tensor in tensors_in(result))
            self.made[value] = result
            if self._local_readers(value):
                self.read[value] = _leaves(result, wants)
            for machine in self.layout.destinations(value):
                payload = pytree.tree_map_only(Tensor, Tensor.detach, result)
                messages.append(FragmentMessage("value", value, self.machine, machine, payload, wants))
        return messages

    def _local_readers(self, value: str) -> list[int]:
        readers = [i for i in self.layout.readers.get(value, ()) if self.layout.fragments[i].machine == self.machine]
        if value in self.layout.outputs and self.machine == self.layout.answer_machine:
            readers.append(LOSS)
        return readers

    def answered(self) -> list[FragmentMessage]:
        """Take the gradients that the loss has put on `outputs()`; return those to send at once."""
        self.backward_done.add(LOSS)
        for value in self.layout.outputs:
            if (value, LOSS) in self.leaves:
                self.found[value, LOSS] = [tensor.grad for tensor in tensors_in(self.leaves[value, LOSS])]
        return [message for value in self.layout.outputs for message in self._give_back(value)]

    def next_backward(self, among: Sequence[int] | None = None) -> int | None:
        """Return a fragment, of all or of some, whose backward can run; None if there is none."""
        for index in reversed(self.mine if among is None else among):
            if index in self.forward_done and index not in self.backward_done and self._has_all_gradients(index):
                return index
        return None

    def is_backward_done(self, fragments: Sequence[int]) -> bool:
        return self.backward_done.issuperset(fragments)

    def _has_all_gradients(self, index: int) -> bool:
        for value in self.layout.fragments[index].makes:
            if not any(tensor.requires_grad for tensor in tensors_in(self.made[value])):
                continue
            remote = set(self.layout.destinations(value)) <= self.arrived.get(value, {}).keys()
            if not remote or not self.backward_done.issuperset(self._local_readers(value)):
                return False
        return True

    def backward(self, index: int) -> list[FragmentMessage]:
        """Run a fragment's backward; return the gradients for other machines."""
        fragment = self.layout.fragments[index]
        found = self.compute.backward(index, [self._total(value) for value in fragment.makes])
        self.found |= {(value, index): gradients for value, gradients in zip(fragment.reads, found, strict=True)}
        self.backward_done.add(index)
        return [message for value in fragment.reads for message in self._give_back(value)]

    def _total(self, value: str) -> list[Tensor | None]:
        """Return a value's gradient, summed over machines in the order of their numbers, so that bits repeat."""
        by_machine = dict(self.arrived.get(value, {}))
        if value in self.read:
            by_machine[self.machine] = self._found(value)
        totals = _sums([by_machine[machine] for machine in sorted(by_machine)])
        return totals or [None] * len(tensors_in(self.made[value]))

    def _found(self, value: str) -> list[Tensor | None]:
        """Return the gradient of a value that is read here, summed over its readers in the order of their backwards."""
        readers = self._local_readers(value)[::-1]  # the loss first
        none: Gradients = [None] * len(tensors_in(self.read[value]))  # of a reader without a backward
        return _sums([self.found.get((value, reader), none) for reader in readers])

    def _give_back(self, value: str) -> list[FragmentMessage]:
        """Return the gradient of a received value, once the last of its readers here is done."""
        if value in self.inputs or value in self.made or value not in self.read:
            return []
        tensors = tensors_in(self.read[value])
        if not any(t.requires_grad for t in tensors) or not self.backward_done.issuperset(self._local_readers(value)):
            return []
        maker = self.layout.fragments[self.layout.maker[value]].machine
        return [FragmentMessage("gradient", value, self.machine, maker, self._found(value))]


def _leaves(value: Any, wants_gradient: tuple[bool, ...]) -> Any:
    """Return the same pytree, detached; tensors that require no gradient stay constants."""
    wants = iter(wants_gradient)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(next(wants)), value)


def _sums(columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the sum of each tensor of a value, over the columns that have one."""
    return [_sum([gradient for gradient in row if gradient is not None]) for row in zip(*columns, strict=True)]


def _sum(gradients: list[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total
