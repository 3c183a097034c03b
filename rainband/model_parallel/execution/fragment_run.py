"""One machine's half of a cut model: a state machine without I/O that runs fragments as soon as their inputs are there.

Each fragment is an island of autograd: what it reads is detached, once per value and machine, and what comes back for
a value is summed and passed on, once per value and machine. Whoever owns the part carries messages; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rainband.model_parallel.graph.fragments import FragmentLayout, as_module
from rainband.model_parallel.graph.graph import Cut, tensors_in

LOSS = -1  # what reads the model's outputs, as if it were a fragment
Gradients = list[Tensor | None]  # of the tensors of one value


class FragmentCompute(Protocol):
    """Computes the fragments of one machine for one microbatch, with weights and saved values of its own choice."""

    def forward(self, index: int, given: Sequence[Any]) -> Sequence[Any]:
        """Return what the fragment makes; a tensor requires a gradient if one should come back for it."""

    def backward(self, index: int, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Take the gradients of what it made, return those of what it was given; parameters keep theirs."""

    def forget(self) -> None:
        """Release what is kept for backward passes."""


class AtLiveWeights:
    """At the parameters as they are in the module; their gradients go where autograd puts them."""

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
        """Autograd adds the next microbatch's in place, and gradients of what was stacked and summed are one memory."""
        found = [tensor.grad for tensor in tensors_in(list(given)) if tensor.grad is not None]
        taken = {gradient.data_ptr() for gradient in (*incoming, *found)}
        for parameter in self.modules[index].parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                if parameter.grad.data_ptr() in taken:
                    parameter.grad = parameter.grad.clone()
                taken.add(parameter.grad.data_ptr())


@dataclass(frozen=True)
class FragmentMessage:
    """A value on its way to a machine that reads it, or its gradient on the way back."""

    kind: Literal["value", "gradient"]
    value: str
    source: int
    destination: int
    payload: Any  # a nest of tensors and numbers; of a gradient: one tensor or None for each tensor of the value
    wants_gradient: tuple[bool, ...] = ()  # of a value: which of its tensors expect one

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(self.payload))


class FragmentRun:
    """What one machine holds and does for one microbatch."""

    def __init__(
        self,
        cut: Cut,
        layout: FragmentLayout,
        machine: int,
        modules: Mapping[int, fx.GraphModule] | None = None,
        compute: FragmentCompute | None = None,
    ) -> None:
        """`modules`: of another part of the same machine, for a second microbatch that is on its way."""
        self.layout = layout
        self.machine = machine
        self.mine = [index for index, fragment in enumerate(layout.fragments) if fragment.machine == machine]
        self.modules = modules or {index: as_module(cut, layout.fragments[index]) for index in self.mine}
        self.compute = compute or AtLiveWeights(self.modules)
        self._clear()

    def _clear(self) -> None:
        self.compute.forget()
        self.inputs: dict[str, Any] = {}
        self.made: dict[str, Any] = {}  # with their autograd graph
        self.read: dict[str, Any] = {}  # detached: what fragments of this machine, and the loss, read
        self.leaves: dict[tuple[str, int], Any] = {}  # (value, reader) -> the same as leaves of the reader's own
        self.arrived: dict[str, dict[int, Gradients]] = {}  # value -> gradients by machine
        self.found: dict[tuple[str, int], Gradients] = {}  # (value, reader) -> gradients of that reader's leaves
        self.forward_done: set[int] = set()
        self.backward_done: set[int] = set()

    # ---- forward ----

    def begin(self, inputs: Mapping[str, Any]) -> list[FragmentMessage]:
        """A new batch; every machine is given the model's inputs."""
        self.give(inputs)
        return self._run_forward()

    def give(self, inputs: Mapping[str, Any]) -> None:
        """A new batch, of which nothing is computed yet."""
        self._clear()
        self.inputs = dict(inputs)

    def receive(self, message: FragmentMessage) -> list[FragmentMessage]:
        self.take(message)
        return self._run_forward() if message.kind == "value" else self._run_backward()

    def take(self, message: FragmentMessage) -> None:
        """Keep what has come; nothing is computed yet."""
        assert message.destination == self.machine, f"machine {self.machine} was given {message}"
        if message.kind == "value":
            assert message.value not in self.read, f"{message.value} came twice to machine {self.machine}"
            self.read[message.value] = _leaves(message.payload, message.wants_gradient)
        else:
            self.arrived.setdefault(message.value, {})[message.source] = message.payload

    def values_to_come(self) -> dict[str, int]:
        """Values that others send to this machine, each with the machine that makes it."""
        needed = [value for index in self.mine for value in self.layout.fragments[index].reads]
        if self.machine == self.layout.answer_machine:
            needed += self.layout.outputs
        made = {v: self.layout.fragments[self.layout.maker[v]].machine for v in needed if v in self.layout.maker}
        return {value: machine for value, machine in made.items() if machine != self.machine}

    def gradients_to_come(self) -> list[tuple[str, int]]:
        """Values made here whose gradients come back, each with the machine that sends it; known after the forward."""
        return [
            (value, machine)
            for value, made in self.made.items()
            if any(tensor.requires_grad for tensor in tensors_in(made))
            for machine in self.layout.destinations(value)
        ]

    def outputs(self) -> dict[str, Any]:
        """The model's output values, on the machine where they come together, ready for a loss."""
        assert self.machine == self.layout.answer_machine
        return {value: self._given(value, LOSS) for value in self.layout.outputs}

    def _given(self, value: str, reader: int) -> Any:
        """What a fragment, or the loss, reads.

        Each has leaves of its own, because gradients of two leaves may share memory, and autograd adds to it in place.
        """
        if value not in self.read:
            return self.inputs.get(value)
        wants = tuple(tensor.requires_grad for tensor in tensors_in(self.read[value]))
        return self.leaves.setdefault((value, reader), _leaves(self.read[value], wants))

    def missing(self) -> list[str]:
        """Values that this machine still waits for, for an error message."""
        waiting = [index for index in self.mine if index not in self.forward_done]
        reads = [value for index in waiting for value in self.layout.fragments[index].reads]
        return [value for value in reads if value not in self.read and value not in self.inputs]

    def _run_forward(self) -> list[FragmentMessage]:
        messages: list[FragmentMessage] = []
        while (index := self.next_forward()) is not None:
            messages += self.forward(index)
        return messages

    def next_forward(self, among: Sequence[int] | None = None) -> int | None:
        """A fragment, of all or of some, that can run now."""
        for index in self.mine if among is None else among:
            if index not in self.forward_done and self._is_here(self.layout.fragments[index].reads):
                return index
        return None

    def is_forward_done(self, fragments: Sequence[int]) -> bool:
        """Have these been computed, and is what the loss reads here if it comes after one of them?"""
        answers = self.layout.answer_fragment in fragments
        return self.forward_done.issuperset(fragments) and (not answers or self._is_here(self.layout.outputs))

    def _is_here(self, values: Sequence[str]) -> bool:
        return all(value in self.read or value in self.inputs for value in values)

    def forward(self, index: int) -> list[FragmentMessage]:
        """Run a fragment; returns what others need of it."""
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

    # ---- backward ----

    def backward(self) -> list[FragmentMessage]:
        """Begin the way back: the loss has put gradients on `outputs()`. Other machines need not be told."""
        return self.answered() + self._run_backward()

    def answered(self) -> list[FragmentMessage]:
        """The loss has put gradients on `outputs()`: what goes back at once; fragments come later."""
        self.backward_done.add(LOSS)
        for value in self.layout.outputs:
            if (value, LOSS) in self.leaves:
                self.found[value, LOSS] = [tensor.grad for tensor in tensors_in(self.leaves[value, LOSS])]
        return [message for value in self.layout.outputs for message in self._give_back(value)]

    def _run_backward(self) -> list[FragmentMessage]:
        messages: list[FragmentMessage] = []
        while (index := self.next_backward()) is not None:
            messages += self.backward_of(index)
        return messages

    def next_backward(self, among: Sequence[int] | None = None) -> int | None:
        """A fragment, of all or of some, that can go back now."""
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

    def backward_of(self, index: int) -> list[FragmentMessage]:
        """Go back through a fragment; returns the gradients that others wait for."""
        fragment = self.layout.fragments[index]
        found = self.compute.backward(index, [self._total(value) for value in fragment.makes])
        self.found |= {(value, index): gradients for value, gradients in zip(fragment.reads, found, strict=True)}
        self.backward_done.add(index)
        return [message for value in fragment.reads for message in self._give_back(value)]

    def _total(self, value: str) -> list[Tensor | None]:
        """The sum over this machine and the others, in the order of their numbers, so that bits repeat."""
        by_machine = dict(self.arrived.get(value, {}))
        if value in self.read:
            by_machine[self.machine] = self._found(value)
        totals = _sums([by_machine[machine] for machine in sorted(by_machine)])
        return totals or [None] * len(tensors_in(self.made[value]))

    def _found(self, value: str) -> list[Tensor | None]:
        """The gradient of what is read here: the sum over its readers, in the order in which they went back."""
        readers = self._local_readers(value)[::-1]  # of which the loss is the last
        none: Gradients = [None] * len(tensors_in(self.read[value]))  # of a reader that need not go back
        return _sums([self.found.get((value, reader), none) for reader in readers])

    def _give_back(self, value: str) -> list[FragmentMessage]:
        """The gradient of a received value, when the last of its readers here is done."""
        if value in self.inputs or value in self.made or value not in self.read:
            return []
        tensors = tensors_in(self.read[value])
        if not any(t.requires_grad for t in tensors) or not self.backward_done.issuperset(self._local_readers(value)):
            return []
        home = self.layout.fragments[self.layout.maker[value]].machine
        return [FragmentMessage("gradient", value, self.machine, home, self._found(value))]


def _leaves(value: Any, wants_gradient: tuple[bool, ...]) -> Any:
    """The same nest, cut off from what made it; integers and whatever wants no gradient stay constants."""
    wants = iter(wants_gradient)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(next(wants)), value)


def _sums(columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Of the tensors of one value, each summed over the columns that have it."""
    return [_sum([gradient for gradient in row if gradient is not None]) for row in zip(*columns, strict=True)]


def _sum(gradients: list[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total
