"""The graph of a model in evaluation mode: no dropout, other statistics in BatchNorm.

Submodules of a graph follow `train()` and `eval()`. Code that tracing has frozen does not: `if self.training`,
`F.dropout(x, training=self.training)`, and with torch.export everything. Such a model gets a second graph for
evaluation, whose units are placed where the same parameters are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from rainband.model.unchanged import same_modes
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.graph import Cut
from rainband.model_parallel.graph.trace import by_fx


def cut_for_evaluation(
    model: nn.Module, training: Cut, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Cut | None:
    """Return the graph of the model in evaluation mode; None if that for training follows the mode."""
    if not model.training or not _is_frozen(model, training.how):
        return None
    with evaluating(model):
        return cut(model, args, kwargs)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put all submodules into evaluation mode; restore their modes when left."""
    with same_modes(*models):
        for module in (module for model in models for module in model.modules()):
            module.training = False  # not eval(): graphs of torch.export refuse it
        yield


def _is_frozen(model: nn.Module, how: str) -> bool:
    """Return True if the graph of the other mode differs; only fx can trace it cheaply."""
    if how in ("pieces", "export"):
        return how == "export"
    try:
        trained = _as_text(by_fx(model))
        with evaluating(model):
            return _as_text(by_fx(model)) != trained
    except Exception:  # the model's own pieces follow the mode
        return False


def _as_text(module: fx.GraphModule) -> list[str]:
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in module.graph.nodes]


def placed_alike(evaluation: Cut, training: Cut, stages: Mapping[str, int], is_pipeline: bool) -> dict[str, int]:
    """Return the stages of the units of the evaluation graph, given those of the training graph.

    A unit goes to a stage with all its parameters and buffers; among such stages, to that of the unit of the same name,
    or of the values it reads. In a pipeline that must not be before the values it reads.
    """
    holders, edges = _holders(training, stages), evaluation.unit_edges()
    placed: dict[str, int] = {}
    for unit in evaluation.units:
        earliest = max((placed[maker] for _, maker, reader in edges if reader == unit and maker in placed), default=0)
        possible_stages = set(stages.values())
        for tensor in _tensors_of(evaluation, unit):
            # A parameter that training does not use is held by the first stage.
            unused = {0} if isinstance(tensor, nn.Parameter) else possible_stages
            possible_stages &= holders.get(id(tensor), unused)
        possible = sorted(stage for stage in possible_stages if not is_pipeline or stage >= earliest)
        if not possible:
            raise ValueError(
                f"in evaluation the model's unit {unit} needs parameters that are not together, or not after what it "
                f"reads (stage {earliest}), in this placement: use fewer stages, or give the model a method pieces()."
            )
        same = stages.get(unit, -1) if _is_same(evaluation, training, unit) else -1
        placed[unit] = next((stage for stage in (same, earliest) if stage in possible), possible[0])
    return placed


def _holders(training: Cut, stages: Mapping[str, int]) -> dict[int, set[int]]:
    """Return the stages that have each parameter or buffer, by its id."""
    holders: dict[int, set[int]] = {}
    for unit in training.units:
        for tensor in _tensors_of(training, unit):
            holders.setdefault(id(tensor), set()).add(stages[unit])
    return holders


def _tensors_of(graph: Cut, unit: str) -> list[Tensor]:
    """Return the parameters and buffers that a unit uses."""
    names = graph.members(unit)
    return [*graph.parameters_of(names).values(), *graph.buffers_of(names)]


def _is_same(evaluation: Cut, training: Cut, unit: str) -> bool:
    return unit in training.nodes and training.nodes[unit].target == evaluation.nodes[unit].target
