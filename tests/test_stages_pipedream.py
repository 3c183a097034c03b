"""PipeDream in several workers is delayed SGD, exactly, and plays the rows of its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from rainband.model_parallel.execution.in_process import Pipeline
from rainband.model_parallel.execution.weight_stashing import WeightStashing
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import microbatches_of
from rainband.model_parallel.schedules.builders import pipedream, pipedream_2bw
from rainband.model_parallel.schedules.table import Action, Table
from rainband.model_parallel.schedules.version_rule import VersionRule
from rainband.protocol.data_plan import DataPlan as DataPlan
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.run import run
from rainband.stage import StageVersions
from rainband.strategies.pipedream import Pipedream
from rainband.strategy import Batch
from rainband.worker.worker import Sampler
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.stage_tasks import Shaped, data_plan, planned, trained_stages

LR = 0.05
TASK = Shaped("chain", samples=38)  # ten batches; the last has two samples


def parameters(workers: list) -> dict[str, Tensor]:  # type: ignore[type-arg]
    return {name: tensor for worker in workers for name, tensor in worker.submodel.held().items()}


def batches_of(plan: DataPlan) -> list[list[int]]:
    """The samples of each batch of a run, in order."""
    sampler = Sampler(plan)
    batches = [Batch(p, k, 1) for p in range(plan.num_portions) for k in range(plan.batches_in(p))]
    return [list(map(int, sampler.indices(batch))) for batch in batches]


def by_table(task: Shaped, stages: int, replicas: list[int], **how: bool) -> nn.Module:
    """The same in one process: the executor of tables."""
    return played(task, stages, pipedream(replicas, data_plan(task).num_batches, **how))


def played(task: Shaped, stages: int, table: Table) -> nn.Module:
    model = task.model()
    microbatches = microbatches_of(task, task.data(), batches_of(data_plan(task)))
    graph = cut(model, microbatches[0].args)
    placed = planned(task, stages).plan.stage_of()
    Pipeline(graph, placed, table, lambda ps: SGD(ps, lr=LR)).run(microbatches)
    return model


@pytest.mark.parametrize("name", ["chain", "branches", "skips", "several", "recurrent", "transformer"])
def test_stages_in_workers_train_exactly_as_the_table_says(name: str) -> None:
    task = Shaped(name, samples=38)
    workers = trained_stages(task, planned(task, 3), Pipedream(lr=LR))
    expected = dict(by_table(task, 3, [1, 1, 1]).named_parameters())
    found = parameters(workers)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [3, 2]])
def test_replicas_of_a_stage_share_an_update(replicas: list[int]) -> None:
    workers = trained_stages(TASK, planned(TASK, 2, replicas=replicas), Pipedream(lr=LR))
    expected = dict(by_table(TASK, 2, replicas).named_parameters())
    found = parameters(workers)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=1e-12)
    for stage in range(2):  # and have the same parameters
        replicas = [worker for worker in workers if worker.submodel.machine == stage]
        for one, other in zip(replicas[0].module.parameters(), replicas[-1].module.parameters(), strict=True):
            assert torch.equal(one, other)


def test_vertical_sync_uses_one_version_in_all_stages() -> None:
    workers = trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR, vertical_sync=True))
    expected = dict(by_table(TASK, 3, [1, 1, 1], vertical_sync=True).named_parameters())
    for key, value in expected.items():
        torch.testing.assert_close(parameters(workers)[key], value.detach(), rtol=1e-12, atol=1e-12)


def test_without_stash_it_is_something_else() -> None:
    with_stash = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR)))
    without = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR, stash=False)))
    expected = dict(by_table(TASK, 3, [1, 1, 1], stash=False).named_parameters())
    for key, value in expected.items():
        torch.testing.assert_close(without[key], value.detach(), rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(with_stash[key], without[key]) for key in expected)


def test_recomputing_changes_nothing() -> None:
    kept = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR)))
    again = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR, recompute=True)))
    for key, value in kept.items():
        assert torch.equal(value, again[key])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[WeightStashing]:
    """The stages of a team, as they are made."""
    found: list[WeightStashing] = []
    begin = WeightStashing.__init__

    def note(self: WeightStashing, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        found.append(self)

    monkeypatch.setattr(WeightStashing, "__init__", note)
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_stage_keeps_as_many_versions_as_batches_are_on_their_way(
    order: list[int], made: list[WeightStashing]
) -> None:
    trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR), order)
    made.sort(key=lambda stage: stage.submodel.machine)
    assert [stage.ahead for stage in made] == [2, 1, 0]
    assert [stage.stage.versions.peak for stage in made] == [3, 2, 1]
    assert [len(stage.stage.versions.live) for stage in made] == [1, 1, 1]
    own = [sum(v.numel() * v.element_size() for v in stage.stage.versions.live[10].vectors) for stage in made]
    assert [stage.stage.versions.num_bytes() for stage in made] == [3 * own[0], 2 * own[1], own[2]]


def test_a_weight_in_two_stages_is_refused() -> None:
    task = Shaped("tied")
    with pytest.raises(ValueError, match="put its units into one stage"):
        trained_stages(task, planned(task, {"embed": 0, "hidden": 1, "tanh": 1, "out": 2}), Pipedream(lr=LR))


# ---- two versions, and no more ----


def delayed(
    task: Shaped, batches: Sequence[Sequence[int]], microbatches: int, portions: Sequence[int] = ()
) -> nn.Module:
    """w(t+1) = w(t) - lr * gradient at w(t-1), of the mean loss of `microbatches` batches; anew after each portion."""
    model, data = task.model(), task.data()
    for first, last in zip([0, *portions], [*portions, len(batches)], strict=True):
        older = [p.detach().clone() for p in model.parameters()]
        for begin in range(first, last, microbatches):
            samples = [sample for batch in batches[begin : min(begin + microbatches, last)] for sample in batch]
            newest = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), older, strict=True):
                    parameter.copy_(value)
            gradients = torch.autograd.grad(task.loss(model, data.batch(samples)), list(model.parameters()))
            scale = LR if all(bool(gradient.isfinite().all()) for gradient in gradients) else 0.0
            with torch.no_grad():
                for parameter, value, gradient in zip(model.parameters(), newest, gradients, strict=True):
                    parameter.copy_(value - scale * gradient.nan_to_num(0, 0, 0))
            older = newest
    return model


def assert_same(found: dict[str, Tensor], expected: nn.Module) -> None:
    for key, value in expected.named_parameters():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-12, atol=1e-12)


def test_a_batch_uses_the_parameters_of_one_update_ago() -> None:
    counting = VersionRule(StageVersions(pipedream_2bw=True, batches_per_update=2), (1, 1), 0)
    assert [counting.update(batch) for batch in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [counting.version(batch, newest=9) for batch in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [counting.completes(batch) for batch in range(4)] == [False, True, False, True]
    assert VersionRule(StageVersions(pipedream_2bw=True), (1, 1, 1), 0).batches == 3  # one for each stage


@pytest.mark.parametrize("name", ["chain", "branches", "skips", "several", "recurrent", "transformer"])
@pytest.mark.parametrize("microbatches", [3, 4])
def test_double_buffered_stages_have_the_bits_of_their_table(name: str, microbatches: int) -> None:
    task = Shaped(name, samples=48)  # twelve batches
    workers = trained_stages(
        task, planned(task, 3), Pipedream(lr=LR, pipedream_2bw=True, batches_per_update=microbatches)
    )
    expected = played(task, 3, pipedream_2bw(3, microbatches, 12 // microbatches))
    found = parameters(workers)
    for key, value in expected.named_parameters():
        assert torch.equal(found[key], value.detach())


@pytest.mark.parametrize("samples", [48, 46, 38, 42, 10])  # whole rounds, a short batch, one or two batches too many
@pytest.mark.parametrize("stages, microbatches", [(2, 2), (3, 3), (2, 5)])
def test_double_buffered_stages_are_sgd_that_is_late_by_one_update(
    samples: int, stages: int, microbatches: int
) -> None:
    task = Shaped("chain", samples=samples)
    workers = trained_stages(
        task, planned(task, stages), Pipedream(lr=LR, pipedream_2bw=True, batches_per_update=microbatches)
    )
    assert_same(parameters(workers), delayed(task, batches_of(data_plan(task)), microbatches))


def test_a_pipeline_that_ran_empty_begins_anew_with_the_newest_parameters() -> None:
    """Portions of 4, 4 and 2 batches that come late: each ends with an update of what there is."""
    how = Pipedream(lr=LR, pipedream_2bw=True, batches_per_update=3)
    late = parameters(trained_stages(TASK, planned(TASK, 3), how, late=True))
    assert_same(late, delayed(TASK, batches_of(data_plan(TASK)), 3, portions=[4, 8]))
    early = parameters(trained_stages(TASK, planned(TASK, 3), how))
    assert any(not torch.equal(early[key], late[key]) for key in early)


def test_recomputing_changes_nothing_with_two_versions() -> None:
    kept = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR, pipedream_2bw=True)))
    again = parameters(trained_stages(TASK, planned(TASK, 3), Pipedream(lr=LR, pipedream_2bw=True, recompute=True)))
    for key, value in kept.items():
        assert torch.equal(value, again[key])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("microbatches", [3, 4])
def test_every_stage_keeps_two_versions_and_no_more(
    order: list[int], late: bool, microbatches: int, made: list[WeightStashing], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[float] = []  # memory of a stage's versions, in parameters of that stage
    step = WeightStashing._step

    def note(self: WeightStashing, total: dict[str, Tensor], batch: Batch) -> None:
        step(self, total, batch)
        versions = self.stage.versions
        own = sum(vector.numel() * vector.element_size() for vector in versions.live[versions.newest].vectors)
        held.append(versions.num_bytes() / own)

    monkeypatch.setattr(WeightStashing, "_step", note)
    how = Pipedream(lr=LR, pipedream_2bw=True, batches_per_update=microbatches)
    trained_stages(TASK, planned(TASK, 3), how, order, late)
    assert [stage.stage.versions.peak for stage in made] == [2, 2, 2]
    assert set(held) == {2.0}
    assert [len(stage.stage.versions.live) for stage in made] == [1, 1, 1]
    assert [stage.stage.totals or stage.stage.kept or stage.in_flight for stage in made] == [{}, {}, {}]


def test_a_gradient_that_is_not_finite_leaves_out_its_update_alone() -> None:
    class Spoilt(Shaped):
        def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            loss = super().loss(model, batch)
            return loss * float("inf") if bool((batch[0] == spoilt).all(1).any()) else loss

    task = Spoilt("chain", samples=48)
    batches = batches_of(data_plan(task))
    spoilt = task.data().batch([batches[4][0]])[0][0]  # in the second round of three batches
    workers = trained_stages(task, planned(task, 2), Pipedream(lr=LR, pipedream_2bw=True, batches_per_update=3))
    found = parameters(workers)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert_same(found, delayed(task, batches, 3))


def test_in_virtual_time_double_buffering_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty: dict[int, list[int]] = {}  # stage -> batches it had had whenever the pipeline ran empty
    settle = WeightStashing._settle

    def note(self: WeightStashing) -> Iterator[Action]:
        yield from settle(self)
        empty.setdefault(self.submodel.machine, []).append(self.accepted)

    monkeypatch.setattr(WeightStashing, "_settle", note)
    task = Shaped("chain", samples=94)  # two epochs of 24 batches, the last of each of two samples, in portions of 12
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": "chain", "samples": 94},
        strategy="pipedream",
        strategy_settings={"lr": LR, "pipedream_2bw": True, "batches_per_update": 5},
        num_workers=3,
        num_servers=0,
        runtime="sim",
        epochs=2,
        directory=str(tmp_path),
        stage_plan=planned(task, 3),
    )
    result = run(config, lambda event: None)
    assert (result.outcome, result.accounting["applied"]) == ("finished", 48), result.reason
    assert empty == {0: [48], 1: [48], 2: [48]}  # only at the end: the next lease always comes in time
    plan = DataPlan(fingerprint="", layout="", num_samples=94, batch_size=4, epochs=2, seed=0, portion_batches=12)
    assert_same(load_file(tmp_path / "model.safetensors"), delayed(task, batches_of(plan), 5))


def test_replicas_and_too_few_batches_to_an_update_are_refused() -> None:
    with pytest.raises(ValueError, match="one worker per stage"):
        trained_stages(TASK, planned(TASK, 2, replicas=[2, 1]), Pipedream(pipedream_2bw=True))
    with pytest.raises(ValueError, match="type batches_per_update=3 or more"):
        trained_stages(TASK, planned(TASK, 3), Pipedream(pipedream_2bw=True, batches_per_update=2))
