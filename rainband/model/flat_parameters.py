"""Flat parameters: a module's parameters in one vector per dtype and device; the module stays an ordinary one."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import from_dlpack

from rainband.model.sync_batch_norm import refuse_sync_batch_norm
from rainband.protocol.layout import ITEM_BYTES, BlockSpec, LayoutEntry, ParameterSpec, Scalar, Settings, arrange

# What a parameter group says about how one process computes or what a scheduler remembers stays where it is.
LOCAL_SETTINGS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}


class Flat:
    """A module's parameters in one memory per dtype and device; each keeps its own storage over its part.

    `Parameter` objects stay the same, so optimizers, schedulers, hooks and ties keep their references. As
    storages are separate, saving tools do not take the parameters for one shared tensor.

    Gradients stay where autograd puts them and are copied once, by `write`. Whatever changes parameters
    (copying into `view`, `add_`, `check`) must run between a step and the next forward: autograd does not
    notice a change of this memory between forward and backward, and would compute wrong gradients.

    Buffers (the running statistics of BatchNorm) stay outside: they are no function of gradients, so a server
    could not update them; each worker's follow the batches it sees itself.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Mapping[str, Any]] | None = None,
        parts: Mapping[int, int] | None = None,
        part: int = 0,
    ) -> None:
        """`groups` as torch.optim takes them; by default one group of all parameters.

        A group's parameters get a place whether they require a gradient now or not: they may be unfrozen.
        Parameters in no group stay outside, as they are.

        `parts`: id of a parameter -> the worker that holds it, where several compute one model together; `part` is
        this one. The layout is the whole model's, but others' parameters have no memory here and stay as they are.
        """
        refuse_sync_batch_norm(module)
        groups = [{"params": list(module.parameters())}] if groups is None else groups
        members = _members(module, groups)
        settings = [_settings(number, group) for number, group in enumerate(groups)]
        for member in members:
            if (parts or {}).get(id(member.parameter), part) == part:
                _refuse_what_cannot_be_flat(member)
        _refuse_shared_memory(module, {member.name for member in members})

        self.module = module
        self.parameters = [member.parameter for member in members]
        self.layout = arrange(
            [_entry(member, (parts or {}).get(id(member.parameter), 0)) for member in members], settings
        )
        self.vectors = [
            torch.zeros(
                vector.numel if vector.part == part else 0, dtype=getattr(torch, vector.dtype), device=vector.device
            )
            for vector in self.layout.vectors
        ]
        specs = self.layout.parameters
        self.own = [number for number, spec in enumerate(specs) if self.layout.vectors[spec.vector].part == part]
        self._parameter_views = self._make_views()
        self._addresses = [view.data_ptr() for view in self._parameter_views]
        self._stretches: dict[tuple[int, int, int], list[_Stretch]] = {}
        for parameter, flat_view in zip(self._held(), self._parameter_views, strict=True):
            _move_into(parameter, flat_view)

    def _held(self) -> list[nn.Parameter]:
        return [self.parameters[number] for number in self.own]

    def _make_views(self) -> list[Tensor]:
        return [self._make_view(self.layout.parameters[number], self.parameters[number]) for number in self.own]

    def check(self) -> None:
        """Move parameters that were reassigned back into the vectors, or raise. Cheap enough for every step."""
        assert self.vectors, "this Flat was released"
        held = self._held()
        if [parameter.data_ptr() for parameter in held] == self._addresses:
            return
        specs = [self.layout.parameters[number] for number in self.own]
        everyone = zip(specs, held, self._parameter_views, strict=True)
        strays = [(spec.name, p, view) for spec, p, view in everyone if p.data_ptr() != view.data_ptr()]
        for name, parameter, view in strays:
            _refuse_another_kind(name, parameter, view)
        for _, parameter, flat_view in strays:
            _move_into(parameter, flat_view)

    def check_identity(self) -> None:
        """Raise if the module lost one of these Parameter objects. Too slow for every step."""
        now = {id(parameter) for parameter in self.module.parameters()}
        everyone = zip(self.layout.parameters, self.parameters, strict=True)
        lost = [spec.name for spec, parameter in everyone if id(parameter) not in now]
        if lost:
            raise ValueError(
                f"the module has other Parameter objects than at join ({_listed(lost)}), which its optimizer "
                "does not know: call load_state_dict without assign=True, or replace them before joining."
            )

    def gradients(self) -> list[Tensor | None]:
        """Return each parameter's gradient as autograd left it; None, which is not zero, where there is none."""
        found: list[Tensor | None] = [None] * len(self.parameters)
        for number in self.own:
            gradient = self.parameters[number].grad
            found[number] = None if gradient is None else _dense(gradient)
        return found

    def absent(self, block: BlockSpec, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
        """Return the numbers of the parameters of a block that have no tensor."""
        return tuple([segment.parameter for segment in block.segments if tensors[segment.parameter] is None])

    def write(self, block: BlockSpec, tensors: Sequence[Tensor | None], out: Tensor) -> None:
        """Copy this block's slice of one tensor per parameter into `out`, 1-D.

        Elements come in the order of the parameter's memory, whatever the strides of its tensor. What is
        absent or belongs to no parameter becomes zero; if `out` is shorter than the block, it is left out. `out` may
        be on another device.
        """
        memory = self.vectors[block.vector]
        complete = len(out) == block.numel or not self.absent(block, tensors)
        sources: list[Tensor] = []
        for stretch in self._stretches_of(block):
            tensor = stretch.zeros if stretch.parameter is None else tensors[stretch.parameter]
            if tensor is not None and (complete or stretch.parameter is not None):
                sources.extend(_in_memory_order(stretch, tensor))
            elif complete:
                sources.append(memory.new_zeros(stretch.numel))
        numel = sum([source.numel() for source in sources])
        assert out.shape == (numel,), f"out is {tuple(out.shape)}, the values ({numel},)"
        if not sources:
            return
        if len(sources) == 1:
            out.copy_(sources[0])
        elif out.device == memory.device:
            torch.cat(sources, out=out)
        else:  # one transfer instead of one per stretch
            out.copy_(torch.cat(sources))

    def contiguous_slice(self, block: BlockSpec, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return this block's slice if it lies in one contiguous stretch of one tensor, else None."""
        stretches = self._stretches_of(block)
        parameter = stretches[0].parameter
        tensor = None if len(stretches) > 1 or parameter is None else tensors[parameter]
        memory = self.vectors[block.vector]
        if tensor is None or tensor.dtype != memory.dtype or tensor.device != memory.device:
            return None
        sources = _in_memory_order(stretches[0], tensor)
        return sources[0] if len(sources) == 1 and sources[0].is_contiguous() else None

    def view(self, block: BlockSpec) -> Tensor:
        """Return this block of the vectors, 1-D: a pull is copied into it."""
        return self.vectors[block.vector][block.start : block.stop]

    @torch.no_grad()
    def add_(self, tensors: Sequence[Tensor | None], alpha: float) -> None:
        """Add alpha times its tensor to every parameter that has one: a worker's local step."""
        assert self.vectors, "this Flat was released"
        present = [(p, t) for p, t in zip(self.parameters, tensors, strict=True) if t is not None]
        if present:
            torch._foreach_add_([p for p, _ in present], [t for _, t in present], alpha=alpha)

    def twin(self) -> Flat:
        """Return another memory for the same module with the same values; attach one before computing with it."""
        return self.over([vector.clone() for vector in self.vectors])

    def over(self, vectors: Sequence[Tensor]) -> Flat:
        """Return the same module's parameters over these vectors, with the values in them."""
        other = copy.copy(self)
        other.vectors = list(vectors)
        other._parameter_views = other._make_views()
        other._addresses = [view.data_ptr() for view in other._parameter_views]
        return other

    @property
    def parameter_views(self) -> Sequence[Tensor]:
        """One tensor per parameter, in the parameter's shape, over the vectors."""
        return self._parameter_views

    def attach(self) -> None:
        """Make this memory the module's parameters, without copying; between a step and the next forward only."""
        for parameter, flat_view in zip(self._held(), self._parameter_views, strict=True):
            parameter.data = flat_view

    def release(self) -> None:
        """Give each parameter its own memory again; this object cannot be used afterwards."""
        for parameter, address in zip(self._held(), self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
        self.vectors, self._parameter_views = [], []
        self._stretches.clear()

    def _make_view(self, spec: ParameterSpec, parameter: nn.Parameter) -> Tensor:
        memory = self.vectors[spec.vector][spec.start : spec.start + spec.numel]
        # Through DLPack, because a slice would share its storage object with all other parameters: then
        # safetensors refuses to save the module, and torch.save writes all of it for each single layer.
        return from_dlpack(memory).as_strided(parameter.shape, parameter.stride())

    def _stretches_of(self, block: BlockSpec) -> list[_Stretch]:
        """Return the block's segments and the gaps between them, in order; cached."""
        key = (block.vector, block.start, block.stop)
        if key not in self._stretches:
            self._stretches[key] = list(self._walk(block))
        return self._stretches[key]

    def _walk(self, block: BlockSpec) -> Iterator[_Stretch]:
        zeros = self.vectors[block.vector].new_zeros
        at = 0
        for segment in block.segments:
            if segment.start > at:
                yield _Stretch(segment.start - at, zeros=zeros(segment.start - at))
            spec = self.layout.parameters[segment.parameter]
            order = None if spec.order == tuple(range(len(spec.order))) else spec.order
            yield _Stretch(segment.numel, segment.parameter, segment.offset, spec.shape, order)
            at = segment.stop
        if block.numel > at:
            yield _Stretch(block.numel - at, zeros=zeros(block.numel - at))


class BlockTensors:
    """One block's slice of one tensor per parameter, such as a gradient: written when and where a port needs it."""

    __slots__ = ("block", "flat", "tensors")

    def __init__(self, flat: Flat, block: BlockSpec, tensors: Sequence[Tensor | None]) -> None:
        self.flat, self.block, self.tensors = flat, block, tensors

    def write(self, out: Tensor) -> None:
        self.flat.write(self.block, self.tensors, out)

    def contiguous(self) -> Tensor | None:
        return self.flat.contiguous_slice(self.block, self.tensors)


@torch.no_grad()
def is_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if every element is a finite number.

    An infinity or NaN makes the sum not finite, so a finite sum is proof, at a twentieth of the cost of checking each
    element. A sum that is not finite may also have overflowed: only then check each.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    sums: dict[torch.device, list[Tensor]] = {}  # read once per device, because each read waits for it
    for tensor in present:
        sums.setdefault(tensor.device, []).append(tensor.sum())
    if all(bool(torch.stack(on_device).isfinite().all()) for on_device in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in present)


class _Stretch(NamedTuple):
    """A stretch of a block: of one parameter, or (a gap) of none."""

    numel: int
    parameter: int | None = None
    offset: int = 0
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None  # None: contiguous
    zeros: Tensor | None = None  # what fills a gap


def _in_memory_order(stretch: _Stretch, tensor: Tensor) -> Sequence[Tensor]:
    """Return this stretch of a tensor, 1-D, in the memory order of its parameter."""
    if stretch.parameter is None:
        return (tensor,)
    assert tensor.shape == stretch.shape, f"tensor of shape {tuple(tensor.shape)} for a parameter {stretch.shape}"
    if tensor.requires_grad:  # a gradient made with create_graph=True
        tensor = tensor.detach()
    if stretch.order is not None:
        tensor = tensor.permute(stretch.order)
    if tensor.is_contiguous():
        return (tensor.as_strided((stretch.numel,), (1,), tensor.storage_offset() + stretch.offset),)
    return _stretch(tensor, stretch.offset, stretch.offset + stretch.numel)


def _stretch(tensor: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return elements `start` to `stop` of a strided tensor, counted row by row, without copying the rest."""
    row = tensor.numel() // len(tensor)
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # it begins and ends inside one row
        return _stretch(tensor[end_whole], start - end_whole * row, stop - end_whole * row)
    head = _stretch(tensor[first_whole - 1], start % row, row) if start % row else []
    tail = _stretch(tensor[end_whole], 0, stop % row) if stop % row else []
    return [*head, tensor[first_whole:end_whole].reshape(-1), *tail]


def _dense(gradient: Tensor) -> Tensor:
    if gradient.layout is torch.strided:
        return gradient
    warnings.warn("a sparse gradient is sent as a dense one: rows alone cannot be sent yet.", stacklevel=3)
    return gradient.to_dense()


def _move_into(parameter: nn.Parameter, flat_view: Tensor) -> None:
    flat_view.copy_(parameter.detach())
    parameter.data = flat_view


class _Member(NamedTuple):
    """A parameter that one of the groups holds."""

    name: str
    parameter: nn.Parameter
    group: int


def _members(module: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[_Member]:
    """Return the parameters of all groups, in the module's order, each under its first name."""
    names = {id(parameter): name for name, parameter in _named_parameters(module)}
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        for key in map(id, _params(group)):
            if key not in names:
                raise ValueError(
                    f"group {number} holds a parameter that the module does not have: "
                    "build the optimizer from the parameters of the module that joins."
                )
            if key in group_of:
                both = f"in group {group_of[key]} and in group {number}"
                raise ValueError(f"parameter '{names[key]}' is given twice, {both}: give it once.")
            group_of[key] = number
    if not group_of:
        raise ValueError("there is nothing to train: give at least one parameter of the module.")
    return [_Member(name, p, group_of[id(p)]) for name, p in _named_parameters(module) if id(p) in group_of]


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under their names without the prefix of torch.compile."""
    for name, parameter in module.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def _params(group: Mapping[str, Any]) -> list[Tensor]:
    """Return a group's parameters: torch.optim takes one tensor, several, or pairs of name and tensor."""
    params = group["params"]
    several = [params] if isinstance(params, Tensor) else list(params)
    return [item[1] if isinstance(item, tuple) else item for item in several]


def _entry(member: _Member, part: int) -> LayoutEntry:
    p = member.parameter
    device = "cpu" if p.is_meta else str(p.device)  # held by another worker, where it has values
    return LayoutEntry(member.name, tuple(p.shape), _dtype(p), device, member.group, _memory_order(p), part)


def _settings(number: int, group: Mapping[str, Any]) -> Settings:
    """Return the settings of a parameter group as servers need them: tensors as numbers, tuples as lists."""
    settings: Settings = {}
    for key in group.keys() - LOCAL_SETTINGS:
        value = group[key]
        try:
            settings[key] = list(map(_scalar, value)) if isinstance(value, list | tuple) else _scalar(value)
        except (ValueError, RuntimeError):  # .item() of an array or a tensor of several elements
            raise ValueError(
                f"group {number} has {key}={value!r}, which cannot be sent to a server: make it a number, "
                "a string, None or a list of these, or leave it out of the group."
            ) from None
    return dict(sorted(settings.items()))


def _scalar(value: Any) -> Scalar:
    """Return a number, string or None as it is, and the element of a tensor or numpy scalar."""
    plain = value.item() if hasattr(value, "item") else value
    if plain is None or isinstance(plain, float | int | bool | str):
        return plain
    raise ValueError(f"{value!r} is not a scalar")


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in memory order, slowest first; those of length 1 come first."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d] if tensor.shape[d] > 1 else -math.inf))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_what_cannot_be_flat(member: _Member) -> None:
    reason = _reason_against(member.parameter)
    if reason:
        raise ValueError(f"parameter '{member.name}' {reason}, or leave it out of the optimizer.")


def _reason_against(parameter: nn.Parameter) -> str | None:
    """Return why a parameter cannot be part of a vector, and what to do; None if it can."""
    if is_lazy(parameter):
        return "has no shape yet: run one batch through the module before joining"
    if parameter.is_meta:
        return "has no values (device meta): call module.to_empty(device='cpu') and initialise it"
    if parameter.layout is not torch.strided:
        return f"is sparse ({parameter.layout}): make it dense with .to_dense()"
    if type(parameter.data) is not Tensor:
        return f"is a {type(parameter.data).__name__}, not a plain tensor: unwrap it before joining"
    if parameter.is_complex():
        return f"is complex ({_dtype(parameter)}): keep torch.view_as_real(...) of it as the parameter"
    if _dtype(parameter) not in ITEM_BYTES:
        return f"is {_dtype(parameter)}, not {', '.join(ITEM_BYTES)}: make it a buffer (register_buffer)"
    if not parameter.permute(_memory_order(parameter)).is_contiguous():
        shape, strides = tuple(parameter.shape), parameter.stride()
        return (
            f"is a slice or an expansion of another tensor (shape {shape}, strides {strides}): "
            "give it memory of its own with p.data = p.data.clone(memory_format=torch.contiguous_format)"
        )
    return None


def _refuse_shared_memory(module: nn.Module, members: set[str]) -> None:
    """Refuse parameters that share memory with another object: moving one would break the tie."""
    tensors: list[tuple[str, Tensor]] = [*_named_parameters(module), *module.named_buffers()]
    ranges = sorted((*_addresses(tensor), name) for name, tensor in tensors if _has_memory(tensor))
    reached, owner = ("", 0), ""
    for device, first, end, name in ranges:
        if (device, first) < reached and members & {name, owner}:
            raise ValueError(
                f"'{owner}' and '{name}' are two objects over the same memory: assign one Parameter to both, "
                "as in decoder.weight = encoder.weight, or give one a copy, p.data = p.data.clone()."
            )
        if (device, end) > reached:
            reached, owner = (device, end), name


def _has_memory(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0


def _addresses(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device, the first address, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _refuse_another_kind(name: str, parameter: nn.Parameter, view: Tensor) -> None:
    if (parameter.dtype, parameter.device, parameter.shape) == (view.dtype, view.device, view.shape):
        return
    raise ValueError(
        f"parameter '{name}' was {_kind(view)} at join and is {_kind(parameter)} now: "
        "call .to(), .half(), .cuda() and the like before joining."
    )


def _kind(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} of shape {tuple(tensor.shape)} on {tensor.device}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
