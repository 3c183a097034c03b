r"""A linear layer in shards that can be on different machines.

    columns   W = [W_1; W_2; …] by outputs:   y = [x W_1ᵀ + b_1,  x W_2ᵀ + b_2, …]       x goes to all
    rows      W = [W_1, W_2, …] by inputs:    y = x_1 W_1ᵀ + x_2 W_2ᵀ + … + b            partial sums come back
    pair      columns, then rows:             y = sum_i f(x A_iᵀ + a_i) B_iᵀ + b          no traffic between the two

Each shard is an nn.Linear of its own, so it is a node of the graph, with its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ByColumns(nn.Module):
    """A linear layer of which each shard computes some of the outputs."""

    def __init__(self, linear: nn.Linear, ways: int) -> None:
        super().__init__()
        sizes = _sizes(linear.out_features, ways, "outputs")
        self.layer_shards = nn.ModuleList()
        biases = [None] * ways if linear.bias is None else torch.split(linear.bias.detach(), sizes)
        for weight, bias in zip(torch.split(linear.weight.detach(), sizes), biases, strict=True):
            self.layer_shards.append(_linear(weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([shard(x) for shard in self.layer_shards], dim=-1)

    def as_linear(self) -> nn.Linear:
        """Return one layer with the present weights of all shards."""
        shards = linear_shards(self.layer_shards)
        biases = [shard.bias.detach() for shard in shards if shard.bias is not None]
        return _linear(torch.cat([shard.weight.detach() for shard in shards]), torch.cat(biases) if biases else None)


class ByRows(nn.Module):
    """A linear layer of which each shard takes some of the inputs; results are summed in the order of the shards."""

    def __init__(self, linear: nn.Linear, ways: int) -> None:
        super().__init__()
        self.sizes = _sizes(linear.in_features, ways, "inputs")
        weights = torch.split(linear.weight.detach(), self.sizes, dim=1)
        self.layer_shards = nn.ModuleList(SomeInputs(weight, linear.in_features) for weight in weights)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def reset_parameters(self) -> None:
        """Initialize the bias as nn.Linear does; each shard initializes its own weights."""
        if self.bias is not None:
            bound = 1 / math.sqrt(sum(self.sizes))
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.sizes, dim=-1)
        total: Tensor = self.layer_shards[0](parts[0])
        for number in range(1, len(self.sizes)):
            total = total + self.layer_shards[number](parts[number])
        return total if self.bias is None else total + self.bias

    def as_linear(self) -> nn.Linear:
        """Return one layer with the present weights of all shards."""
        weights = [shard.weight.detach() for shard in linear_shards(self.layer_shards)]
        return _linear(torch.cat(weights, dim=1), None if self.bias is None else self.bias.detach())


class SomeInputs(nn.Linear):
    """A linear layer that takes some of another's inputs; its weights are initialized with the other's range."""

    _rainband_whole = True  # one node, as an nn.Linear is

    def __init__(self, weight: Tensor, inputs_of_all: int) -> None:
        super().__init__(weight.shape[1], weight.shape[0], False, weight.device, weight.dtype)
        self.inputs_of_all = inputs_of_all
        with torch.no_grad():
            self.weight.copy_(weight)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(getattr(self, "inputs_of_all", self.in_features))
        nn.init.uniform_(self.weight, -bound, bound)


class AsPair(nn.Module):
    """Two linear layers with elementwise layers between them: the first split by columns, the second by rows."""

    def __init__(self, first: nn.Linear, between: nn.Module, second: nn.Linear, ways: int) -> None:
        super().__init__()
        if first.out_features != second.in_features:
            raise ValueError(
                f"the first layer has {first.out_features} outputs and the second {second.in_features} inputs: "
                "split two layers that follow each other."
            )
        if any(True for _ in between.parameters()):
            name = type(between).__name__
            raise ValueError(
                f"{name}, between the two layers, has parameters: only elementwise layers without parameters, such as "
                "ReLU, may be between them. Split the layers one by one."
            )
        self.first, self.between, self.second = ByColumns(first, ways), between, ByRows(second, ways)

    def forward(self, x: Tensor) -> Tensor:
        ways = range(len(self.second.sizes))
        parts = [self.second.layer_shards[n](self.between(self.first.layer_shards[n](x))) for n in ways]
        total: Tensor = parts[0]
        for part in parts[1:]:
            total = total + part
        return total if self.second.bias is None else total + self.second.bias


def _sizes(features: int, ways: int, what: str) -> list[int]:
    if not 1 <= ways <= features:
        raise ValueError(f"cannot split {features} {what} {ways} ways: choose from 1 to {features}.")
    return [features * (n + 1) // ways - features * n // ways for n in range(ways)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def linear_shards(modules: nn.ModuleList) -> Sequence[nn.Linear]:
    """Return the shards of a linear layer, which are linear layers, too."""
    shards = [module for module in modules if isinstance(module, nn.Linear)]
    assert len(shards) == len(modules)
    return shards
