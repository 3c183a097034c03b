"""Pipelines train exactly what they say: flushing ones the large batch, the others the delayed update, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils import _pytree as pytree

from rainband.pipeline.cut import cut
from rainband.pipeline.execute import Micro, Pipeline
from rainband.pipeline.schedules import gpipe, interleaved, one_f_one_b, pipedream, two_buffered
from rainband.pipeline.table import Table
from tests.pipeline_models import (
    examples,
    one_thread,  # noqa: F401 (a fixture for all)
)

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


def as_micros(batches: Sequence[tuple[Tensor, Tensor]]) -> list[Micro]:
    return [Micro((x,), partial(squares, target=y), samples=len(x)) for x, y in batches]


def trained(
    model: nn.Module,
    table: Table,
    micros: Sequence[Micro],
    recompute: bool = False,
    stages: dict[str, int] | None = None,
) -> tuple[Pipeline, list[float]]:
    graph = cut(model, micros[0].args)
    pipeline = Pipeline(graph, stages or by_pairs(graph.units), table, sgd, recompute=recompute)
    return pipeline, pipeline.run(micros)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- with a flush ----


def plainly(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], micros: int) -> list[float]:
    """One SGD step for `micros` microbatches: their mean gradient, as accumulation gives it."""
    optimizer, losses = SGD(model.parameters(), lr=LR), []
    for first in range(0, len(batches), micros):
        for x, y in batches[first : first + micros]:
            loss = squares(model(x), y)
            (loss / micros).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("table", [gpipe(3, 4, batches=3), one_f_one_b(3, 4, batches=3)], ids=lambda table: table.name)
def test_with_a_flush_training_is_bit_for_bit_that_of_one_process(table: Table, recompute: bool) -> None:
    batches = samples(12)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    _, losses = trained(model, table, as_micros(batches), recompute)
    assert losses == plainly(alone, batches, micros=4)
    assert same(model, alone)


def test_microbatches_of_a_batch_give_the_gradient_of_the_batch() -> None:
    (x, y) = samples(1, size=8)[0]
    model = chain_net(2)
    alone = copy.deepcopy(model)
    trained(model, gpipe(2, 4), as_micros(list(zip(x.chunk(4), y.chunk(4), strict=True))))
    plainly(alone, [(x, y)], micros=1)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_microbatches_of_unequal_size_count_by_their_samples() -> None:
    (x, y) = samples(1, size=8)[0]
    model = chain_net(2)
    alone = copy.deepcopy(model)
    trained(model, one_f_one_b(2, 3), as_micros(list(zip(x.split([1, 4, 3]), y.split([1, 4, 3]), strict=True))))
    plainly(alone, [(x, y)], micros=1)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_interleaved_stages_of_a_machine_train_as_one_process_does() -> None:
    batches = samples(8)
    model = chain_net(4)
    alone = copy.deepcopy(model)
    trained(model, interleaved(2, 2, 4, batches=2), as_micros(batches))
    plainly(alone, batches, micros=4)
    assert same(model, alone)


def test_runs_one_after_the_other_are_one_longer_run() -> None:
    batches = samples(12)
    once, twice = chain_net(3), chain_net(3)
    _, losses = trained(once, one_f_one_b(3, 4, batches=3), as_micros(batches))
    graph = cut(twice, (batches[0][0],))
    pipeline = Pipeline(graph, by_pairs(graph.units), one_f_one_b(3, 4), sgd)
    assert [loss for first in (0, 4, 8) for loss in pipeline.run(as_micros(batches[first : first + 4]))] == losses
    assert same(once, twice)


# ---- without a flush: the delayed update, written down by hand ----


def layers_of(model: nn.Sequential, stages: int) -> list[list[nn.Parameter]]:
    return [list(model[2 * stage].parameters()) for stage in range(stages)]


def delayed(
    model: nn.Sequential,
    batches: Sequence[tuple[Tensor, Tensor]],
    stages: int,
    version_of: Callable[[int, int], int],
    per_update: int = 1,
) -> None:
    """Stage s takes microbatch m forward and backward with version `version_of(s, m)`; its update makes the next.

    The history of every stage is kept whole, so nothing here knows about stashing.
    """
    history = [[[p.detach().clone() for p in layer]] for layer in layers_of(model, stages)]
    for first in range(0, len(batches), per_update):
        totals = [[torch.zeros_like(p) for p in layer] for layer in layers_of(model, stages)]
        for micro in range(first, first + per_update):
            for stage, layer in enumerate(layers_of(model, stages)):
                for p, value in zip(layer, history[stage][version_of(stage, micro)], strict=True):
                    p.data = value.clone()
            model.zero_grad()
            squares(model(batches[micro][0]), batches[micro][1]).backward()
            for total, layer in zip(totals, layers_of(model, stages), strict=True):
                for t, p in zip(total, layer, strict=True):
                    t += p.grad / per_update
        for stage in range(stages):
            newest = history[stage][-1]
            history[stage].append([w - LR * t for w, t in zip(newest, totals[stage], strict=True)])
    for stage, layer in enumerate(layers_of(model, stages)):
        for p, value in zip(layer, history[stage][-1], strict=True):
            p.data = value


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_weight_stashing_is_exactly_sgd_with_a_delay_for_each_stage(stages: int, recompute: bool) -> None:
    """Stage s of S is behind by S - 1 - s updates; the last one is not."""
    batches = samples(10)
    model = chain_net(stages)
    alone = copy.deepcopy(model)
    pipeline, _ = trained(model, pipedream([1] * stages, 10), as_micros(batches), recompute)
    delayed(alone, batches, stages, lambda stage, micro: max(0, micro - (stages - 1 - stage)))
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(stages)] == [stages - s for s in range(stages)]


def test_vertical_sync_is_exactly_sgd_with_one_delay_for_all_stages() -> None:
    batches = samples(10)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    pipeline, _ = trained(model, pipedream([1, 1, 1], 10, vertical_sync=True), as_micros(batches))
    delayed(alone, batches, 3, lambda stage, micro: max(0, micro - 2))
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [3, 3, 3]


def test_without_stashing_it_is_another_and_not_a_gradient() -> None:
    batches = samples(10)
    stashed, unstashed, alone = chain_net(3), chain_net(3), chain_net(3)
    trained(stashed, pipedream([1, 1, 1], 10), as_micros(batches))
    pipeline, _ = trained(unstashed, pipedream([1, 1, 1], 10, stash=False), as_micros(batches))
    delayed(alone, batches, 3, lambda stage, micro: max(0, micro - (2 - stage)))
    assert same(stashed, alone)
    assert not same(unstashed, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [1, 1, 1]


def test_two_buffers_are_exactly_sgd_one_batch_behind_in_every_stage() -> None:
    batches = samples(16)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    pipeline, _ = trained(model, two_buffered(3, 4, 4), as_micros(batches))
    delayed(alone, batches, 3, lambda stage, micro: max(0, micro // 4 - 1), per_update=4)
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [2, 2, 2]


def test_replicas_of_a_stage_apply_the_mean_of_their_round_and_stay_equal() -> None:
    """Two replicas, then one machine: stage 0 makes a version every two microbatches, stage 1 every one."""
    batches = samples(8)
    model = chain_net(2)
    pipeline, _ = trained(model, pipedream([2, 1], 8), as_micros(batches))
    first, second = pipeline.stages[0, 0].versions, pipeline.stages[1, 0].versions
    assert (first.newest, second.newest, pipeline.stages[2, 1].versions.newest) == (4, 4, 8)
    for name in first.places:
        assert torch.equal(first.leaves(4)[name], second.leaves(4)[name])
        assert first.masters[name].data_ptr() != second.masters[name].data_ptr()


def test_a_model_of_replicas_alone_is_data_parallel_training() -> None:
    batches = samples(8)
    model = chain_net(1)
    alone = copy.deepcopy(model)
    trained(model, pipedream([2], 8), as_micros(batches))
    plainly(alone, batches, micros=2)
    assert same(model, alone)


# ---- memory ----


def test_memory_is_versions_times_the_stage_and_no_more() -> None:
    model = chain_net(4)
    pipeline, _ = trained(model, pipedream([1] * 4, 12), as_micros(samples(12)))
    one_version = 8 * (16 + 16)  # 4 x 4 weights, and 4 biases in a place of 16
    for stage in range(4):
        versions = pipeline.stages[stage, stage].versions
        assert versions.num_bytes() == (4 - stage) * one_version
        assert len(versions.live) == 1  # in the end


def test_the_users_parameters_are_slices_of_the_newest_version() -> None:
    model = chain_net(2)
    before = list(model.parameters())
    pipeline, _ = trained(model, pipedream([1, 1], 6), as_micros(samples(6)))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    versions = pipeline.stages[0, 0].versions
    (vector,) = versions.live[versions.newest].vectors
    assert model[0].weight.data_ptr() == vector.data_ptr()


def test_recomputing_keeps_no_results_between_forward_and_backward() -> None:
    model = chain_net(2)
    graph = cut(model, (torch.randn(2, 4).double(),))
    pipeline = Pipeline(graph, by_pairs(graph.units), gpipe(2, 1), sgd, recompute=True)
    pipeline.stages[0, 0].forward(0, 0, [torch.randn(2, 4).double()])
    assert pipeline.stages[0, 0].kept[0].results == ()


# ---- randomness and statistics ----


def with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Identity()
    ).double()


def test_dropout_is_the_same_in_every_flushing_schedule_and_when_recomputed() -> None:
    models = [with_dropout() for _ in range(4)]
    micros = as_micros(samples(4))
    losses = [
        trained(models[0], gpipe(3, 4), micros)[1],
        trained(models[1], one_f_one_b(3, 4), micros)[1],
        trained(models[2], gpipe(3, 4), micros, recompute=True)[1],
        trained(models[3], one_f_one_b(3, 4), micros, recompute=True)[1],
    ]
    assert losses[1:] == losses[:1] * 3
    assert all(same(model, models[0]) for model in models[1:])


def test_microbatches_drop_different_units_and_the_global_generator_is_left_alone() -> None:
    (x, y), model = samples(1)[0], with_dropout()
    before = torch.get_rng_state()
    _, losses = trained(model, gpipe(3, 2), as_micros([(x, y), (x, y)]))
    assert losses[0] != losses[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_run_drops_other_units_than_the_first() -> None:
    (x, y), model = samples(1)[0], with_dropout()
    graph = cut(model, (x,))
    pipeline = Pipeline(graph, by_pairs(graph.units), gpipe(3, 1), partial(SGD, lr=0.0))
    assert pipeline.run(as_micros([(x, y)])) != pipeline.run(as_micros([(x, y)]))


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_see_every_microbatch_once(recompute: bool) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()).double()

    batches, model, alone = samples(4), net(), net()
    trained(model, one_f_one_b(2, 4), as_micros(batches), recompute)
    plainly(alone, batches, micros=4)
    assert int(model[1].num_batches_tracked) == 4
    torch.testing.assert_close(model[1].running_mean, alone[1].running_mean)


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
    micros = [Micro((x,), partial(both, target=y), samples=2) for x, y in batches]
    stages = {"a": 0, "tanh": 0, "b": 1, "tanh_1": 1, "add": 1, "add_1": 2, "c": 2}
    pipeline, _ = trained(model, table, micros, recompute, stages)
    optimizer = SGD(alone.parameters(), lr=LR)
    for x, y in batches:
        (both(alone(x), y) / 4).backward()
    optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert pipeline.sent == 4 * 2 * 3  # h to stage 1, the output to stage 2, add to stage 2; and back


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
    micros = [Micro(args, every_output, samples=len(args[0])) for _ in range(4)]
    pipeline = Pipeline(graph, stages, one_f_one_b(3, 2, batches=2), sgd, recompute=recompute)
    losses = pipeline.run(micros)
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
    pipeline, _ = trained(model, gpipe(2, 4, batches=2), as_micros(batches), stages={"a": 0, "b": 0, "tanh": 1, "c": 1})
    plainly(alone, batches, micros=4)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(pipeline.stages[1, 1].versions.masters["c.weight"], model.a.weight)


def test_a_parameter_of_two_stages_needs_a_flush() -> None:
    graph = cut(Tied(), (torch.randn(2, 4),))
    with pytest.raises(ValueError, match=r"used in stages \[0, 1\].*take a schedule that flushes"):
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
    Pipeline(graph, stages, gpipe(2, 2), partial(Adam, weight_decay=0.1)).run(as_micros(samples(2)))
    assert torch.equal(model.unused.weight, before)


# ---- what is refused ----


def test_a_value_that_goes_back_is_refused() -> None:
    graph = cut(chain_net(2), (torch.randn(2, 4).double(),))
    with pytest.raises(ValueError, match="this is no pipeline: _1 in stage 0 reads _0 of stage 1"):
        Pipeline(graph, {"_0": 1, "_1": 0, "_2": 1, "_3": 1}, gpipe(2, 2), sgd)


def test_a_plan_and_a_schedule_of_other_numbers_of_stages_are_refused() -> None:
    graph = cut(chain_net(2), (torch.randn(2, 4).double(),))
    with pytest.raises(ValueError, match="the plan has 2 stages with units and the schedule gpipe has 3"):
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
    trained(model, one_f_one_b(2, 2), as_micros(samples(2)))
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None


def test_a_wrong_number_of_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule has 3 microbatches and was given 2"):
        trained(chain_net(2), gpipe(2, 3), as_micros(samples(2)))
