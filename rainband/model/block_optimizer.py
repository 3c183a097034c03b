"""Run a torch optimizer on one block of the flat parameters, and test which optimizers allow that."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from rainband.protocol.layout import UNIT, BlockSpec
from rainband.protocol.optimizer_spec import (
    BUILT_IN,
    HOW_TO_COMPUTE,
    OptimizerSpec,
    Settings,
    changed_numbers,
    own_settings,
    plain,
)

FUSED_ON_CPU = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class BlockOptimizer:
    """A torch optimizer over one block's segments, in the user's parameter groups."""

    def __init__(
        self, spec: OptimizerSpec, block: BlockSpec, values: Tensor, groups: Sequence[Mapping[str, object]]
    ) -> None:
        """`values` is the block's memory; settings of a group override those of the spec."""
        assert values.dtype in (torch.float32, torch.float64), f"{values.dtype} loses small steps"
        assert values.shape == (block.numel,), f"block {block.index} has {block.numel} elements"
        self._class = optimizer_class(spec.name)
        self._segments = block.segments
        self._everyone = range(len(block.segments))
        self._values = values
        self._tensors = [values[segment.start : segment.stop] for segment in block.segments]
        self._sizes, self._slice_of = _stretches(block)
        self._settings = _complete(self._class, spec.settings, groups)
        self._in_constructor = _for_constructor(self._class, spec.settings, self._settings)
        self._groups_here = sorted({segment.group for segment in block.segments}) or [0]
        self._optimizer = self._over(self._tensors, [segment.group for segment in block.segments])
        self._bare_step = _without_wrappers(self._class)
        self._lr_scale = 1.0
        self._without_momentum = self._find_without_momentum()
        self.single_pass = self._writes_once()  # concurrent readers see old or new values, nothing else

    def step(self, gradient: Tensor, absent: Collection[int] = (), lr_scale: float = 1.0) -> None:
        """Apply a gradient. Parameters in `absent` have none and do not change, not even by momentum or decay."""
        if not self._segments:  # a block without elements, where only time is simulated
            return
        assert gradient.shape == self._values.shape and gradient.dtype == self._values.dtype
        if lr_scale != self._lr_scale:
            self._lr_scale = lr_scale
            self._write_groups()
        present: Sequence[int] = self._everyone
        if absent:
            without = frozenset(absent)
            present = [i for i in present if self._segments[i].parameter not in without]
        slices = torch.split_with_sizes(gradient, self._sizes)
        for together in self._steppable_together(present):
            self._step(together, slices)

    def update_groups(self, groups: Sequence[Mapping[str, object]]) -> None:
        """Use new numbers from the user's schedule; if another setting differs, raise and change nothing."""
        if len(groups) != len(self._settings):
            raise ValueError(
                f"there are {len(groups)} parameter groups, but the run began with {len(self._settings)}: "
                "add groups to the optimizer before the run begins."
            )
        pairs = zip(self._settings, groups, strict=True)
        changes = [changed_numbers(self._class.__name__, number, old, new) for number, (old, new) in enumerate(pairs)]
        if any(changes):
            for settings, changed in zip(self._settings, changes, strict=True):
                settings.update(changed)
            self._write_groups()

    def groups(self) -> tuple[Settings, ...]:
        """Return all settings of each of the user's parameter groups, as they are now."""
        return tuple(dict(settings) for settings in self._settings)

    def state(self, copied: bool = True) -> dict[str, list[Tensor]]:
        """Return the state by name and segment, or copies of it; an empty vector where a segment has none yet."""
        entries = [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]
        names = dict.fromkeys(name for entry in entries for name in entry)
        return {name: self.state_of(name, copied) for name in names}

    def state_of(self, name: str, copied: bool = True) -> list[Tensor]:
        """Return one kind of state, or copies of it, by segment."""
        return [_as_tensor(self._optimizer.state.get(tensor, {}).get(name), copied) for tensor in self._tensors]

    def load_state(self, state: Mapping[str, Sequence[Tensor]], copy: bool = True) -> None:
        """Continue from a state of the same segments; if it does not fit, raise and change nothing.

        `copy`: the tensors are needed elsewhere; otherwise the optimizer keeps them, which saves time for large ones.
        """
        for name, tensors in state.items():
            if len(tensors) != len(self._segments):
                raise ValueError(
                    f"state '{name}' is of {len(tensors)} segments, this block has {len(self._segments)}: "
                    "cut the state where the block is cut."
                )
        examples = self._example_states()
        entries = [
            _entry({name: of[i] for name, of in state.items()}, examples[segment.group], segment.numel, copy)
            for i, segment in enumerate(self._segments)
        ]
        for tensor, entry in zip(self._tensors, entries, strict=True):
            self._optimizer.state.pop(tensor, None)
            if entry:
                self._optimizer.state[tensor] = entry
        self._without_momentum = self._find_without_momentum()

    def _over(self, tensors: Sequence[Tensor], group_of: Sequence[int]) -> Optimizer:
        members: dict[int, list[Tensor]] = {group: [] for group in self._groups_here}
        for tensor, group in zip(tensors, group_of, strict=True):
            members[group].append(tensor)
        groups = [{"params": members[group], **self._settings[group]} for group in self._groups_here]
        return _construct(self._class, self._in_constructor, groups)

    def _write_groups(self) -> None:
        for written, group in zip(self._optimizer.param_groups, self._groups_here, strict=True):
            written.update(self._settings[group])
            written["lr"] *= self._lr_scale

    def _step(self, segments: Sequence[int], slices: Sequence[Tensor]) -> None:
        try:
            for i in segments:
                self._tensors[i].grad = slices[self._slice_of[i]]
            with torch.no_grad():
                self._bare_step(self._optimizer)
        finally:  # the gradient's memory is lent, and reused for the next one
            for i in segments:
                self._tensors[i].grad = None
        self._without_momentum.difference_update(segments)

    def _steppable_together(self, present: Sequence[int]) -> list[Sequence[int]]:
        """Split segments: torch's fused SGD cannot take some with and some without a momentum buffer in one call."""
        if not self._without_momentum:
            return [present] if present else []
        first = [i for i in present if i in self._without_momentum]
        others = [i for i in present if i not in self._without_momentum]
        return [some for some in (first, others) if some]

    def _find_without_momentum(self) -> set[int]:
        if self._class is not torch.optim.SGD:
            return set()
        return {
            i
            for i, segment in enumerate(self._segments)
            if self._settings[segment.group]["momentum"] != 0
            and "momentum_buffer" not in self._optimizer.state.get(self._tensors[i], {})
        }

    def _writes_once(self) -> bool:
        """Return True if a step writes each value once. Fused kernels do, except remainders with decoupled decay.

        Whether there is any decay now does not count, because a schedule may bring it in later.
        """
        ragged = [segment for segment in self._segments if segment.numel % UNIT]
        decoupled = any(self._settings[segment.group].get("decoupled_weight_decay") for segment in ragged)
        return bool(self._optimizer.defaults.get("fused")) and not decoupled

    def _example_states(self) -> dict[int, dict[str, Any]]:
        """Return the state of an example segment after one step, by group: the expected names and kinds."""
        ones = [torch.ones(1, dtype=self._values.dtype) for _ in self._groups_here]
        for one in ones:
            one.grad = one.clone()
        optimizer = self._over(ones, self._groups_here)
        with torch.no_grad():
            self._bare_step(optimizer)
        return {group: optimizer.state.get(one, {}) for group, one in zip(self._groups_here, ones, strict=True)}


def _without_wrappers(cls: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return the class's own step, without torch's wrappers for hooks and profiling: half the cost of an update."""
    step: Callable[[Optimizer], object] = cls.step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class that a spec names. A module:Class is imported: trust its source."""
    module_name, colon, class_name = name.partition(":")
    if not colon:
        return cast(type[Optimizer], getattr(torch.optim, BUILT_IN[name]))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"optimizer '{name}' cannot be imported ({error}): put {class_name} into a module that every "
            "node can import, and give module:Class."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(f"'{name}' is not a torch.optim.Optimizer: give a subclass of it as module:Class.")
    return found


def build(spec: OptimizerSpec, params_groups: Iterable[Tensor] | Iterable[Mapping[str, Any]]) -> Optimizer:
    """Return the optimizer over tensors or groups as torch.optim takes them; fused if torch can on a CPU."""
    cls = optimizer_class(spec.name)
    given: list[Any] = list(params_groups)
    groups = [{"params": given}] if any(isinstance(item, Tensor) for item in given) else given
    settings = _complete(cls, spec.settings, groups)
    over = [{**own, "params": list(group["params"])} for own, group in zip(settings, groups, strict=True)]
    return _construct(cls, _for_constructor(cls, spec.settings, settings), over)


def blockwise_obstacle(
    spec_or_class: OptimizerSpec | type[Optimizer], settings: Mapping[str, object] | None = None
) -> str | None:
    """Try an optimizer on a whole tensor and on two parts; return None if servers can run it, else why not."""
    settings = settings or {}
    if isinstance(spec_or_class, OptimizerSpec):
        return blockwise_obstacle(optimizer_class(spec_or_class.name), {**spec_or_class.settings, **settings})
    if hasattr(spec_or_class, "train") and hasattr(spec_or_class, "eval"):
        return "it has a mode for training and one for evaluation, which only the training loop can switch"
    if reason := needs_closure(spec_or_class):
        return reason
    if "lr" not in _constructor_names(spec_or_class):
        return "it has no setting lr, which the servers scale"
    # Not the user's lr: a warm-up may begin at 0, where all optimizers do the same.
    trial = {**settings, "lr": 0.1}
    (complete,) = _complete(spec_or_class, trial, [{}])
    constructor = _for_constructor(spec_or_class, trial, [complete])
    return _trial(lambda tensor: _construct(spec_or_class, constructor, [{"params": [tensor], **complete}]))


def _trial(make: Callable[[Tensor], Optimizer]) -> str | None:
    whole = torch.linspace(-1.0, 2.0, 48).reshape(6, 8)
    tensors = [whole, whole.flatten()[:UNIT].clone(), whole.flatten()[UNIT:].clone()]
    try:
        # One optimizer per part, as on two servers: a common one might carry state from part to part.
        optimizers = [make(tensor) for tensor in tensors]
        before = [_numbers(optimizer) for optimizer in optimizers]
        for k in (1, 2, 3):
            _trial_step(k, tensors, optimizers)
    except Exception as error:  # user-defined classes may raise anything
        return f"it fails on a piece of a parameter: {error}"
    if [_numbers(optimizer) for optimizer in optimizers] != before:
        return "it keeps state in its parameter groups, which blocks do not save"
    if odd := _odd_state(optimizers[0]):
        return odd
    if torch.allclose(whole.flatten(), torch.cat(tensors[1:]), rtol=1e-5, atol=1e-6):
        return None
    return "what it does to an element depends on other elements of the parameter"


def _trial_step(k: int, tensors: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
    slope = torch.linspace(0.1, 3.0, 48)  # gives the parts gradients of different norms
    gradient = slope * torch.cos(k * torch.arange(48.0))
    slices = gradient.reshape(6, 8), gradient[:UNIT], gradient[UNIT:]
    for tensor, part, optimizer in zip(tensors, slices, optimizers, strict=True):
        tensor.grad = part.clone()
        optimizer.step()


def _numbers(optimizer: Optimizer) -> Settings:
    (group,) = optimizer.param_groups
    return {name: value for name, value in group.items() if isinstance(value, int | float)}


def _odd_state(optimizer: Optimizer) -> str | None:
    for tensor, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != tensor.shape:
                shapes = f"{tuple(value.shape)} for a parameter of shape {tuple(tensor.shape)}"
                return f"its state '{name}' has shape {shapes}, so it cannot be cut with it"
            if not isinstance(value, Tensor | int | float):
                return f"its state '{name}' is a {type(value).__name__}, neither a tensor nor a number"
    return None


def needs_closure(spec_or_class: OptimizerSpec | type[Optimizer]) -> str | None:
    """Return why the step of an optimizer cannot run without a closure; None: it can."""
    cls = optimizer_class(spec_or_class.name) if isinstance(spec_or_class, OptimizerSpec) else spec_or_class
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return None
    return "its step needs a closure that computes the loss again, which only a custom training loop has"


def _stretches(block: BlockSpec) -> tuple[list[int], list[int]]:
    """Return the lengths of all segments and gaps of a block, and the index of each segment among them."""
    sizes: list[int] = []
    slice_of: list[int] = []
    end = 0
    for segment in block.segments:
        assert segment.start >= end, f"the segments of block {block.index} are out of order"
        if segment.start > end:
            sizes.append(segment.start - end)
        slice_of.append(len(sizes))
        sizes.append(segment.numel)
        end = segment.stop
    return [*sizes, block.numel - end], slice_of


def _construct(cls: type[Optimizer], settings: Mapping[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    tensors = [tensor for group in groups for tensor in group["params"]]
    fusible = all(tensor.is_cpu and tensor.is_floating_point() for tensor in tensors)
    how = {"fused": True} if cls in FUSED_ON_CPU and fusible else {}
    make = cast(Callable[..., Optimizer], cls)
    return make(groups, **settings, **how)


def _constructor_names(cls: type[Optimizer]) -> list[str]:
    _, *settings = inspect.signature(cls).parameters.values()
    named = [setting.name for setting in settings if setting.kind is not setting.VAR_KEYWORD]
    return [name for name in named if name not in HOW_TO_COMPUTE]


def _complete(
    cls: type[Optimizer], settings: Mapping[str, object], groups: Sequence[Mapping[str, object]]
) -> list[Settings]:
    """Return all settings of each group: its own, else the given ones, else the optimizer's defaults."""
    names = _constructor_names(cls)
    defaults = _defaults(cls, {name: value for name, value in plain(settings).items() if name in names})
    given = own_settings(cls.__name__, settings, dict.fromkeys([*names, *defaults]))
    complete = [{**defaults, **given, **own_settings(cls.__name__, group, defaults)} for group in groups]
    for group in complete:  # torch validates the constructor's arguments, but not those of a group
        _defaults(cls, {name: value for name, value in group.items() if name in names})
    return complete


def _for_constructor(cls: type[Optimizer], settings: Mapping[str, object], groups: Sequence[Settings]) -> Settings:
    """Return the settings common to all groups, else the given ones: Adagrad initializes state in its constructor."""
    first, names = groups[0], _constructor_names(cls)
    agreed = {name: value for name, value in first.items() if all(value == of[name] for of in groups)}
    chosen = {**first, **plain(settings), **agreed}
    return {name: chosen[name] for name in names if name in chosen}


def _defaults(cls: type[Optimizer], settings: Settings) -> Settings:
    defaults = _construct(cls, settings, [{"params": [torch.zeros(1, 1)]}]).defaults
    return {name: value for name, value in defaults.items() if name not in HOW_TO_COMPUTE}


def _as_tensor(value: Tensor | float | None, copied: bool = True) -> Tensor:
    if value is None:
        return torch.empty(0)
    if isinstance(value, Tensor):
        return value.detach().clone() if copied else value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _entry(given: Mapping[str, Tensor], example: Mapping[str, Any], numel: int, copy: bool) -> dict[str, Any]:
    """Return one segment's state as the optimizer stores it: nothing, or all names of the example."""
    present = {name: tensor for name, tensor in given.items() if tensor.shape != (0,)}
    if present and present.keys() != example.keys():
        raise ValueError(
            f"the state of a segment is {', '.join(present)}, but this optimizer keeps "
            f"{', '.join(example) or 'none'}: load it into an optimizer with the same settings."
        )
    return {name: _like(example[name], name, tensor, numel, copy) for name, tensor in present.items()}


def _like(example: Tensor | float, name: str, tensor: Tensor, numel: int, copy: bool) -> Tensor | float:
    per_element = isinstance(example, Tensor) and example.dim() > 0
    if tensor.numel() != (numel if per_element else 1):
        raise ValueError(
            f"state '{name}' has {tensor.numel()} elements for a segment of {numel}: "
            "cut the state where the block is cut."
        )
    if isinstance(example, Tensor):
        return tensor.detach().to(example.dtype, copy=copy).reshape(-1 if per_element else ())
    return type(example)(tensor.item())
