"""Pipelines train exactly what they say: flushing ones the large batch, the others the delayed update, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.schedules.builders import gpipe, interleaved, one_f_one_b, pipedream, pipedream_2bw
from rainband.model_parallel.schedules.table import Table
from tests.pipeline_models import (
    one_thread,  # noqa: F401 (a fixture for all)
)
from tests.pipeline_training import (
    LR,
    as_microbatches,
    by_pairs,
    chain_net,
    plainly,
    same,
    samples,
    sgd,
    squares,
    trained,
)

# ---- with a flush ----


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("table", [gpipe(3, 4, batches=3), one_f_one_b(3, 4, batches=3)], ids=lambda table: table.name)
def test_with_a_flush_training_is_bit_for_bit_that_of_one_process(table: Table, recompute: bool) -> None:
    batches = samples(12)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    _, losses = trained(model, table, as_microbatches(batches), recompute)
    assert losses == plainly(alone, batches, microbatches=4)
    assert same(model, alone)


def test_microbatches_of_a_batch_give_the_gradient_of_the_batch() -> None:
    (x, y) = samples(1, size=8)[0]
    model = chain_net(2)
    alone = copy.deepcopy(model)
    trained(model, gpipe(2, 4), as_microbatches(list(zip(x.chunk(4), y.chunk(4), strict=True))))
    plainly(alone, [(x, y)], microbatches=1)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_microbatches_of_unequal_size_count_by_their_samples() -> None:
    (x, y) = samples(1, size=8)[0]
    model = chain_net(2)
    alone = copy.deepcopy(model)
    trained(model, one_f_one_b(2, 3), as_microbatches(list(zip(x.split([1, 4, 3]), y.split([1, 4, 3]), strict=True))))
    plainly(alone, [(x, y)], microbatches=1)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_interleaved_stages_of_a_machine_train_as_one_process_does() -> None:
    batches = samples(8)
    model = chain_net(4)
    alone = copy.deepcopy(model)
    trained(model, interleaved(2, 2, 4, batches=2), as_microbatches(batches))
    plainly(alone, batches, microbatches=4)
    assert same(model, alone)


def test_runs_one_after_the_other_are_one_longer_run() -> None:
    batches = samples(12)
    once, twice = chain_net(3), chain_net(3)
    _, losses = trained(once, one_f_one_b(3, 4, batches=3), as_microbatches(batches))
    graph = cut(twice, (batches[0][0],))
    pipeline = Pipeline(graph, by_pairs(graph.units), one_f_one_b(3, 4), sgd)
    assert [loss for first in (0, 4, 8) for loss in pipeline.run(as_microbatches(batches[first : first + 4]))] == losses
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
        for microbatch in range(first, first + per_update):
            for stage, layer in enumerate(layers_of(model, stages)):
                for p, value in zip(layer, history[stage][version_of(stage, microbatch)], strict=True):
                    p.data = value.clone()
            model.zero_grad()
            squares(model(batches[microbatch][0]), batches[microbatch][1]).backward()
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
    pipeline, _ = trained(model, pipedream([1] * stages, 10), as_microbatches(batches), recompute)
    delayed(alone, batches, stages, lambda stage, microbatch: max(0, microbatch - (stages - 1 - stage)))
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(stages)] == [stages - s for s in range(stages)]


def test_vertical_sync_is_exactly_sgd_with_one_delay_for_all_stages() -> None:
    batches = samples(10)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    pipeline, _ = trained(model, pipedream([1, 1, 1], 10, vertical_sync=True), as_microbatches(batches))
    delayed(alone, batches, 3, lambda stage, microbatch: max(0, microbatch - 2))
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [3, 3, 3]


def test_without_stashing_it_is_another_and_not_a_gradient() -> None:
    batches = samples(10)
    stashed, unstashed, alone = chain_net(3), chain_net(3), chain_net(3)
    trained(stashed, pipedream([1, 1, 1], 10), as_microbatches(batches))
    pipeline, _ = trained(unstashed, pipedream([1, 1, 1], 10, stash=False), as_microbatches(batches))
    delayed(alone, batches, 3, lambda stage, microbatch: max(0, microbatch - (2 - stage)))
    assert same(stashed, alone)
    assert not same(unstashed, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [1, 1, 1]


def test_two_buffers_are_exactly_sgd_one_batch_behind_in_every_stage() -> None:
    batches = samples(16)
    model = chain_net(3)
    alone = copy.deepcopy(model)
    pipeline, _ = trained(model, pipedream_2bw(3, 4, 4), as_microbatches(batches))
    delayed(alone, batches, 3, lambda stage, microbatch: max(0, microbatch // 4 - 1), per_update=4)
    assert same(model, alone)
    assert [pipeline.stages[s, s].versions.peak for s in range(3)] == [2, 2, 2]


def test_replicas_of_a_stage_apply_the_mean_of_their_round_and_stay_equal() -> None:
    """Two replicas, then one machine: stage 0 makes a version every two microbatches, stage 1 every one."""
    batches = samples(8)
    model = chain_net(2)
    pipeline, _ = trained(model, pipedream([2, 1], 8), as_microbatches(batches))
    first, second = pipeline.stages[0, 0].versions, pipeline.stages[1, 0].versions
    assert (first.newest, second.newest, pipeline.stages[2, 1].versions.newest) == (4, 4, 8)
    for name in first.specs:
        assert torch.equal(first.leaves(4)[name], second.leaves(4)[name])
        assert first.masters[name].data_ptr() != second.masters[name].data_ptr()


def test_a_model_of_replicas_alone_is_data_parallel_training() -> None:
    batches = samples(8)
    model = chain_net(1)
    alone = copy.deepcopy(model)
    trained(model, pipedream([2], 8), as_microbatches(batches))
    plainly(alone, batches, microbatches=2)
    assert same(model, alone)


# ---- memory ----


def test_memory_is_versions_times_the_stage_and_no_more() -> None:
    model = chain_net(4)
    pipeline, _ = trained(model, pipedream([1] * 4, 12), as_microbatches(samples(12)))
    one_version = 8 * (16 + 16)  # 4 x 4 weights, and 4 biases in a place of 16
    for stage in range(4):
        versions = pipeline.stages[stage, stage].versions
        assert versions.num_bytes() == (4 - stage) * one_version
        assert len(versions.live) == 1  # in the end


def test_the_users_parameters_are_slices_of_the_newest_version() -> None:
    model = chain_net(2)
    before = list(model.parameters())
    pipeline, _ = trained(model, pipedream([1, 1], 6), as_microbatches(samples(6)))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    versions = pipeline.stages[0, 0].versions
    (vector,) = versions.live[versions.newest].vectors
    assert model[0].weight.data_ptr() == vector.data_ptr()


def test_recomputing_keeps_no_results_between_forward_and_backward() -> None:
    model = chain_net(2)
    graph = cut(model, (torch.randn(2, 4).double(),))
    pipeline = Pipeline(graph, by_pairs(graph.units), gpipe(2, 1), sgd, recompute=True)
    pipeline.stages[0, 0].forward(0, 0, 0, [torch.randn(2, 4).double()])
    assert pipeline.stages[0, 0].kept[0, 0].results == ()


# ---- randomness and statistics ----


def with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Identity()
    ).double()


def test_dropout_is_the_same_in_every_flushing_schedule_and_when_recomputed() -> None:
    models = [with_dropout() for _ in range(4)]
    microbatches = as_microbatches(samples(4))
    losses = [
        trained(models[0], gpipe(3, 4), microbatches)[1],
        trained(models[1], one_f_one_b(3, 4), microbatches)[1],
        trained(models[2], gpipe(3, 4), microbatches, recompute=True)[1],
        trained(models[3], one_f_one_b(3, 4), microbatches, recompute=True)[1],
    ]
    assert losses[1:] == losses[:1] * 3
    assert all(same(model, models[0]) for model in models[1:])


def test_microbatches_drop_different_units_and_the_global_generator_is_left_alone() -> None:
    (x, y), model = samples(1)[0], with_dropout()
    before = torch.get_rng_state()
    _, losses = trained(model, gpipe(3, 2), as_microbatches([(x, y), (x, y)]))
    assert losses[0] != losses[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_run_drops_other_units_than_the_first() -> None:
    (x, y), model = samples(1)[0], with_dropout()
    graph = cut(model, (x,))
    pipeline = Pipeline(graph, by_pairs(graph.units), gpipe(3, 1), partial(SGD, lr=0.0))
    assert pipeline.run(as_microbatches([(x, y)])) != pipeline.run(as_microbatches([(x, y)]))


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_see_every_microbatch_once(recompute: bool) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()).double()

    batches, model, alone = samples(4), net(), net()
    trained(model, one_f_one_b(2, 4), as_microbatches(batches), recompute)
    plainly(alone, batches, microbatches=4)
    assert int(model[1].num_batches_tracked) == 4
    torch.testing.assert_close(model[1].running_mean, alone[1].running_mean)
