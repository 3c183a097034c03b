"""Measure a cut model on this machine: time, outputs and activations of every unit, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from rainband.model.seeds import random_numbers_from
from rainband.model.unchanged import same_buffers
from rainband.model_parallel.graph.cut import device_of
from rainband.model_parallel.graph.fragments import Fragment, as_module
from rainband.model_parallel.graph.graph import Cut, tensors_in
from rainband.model_parallel.placement.profile import CutValue, Profile, Unit

MULTIPLICATIONS_PER_S = 1e10  # of a model that cannot be run


def measure(
    cut: Cut,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    model: str = "",
    repeats: int = 5,
    counted: bool = False,
) -> Profile:
    """Run the cut unit by unit; times are medians of `repeats` runs, after one run for warm-up.

    Buffers, gradients and torch's random numbers stay unchanged. If `counted`, or if the model has no values (device
    meta), times are estimated: its multiplications at 10 billion per second, the same on every machine.
    """
    if any(parameter.is_meta for parameter in cut.module.parameters()):
        counted = True
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (tuple(args), dict(kwargs or {})))
    values = cut.bind(args, kwargs)
    tensors = [*cut.module.parameters(), *tensors_in(values)]
    with same_buffers(cut.module), device_of(cut.module), random_numbers_from(0, tensors):
        units = [_measure_unit(cut, name, values, 0 if counted else repeats) for name in _in_running_order(cut)]
    edges = [_value(cut, name, values) for name in values if name in cut.nodes]
    first = tensors_in(list(args))
    size = len(first[0]) if first and first[0].dim() else 1
    return Profile(model, size, tuple(units), tuple(edge for edge in edges if edge is not None), counted)


def _in_running_order(cut: Cut) -> list[str]:
    """Return the units in an order in which each follows all units that it, or a node that stays with it, reads."""
    waiting, order = list(cut.units), []
    before = {unit: {maker for _, maker, reader in cut.unit_edges() if reader == unit} for unit in waiting}
    while waiting:
        unit = next((u for u in waiting if not before[u] & set(waiting)), None)
        if unit is None:
            raise ValueError(f"units {', '.join(waiting)} read each other's values, so they cannot be put in order.")
        waiting.remove(unit)
        order.append(unit)
    return order


def _measure_unit(cut: Cut, unit: str, values: dict[str, Any], repeats: int) -> Unit:
    """Return a unit's costs; with 0 repeats, its times are those of its multiplications."""
    members = cut.members(unit)
    reads = tuple(dict.fromkeys(v for name in members for v in cut.reads(name) if v not in members))
    module = as_module(cut, Fragment(0, 0, members, reads, members))
    forward, backward = [], []
    for _ in range(1 + repeats):
        given = [_fresh(values[value]) for value in reads]
        results, seconds = _timed(lambda given=given: module(*given), not repeats)  # type: ignore[misc]
        forward.append(seconds)
        sources = [*tensors_in(given), *module.parameters()]
        backward.append(_time_backward(results, sources, not repeats))
    values.update(zip(members, pytree.tree_map_only(Tensor, Tensor.detach, results), strict=True))
    parameters = {id(parameter): parameter for parameter in cut.parameters_of(members).values()}
    return Unit(
        unit,
        forward_s=statistics.median(forward[1:] or forward),
        backward_s=statistics.median(backward[1:] or backward),
        parameter_bytes=sum(map(_bytes, parameters.values())),
        activation_bytes=_kept_bytes(results, given),
        what=cut.what(unit),
        layer=cut.layer(unit),
    )


def _fresh(value: Any) -> Any:
    """Return a value detached and requiring a gradient, like one received from another machine."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.is_floating_point())

    return pytree.tree_map_only(Tensor, leaf, value)


def _timed(run: Callable[[], Any], counted: bool) -> tuple[Any, float]:
    """Return the result and its seconds, measured or estimated from its multiplications."""
    if not counted:
        began = time.perf_counter()
        result = run()
        return result, time.perf_counter() - began
    with FlopCounterMode(display=False) as counter:
        result = run()
    return result, counter.get_total_flops() / 2 / MULTIPLICATIONS_PER_S


def _time_backward(results: Any, sources: Sequence[Tensor], counted: bool) -> float:
    roots = [tensor for tensor in tensors_in(results) if tensor.grad_fn is not None]
    leaves = [tensor for tensor in sources if tensor.requires_grad]
    if not roots or not leaves:
        return 0.0
    gradients = [torch.ones_like(root) for root in roots]
    return _timed(lambda: torch.autograd.grad(roots, leaves, gradients, allow_unused=True), counted)[1]


def _kept_bytes(results: Any, given: Any) -> int:
    """Return the bytes of a unit's results, without views of its inputs or of other results."""
    read = {_memory(tensor) for tensor in tensors_in(given)}
    made = {_memory(tensor): _bytes(tensor) for tensor in tensors_in(results)}
    return sum(count for memory, count in made.items() if memory not in read)


def _memory(tensor: Tensor) -> int:
    """Return a key that is equal for tensors over the same memory; meta tensors all have address 0."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or int(storage._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _value(cut: Cut, name: str, values: Mapping[str, Any]) -> CutValue | None:
    """Return the description of a value that other units read."""
    maker = cut.leaders[name]
    readers = {cut.leaders[other] for other in cut.nodes if name in cut.reads(other)} - {maker}
    if not readers:
        return None
    tensors = tensors_in(values[name])
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    in_order = tuple(unit for unit in cut.units if unit in readers)
    return CutValue(name, maker, in_order, sum(map(_bytes, tensors)), sum(map(_bytes, floating)))
