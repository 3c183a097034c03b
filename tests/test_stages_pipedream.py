"""PipeDream in several workers is delayed SGD, exactly, and plays the rows of its table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from rainband.pipeline.cut import cut
from rainband.pipeline.execute import Pipeline
from rainband.pipeline.of_task import micros_of
from rainband.pipeline.schedules import pipedream
from rainband.stages.stashing import Stashing
from rainband.strategies.pipedream import Pipedream
from rainband.types import Batch
from rainband.worker import Sampler
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.team_tasks import Shaped, data_plan, planned, trained_team

LR = 0.05
TASK = Shaped("chain", samples=38)  # ten batches; the last has two samples


def parameters(workers: list) -> dict[str, Tensor]:  # type: ignore[type-arg]
    return {name: tensor for worker in workers for name, tensor in worker.share.held().items()}


def by_table(task: Shaped, stages: int, replicas: list[int], **how: bool) -> nn.Module:
    """The same in one process: the executor of tables."""
    model = task.model()
    plan, sampler = data_plan(task), Sampler(data_plan(task))
    batches = [Batch(p, k, 1) for p in range(plan.num_portions) for k in range(plan.batches_in(p))]
    micros = micros_of(task, task.data(), [list(sampler.indices(batch)) for batch in batches])
    graph = cut(model, micros[0].args)
    table = pipedream(replicas, len(micros), **how)
    placed = planned(task, stages).plan.stage_of()
    Pipeline(graph, placed, table, lambda ps: SGD(ps, lr=LR)).run(micros)
    return model


@pytest.mark.parametrize("name", ["chain", "branches", "skips", "several", "recurrent", "transformer"])
def test_stages_in_workers_train_exactly_as_the_table_says(name: str) -> None:
    task = Shaped(name, samples=38)
    workers = trained_team(task, planned(task, 3), Pipedream(lr=LR))
    expected = dict(by_table(task, 3, [1, 1, 1]).named_parameters())
    found = parameters(workers)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [3, 2]])
def test_replicas_of_a_stage_share_an_update(replicas: list[int]) -> None:
    workers = trained_team(TASK, planned(TASK, 2, replicas=replicas), Pipedream(lr=LR))
    expected = dict(by_table(TASK, 2, replicas).named_parameters())
    found = parameters(workers)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=1e-12)
    for stage in range(2):  # and have the same parameters
        mates = [worker for worker in workers if worker.share.machine == stage]
        for one, other in zip(mates[0].module.parameters(), mates[-1].module.parameters(), strict=True):
            assert torch.equal(one, other)


def test_vertical_sync_uses_one_version_in_all_stages() -> None:
    workers = trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR, vertical_sync=True))
    expected = dict(by_table(TASK, 3, [1, 1, 1], vertical_sync=True).named_parameters())
    for key, value in expected.items():
        torch.testing.assert_close(parameters(workers)[key], value.detach(), rtol=1e-12, atol=1e-12)


def test_without_stash_it_is_something_else() -> None:
    with_stash = parameters(trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR)))
    without = parameters(trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR, stash=False)))
    expected = dict(by_table(TASK, 3, [1, 1, 1], stash=False).named_parameters())
    for key, value in expected.items():
        torch.testing.assert_close(without[key], value.detach(), rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(with_stash[key], without[key]) for key in expected)


def test_recomputing_changes_nothing() -> None:
    kept = parameters(trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR)))
    again = parameters(trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR, recompute=True)))
    for key, value in kept.items():
        assert torch.equal(value, again[key])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_stage_keeps_as_many_versions_as_batches_are_on_their_way(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stashing] = []
    begin = Stashing.__init__

    def note(self: Stashing, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Stashing, "__init__", note)
    trained_team(TASK, planned(TASK, 3), Pipedream(lr=LR), order)
    made.sort(key=lambda stage: stage.share.machine)
    assert [stage.ahead for stage in made] == [2, 1, 0]
    assert [stage.stage.versions.peak for stage in made] == [3, 2, 1]
    assert [len(stage.stage.versions.live) for stage in made] == [1, 1, 1]
    own = [sum(v.numel() * v.element_size() for v in stage.stage.versions.live[10].vectors) for stage in made]
    assert [stage.stage.versions.num_bytes() for stage in made] == [3 * own[0], 2 * own[1], own[2]]


def test_a_weight_in_two_stages_is_refused() -> None:
    task = Shaped("tied")
    with pytest.raises(ValueError, match="put its units into one stage"):
        trained_team(task, planned(task, {"embed": 0, "hidden": 1, "tanh": 1, "out": 2}), Pipedream(lr=LR))
