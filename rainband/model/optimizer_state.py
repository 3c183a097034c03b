"""Convert an optimizer's class, settings and state from a custom training loop to the servers' blocks and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rainband.model.block_optimizer import build
from rainband.protocol.layout import BlockSegment, BlockSpec
from rainband.protocol.optimizer_spec import BUILT_IN, NOT_THE_UPDATE, OptimizerSpec

Numbers = dict[str, dict[int, float]]  # state that is one number per parameter: name -> parameter -> number


@dataclass
class State:
    """Optimizer state of all parameters, in their order; None where a parameter has none."""

    tensors: dict[str, list[Tensor | None]] = field(default_factory=dict)  # name -> one per parameter
    numbers: Numbers = field(default_factory=dict)

    def numbers_in(self, block: BlockSpec) -> Numbers:
        """Return the numbers of the parameters that have a segment in a block."""
        inside = [segment.parameter for segment in block.segments]
        return {name: {number: of[number] for number in inside if number in of} for name, of in self.numbers.items()}


# ---- what the optimizer is ----


def spec_of(optimizers: Sequence[Optimizer]) -> OptimizerSpec:
    """Return the optimizer's name: one of torch.optim's, or module:Class."""
    kinds = list(dict.fromkeys(type(optimizer) for optimizer in optimizers))
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"the optimizers are of different classes ({names}), but the servers of a run have one: "
            "use one class with different settings, or parameter groups of one optimizer."
        )
    (kind,) = kinds
    for name, class_name in BUILT_IN.items():
        if getattr(torch.optim, class_name) is kind:
            return OptimizerSpec(name)
    return OptimizerSpec(f"{kind.__module__}:{kind.__qualname__}")


def settings_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return the current settings of each parameter group as numbers and lists, without notes of schedulers."""
    return [
        {name: _plain(group[name]) for name in optimizer.defaults if name not in NOT_THE_UPDATE}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value


# ---- the worker's side ----


def state_of(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> State:
    """Return the current state of a user's optimizers."""
    state, owners = State(), _owners(optimizers)
    for number, parameter in enumerate(parameters):
        owner, example = owners[id(parameter)]
        for name, value in owner.state.get(parameter, {}).items():
            if value is None or name not in example:
                continue
            if _is_per_element(example[name]):
                value = value.to(parameter.dtype)
                state.tensors.setdefault(name, [None] * len(parameters))[number] = value
            else:
                state.numbers.setdefault(name, {})[number] = float(value)
    return state


def put_state(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter], state: State) -> None:
    """Replace the state of a user's optimizers."""
    owners = _owners(optimizers)
    for number, parameter in enumerate(parameters):
        owner, example = owners[id(parameter)]
        entry: dict[str, Any] = {}
        for name, like in example.items():
            if _is_per_element(like):
                value = state.tensors.get(name, {number: None})[number]
            else:
                value = _number_like(like, state.numbers.get(name, {}).get(number))
            if value is not None:
                entry[name] = value
        owner.state.pop(parameter, None)
        if entry:
            owner.state[parameter] = entry


def _owners(optimizers: Sequence[Optimizer]) -> dict[int, tuple[Optimizer, dict[str, Any]]]:
    """Return by the id of each parameter its optimizer, and the state of an example parameter of its group.

    The example, after one step, has the names of the state, and shows which of them are per element. Groups differ: one
    has momentum, or amsgrad, and another has not.
    """
    settings = settings_of(optimizers)
    ones = [torch.ones(1) for _ in settings]
    for one in ones:
        one.grad = torch.ones(1)
    pairs = zip(ones, settings, strict=True)
    trial = build(spec_of(optimizers), [{"params": [one], **of_group} for one, of_group in pairs])
    trial.step()
    groups = [(optimizer, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
    return {
        id(parameter): (optimizer, trial.state.get(one, {}))
        for one, (optimizer, parameters) in zip(ones, groups, strict=True)
        for parameter in parameters
    }


def _is_per_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _number_like(example: Any, number: float | None) -> Any:
    if number is None:
        return None
    if isinstance(example, Tensor):
        return torch.tensor(number, dtype=example.dtype)
    return type(example)(number)


class GatheredState:
    """State received from the servers block by block, assembled per parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.state = State()
        self._memories: dict[tuple[str, int], Tensor] = {}

    def add(self, block: BlockSpec, part: str, absent: Sequence[int], values: Tensor) -> None:
        without = frozenset(absent)
        for segment in block.segments:
            if segment.parameter not in without:
                memory = self._memory(part, segment.parameter)
                memory[segment.offset : segment.offset + segment.numel] = values[segment.start : segment.stop]

    def add_numbers(self, numbers: Numbers) -> None:
        """Add numbers such as step counts: each block has its own, and the largest counts."""
        for name, of in numbers.items():
            known = self.state.numbers.setdefault(name, {})
            for parameter, number in of.items():
                known[parameter] = max(number, known.get(parameter, number))

    def _memory(self, part: str, number: int) -> Tensor:
        """Return one parameter's state, 1-D, in the parameter's memory order."""
        if (part, number) not in self._memories:
            like = torch.zeros_like(self.parameters[number].detach())
            self.state.tensors.setdefault(part, [None] * len(self.parameters))[number] = like
            self._memories[part, number] = like.as_strided((like.numel(),), (1,))
        return self._memories[part, number]


# ---- the server's side ----


def by_segment(
    segments: Sequence[BlockSegment], parts: Mapping[str, tuple[Tensor, Sequence[int]]], numbers: Numbers
) -> dict[str, list[Tensor]]:
    """Convert state from messages to what a block's optimizer takes: name -> one tensor per segment."""
    none = torch.empty(0)
    state = {}
    for name, (values, absent) in parts.items():
        without = frozenset(absent)
        state[name] = [none if s.parameter in without else values[s.start : s.stop] for s in segments]
    for name, of in numbers.items():
        state[name] = [
            torch.tensor(of[s.parameter], dtype=torch.float64) if s.parameter in of else none for s in segments
        ]
    return state


def as_parts(
    block: BlockSpec, state: Mapping[str, Sequence[Tensor]], dtype: torch.dtype | None = None
) -> tuple[dict[str, tuple[Tensor, tuple[int, ...]]], Numbers]:
    """Convert a block's state for messages: tensors as long as the block, parameters without state, and numbers.

    `dtype` is that of the tensors; None: the block's.
    """
    parts: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    numbers: Numbers = {}
    for name, tensors in state.items():
        pairs = list(zip(block.segments, tensors, strict=True))
        if any(tensor.dim() == 0 for tensor in tensors):
            numbers[name] = {s.parameter: float(t) for s, t in pairs if t.dim() == 0}
            continue
        filled = sum(tensor.numel() for tensor in tensors) == block.numel
        make = torch.empty if filled else torch.zeros
        whole = make(block.numel, dtype=dtype or getattr(torch, block.dtype))
        for segment, tensor in pairs:
            if tensor.numel():
                whole[segment.start : segment.stop] = tensor
        parts[name] = whole, tuple(s.parameter for s, t in pairs if not t.numel())
    return parts, numbers
