"""A small chain for tests of pipelines, its batches, and the same training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.table import Table

LR = 0.5
sgd = partial(SGD, lr=LR)


def squares(answer: Tensor, target: Tensor) -> Tensor:
    return ((answer - target) ** 2).mean()


def chain_net(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(stages):
        layers += [nn.Linear(4, 4), nn.Tanh()]
    return nn.Sequential(*layers).double()


def by_pairs(units: Sequence[str]) -> dict[str, int]:
    """A linear layer and its tanh in each stage."""
    return {unit: place // 2 for place, unit in enumerate(units)}


def samples(count: int, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 4).double(), torch.randn(size, 4).double()) for _ in range(count)]


def as_microbatches(batches: Sequence[tuple[Tensor, Tensor]]) -> list[LossMicrobatch]:
    return [LossMicrobatch((x,), partial(squares, target=y), samples=len(x)) for x, y in batches]


def trained(
    model: nn.Module,
    table: Table,
    microbatches: Sequence[LossMicrobatch],
    recompute: bool = False,
    stages: dict[str, int] | None = None,
) -> tuple[Pipeline, list[float]]:
    graph = cut(model, microbatches[0].args)
    pipeline = Pipeline(graph, stages or by_pairs(graph.units), table, sgd, recompute=recompute)
    return pipeline, pipeline.run(microbatches)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def plainly(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], microbatches: int) -> list[float]:
    """One SGD step for `microbatches` microbatches: their mean gradient, as accumulation gives it."""
    optimizer, losses = SGD(model.parameters(), lr=LR), []
    for first in range(0, len(batches), microbatches):
        for x, y in batches[first : first + microbatches]:
            loss = squares(model(x), y)
            (loss / microbatches).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses
