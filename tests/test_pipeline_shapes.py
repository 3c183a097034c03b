"""Pipelines of models that are no chains, with ties, skips, several outputs; and what a pipeline refuses."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils import _pytree as pytree

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import LossMicrobatch
from rainband.model_parallel.schedules.builders import gpipe, one_f_one_b, pipedream
from rainband.model_parallel.schedules.table import Table
from tests.pipeline_models import (
    examples,
    one_thread,  # noqa: F401 (a fixture for all)
)
from tests.pipeline_training import LR, as_microbatches, by_pairs, chain_net, plainly, samples, sgd, squares, trained

# ---- other models ----


class Skips(nn.Module):
    """The input and the first layer go to every later one; two outputs, the first made early."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h.tanh(), self.c(self.b(h).tanh() + h + x)


def both(answer: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return squares(answer[0], target) + squares(answer[1], target)


@pytest.mark.parametrize("table", [gpipe(3, 4), one_f_one_b(3, 4)], ids=lambda table: table.name)
@pytest.mark.parametrize("recompute", [False, True])
def test_skips_and_outputs_of_early_stages_reach_the_loss(table: Table, recompute: bool) -> None:
    torch.manual_seed(0)
    model = Skips().double()
    alone = copy.deepcopy(model)
    batches = samples(4)
    microbatches = [LossMicrobatch((x,), partial(both, target=y), samples=2) for x, y in batches]
    stages = {"a": 0, "tanh": 0, "b": 1, "tanh_1": 1, "add": 1, "add_1": 2, "c": 2}
    pipeline, _ = trained(model, table, microbatches, recompute, stages)
    optimizer = SGD(alone.parameters(), lr=LR)
    for x, y in batches:
        (both(alone(x), y) / 4).backward()
    optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert pipeline.sent == 4 * 2 * 3  # h to stage 1, the output to stage 2, add to stage 2; and back


class Shared(nn.Module):
    """The second layer reads the output of the first, which is also an output of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h, self.b(h)


def test_an_output_that_the_last_stage_also_reads_is_sent_once_and_its_gradient_comes_back_once() -> None:
    model = Shared().double()
    microbatches = [LossMicrobatch((x,), partial(both, target=y), samples=2) for x, y in samples(2)]
    pipeline, _ = trained(model, gpipe(2, 2), microbatches, stages={"a": 0, "b": 1})
    assert pipeline.sent == 2 * 2


def every_output(answer: object) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]
    return torch.stack([(leaf * leaf).mean() for leaf in leaves]).sum()


@pytest.mark.parametrize("name", ["branches", "several", "recurrent", "transformer", "on_shapes", "tied"])
@pytest.mark.parametrize("recompute", [False, True])
def test_models_of_all_shapes_train_in_stages_as_in_one_process(name: str, recompute: bool) -> None:
    model, args = examples()[name]
    alone = copy.deepcopy(model)
    graph = cut(model, args)
    stages = {unit: 3 * place // len(graph.units) for place, unit in enumerate(graph.units)}
    microbatches = [LossMicrobatch(args, every_output, samples=len(args[0])) for _ in range(4)]
    pipeline = Pipeline(graph, stages, one_f_one_b(3, 2, batches=2), sgd, recompute=recompute)
    losses = pipeline.run(microbatches)
    optimizer = SGD(alone.parameters(), lr=LR)
    expected = []
    for _ in range(2):
        for _ in range(2):
            loss = every_output(alone(*args))
            (loss / 2).backward()
            expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()), rtol=1e-10, atol=1e-12)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x)).tanh())
        return y


def test_a_parameter_of_two_stages_gets_the_sum_of_both_gradients() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    alone = copy.deepcopy(model)
    batches = samples(8)
    pipeline, _ = trained(
        model, gpipe(2, 4, batches=2), as_microbatches(batches), stages={"a": 0, "b": 0, "tanh": 1, "c": 1}
    )
    plainly(alone, batches, microbatches=4)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(pipeline.stages[1, 1].versions.masters["c.weight"], model.a.weight)


def test_a_parameter_of_two_stages_needs_a_flush() -> None:
    graph = cut(Tied(), (torch.randn(2, 4),))
    with pytest.raises(ValueError, match=r"used in stages \[0, 1\].*use a schedule that flushes"):
        Pipeline(graph, {"a": 0, "b": 0, "tanh": 1, "c": 1}, pipedream([1, 1], 4), sgd)


def test_a_parameter_without_a_gradient_is_left_alone_by_momentum_and_decay() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x)) + 0 * self.unused(x).detach()
            return y

    model = Unused().double()
    before = model.unused.weight.detach().clone()
    graph = cut(model, (torch.randn(2, 4).double(),))
    stages = {unit: int(unit not in ("a", "unused")) for unit in graph.units}
    Pipeline(graph, stages, gpipe(2, 2), partial(Adam, weight_decay=0.1)).run(as_microbatches(samples(2)))
    assert torch.equal(model.unused.weight, before)


# ---- what is refused ----


def test_a_value_that_goes_back_is_refused() -> None:
    graph = cut(chain_net(2), (torch.randn(2, 4).double(),))
    with pytest.raises(ValueError, match="this is no pipeline: _1 in stage 0 reads _0 of stage 1"):
        Pipeline(graph, {"_0": 1, "_1": 0, "_2": 1, "_3": 1}, gpipe(2, 2), sgd)


def test_a_plan_and_a_schedule_of_other_numbers_of_stages_are_refused() -> None:
    graph = cut(chain_net(2), (torch.randn(2, 4).double(),))
    with pytest.raises(ValueError, match="the placement has 2 stages with units and the schedule gpipe has 3"):
        Pipeline(graph, by_pairs(graph.units), gpipe(3, 2), sgd)


def test_two_objects_over_one_memory_are_refused() -> None:
    model = chain_net(2)
    model[2].weight.data = model[0].weight.data
    graph = cut(model, (torch.randn(2, 4).double(),))
    with pytest.raises(ValueError, match="'0.weight' and '2.weight' are two objects over the same memory"):
        Pipeline(graph, by_pairs(graph.units), gpipe(2, 2), sgd)


def test_frozen_parameters_stay_as_they_are() -> None:
    model = chain_net(2)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    trained(model, one_f_one_b(2, 2), as_microbatches(samples(2)))
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None


def test_a_wrong_number_of_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule has 3 microbatches, and 2 were given"):
        trained(chain_net(2), gpipe(2, 3), as_microbatches(samples(2)))
