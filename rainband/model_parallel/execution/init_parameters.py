"""First values for one machine's part of a model that was built without any, so no machine ever holds them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

if TYPE_CHECKING:
    from rainband.model_parallel.graph.fragments import FragmentLayout
    from rainband.model_parallel.graph.graph import Cut


def init_parameters(
    model: nn.Module, cut: Cut, layout: FragmentLayout, machine: int, seed: int, evaluation: nn.Module | None = None
) -> None:
    """Give memory and values to the parameters and buffers that a machine uses.

    Values depend only on a submodule's name and the seed. Does nothing for a model that has values. A submodule makes
    its own with `reset_parameters`, as those of torch.nn do. `evaluation`: a second graph of the model, which gets the
    same tensors.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    nodes = [name for fragment in layout.fragments if fragment.machine == machine for name in fragment.nodes]
    wanted = {id(parameter) for parameter in cut.parameters_of(nodes).values()}
    wanted |= {id(buffer) for buffer in cut.buffers_of(nodes)}
    graphs = [cut.module] if evaluation is None else [cut.module, evaluation]
    holders = [module for root in (model, *graphs) for module in root.modules()]
    for name, module in reversed(list(model.named_modules())):  # a parent may set its children's values
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(id(tensor) in wanted and tensor.is_meta for tensor in tensors):
            reset = _reset_of(name, module)
            for tensor in tensors:
                _replace(holders, tensor)
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
            reset()


def _reset_of(name: str, module: nn.Module) -> Callable[[], None]:
    for word in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], None] | None = getattr(module, word, None)
        if reset is not None:
            return reset
    raise ValueError(
        f"'{name or 'the model'}' ({type(module).__name__}) has parameters or buffers of its own and no "
        "reset_parameters(), so it cannot be initialized by itself: write that method, or omit `deferred` in the task."
    )


def _replace(holders: list[nn.Module], old: Tensor) -> None:
    """Replace a tensor without memory by one with memory, in all modules that have it."""
    if not old.is_meta:
        return
    memory = torch.empty_like(old, device="cpu")
    new = nn.Parameter(memory, old.requires_grad) if isinstance(old, nn.Parameter) else memory
    for module in holders:
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is old:
                    held[name] = new  # type: ignore[assignment]
