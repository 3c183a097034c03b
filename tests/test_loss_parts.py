"""Losses of tasks whose batches Rainband splits: means, sums, and means with weights of their own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rainband
from rainband.errors import RainbandError
from rainband.model.loss_parts import LossParts, try_parts
from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.strategies.single import Single
from rainband.strategy import Batch
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.stage_tasks import Shaped, planned, trained_stages, whole_gradient, worker_of

SAMPLES, BATCH, EPOCHS = 67, 16, 2  # the last batch of an epoch has 3 samples
CLASSES = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
LossFn = Callable[[Any, Any], Tensor]


def dataset(ignored: float = 0.6) -> TensorDataset:
    """Return points and labels, some of which are ignored; all of those of the first 16 samples in the worst case."""
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    labels = points[:, :3].argmax(1)
    return TensorDataset(points, labels.where(torch.rand(SAMPLES, generator=generator) >= ignored, torch.tensor(-100)))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def num_labels(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def class_weight(batch: Any) -> Tensor:
    return CLASSES[batch[1][batch[1] != -100]].sum()


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, weight=CLASSES)


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def task(loss: LossFn, weight: Callable[[Any], Any] | None = None, ignored: float = 0.6) -> rainband.ModuleTask:
    return rainband.ModuleTask(net, dataset(ignored), loss, batch_size=BATCH, epochs=EPOCHS, weight=weight)


def trained(of: rainband.ModuleTask, folder: Path, strategy: str, workers: int, **options: Any) -> rainband.FitResult:
    made = {"sync": rainband.Sync, "all_reduce": rainband.AllReduce, "single": rainband.Single}[strategy]
    return rainband.fit(
        of, made(lr=0.05, momentum=0.9, optimizer="sgd"), workers, runtime="sim", runs=str(folder), **options
    )


def parameters(result: rainband.FitResult) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in result.module.parameters()])


def plain_pytorch(of: rainband.ModuleTask) -> tuple[Tensor, int]:
    """Train in a loop of plain PyTorch, with the batches that one worker takes; return how many had no loss, too."""
    from rainband.protocol.data_plan import DataPlan
    from rainband.worker.sampler import Sampler

    torch.manual_seed(0)
    model = of.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = DataPlan(
        fingerprint="", layout="", num_samples=SAMPLES, batch_size=BATCH, epochs=EPOCHS, seed=0, portion_batches=1
    )
    skipped = 0
    for portion in range(plan.num_portions):
        optimizer.zero_grad()
        loss = of.loss(model, of.data().batch(Sampler(plan).indices(Batch(portion, 0, 0))))
        loss.backward()  # type: ignore[no-untyped-call]
        if loss.isfinite():
            optimizer.step()
        else:
            skipped += 1
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), skipped


WEIGHTED = {
    "ignored labels": (functional.cross_entropy, num_labels, 0.4),
    "few labels": (functional.cross_entropy, num_labels, 0.95),  # parts, and whole batches, without one
    "class weights": (weighted, class_weight, 0.3),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_with_a_weight_any_number_of_workers_makes_the_updates_of_one_process(name: str, tmp_path: Path) -> None:
    loss, weight, ignored = WEIGHTED[name]
    of = task(loss, weight, ignored)
    expected, skipped = plain_pytorch(of)
    assert skipped > 1 or name != "few labels"
    one = trained(of, tmp_path, "sync", 1)
    runs = [one, trained(of, tmp_path, "all_reduce", 2), trained(of, tmp_path, "sync", 4)]
    runs.append(trained(of, tmp_path, "single", 2, stages=2))
    runs.append(trained(of, tmp_path, "sync", 2, microbatches=3))
    for run in runs:
        torch.testing.assert_close(parameters(run), expected, rtol=1e-12, atol=1e-12)
        assert run.accounting.applied == run.accounting.batches - skipped
        assert run.accounting.skipped == ({"without weight": skipped} if skipped else {})
        assert run.history[-1].loss == run.history[-1].loss  # never NaN


def test_parts_that_lost_workers_leave_count_with_their_weight(tmp_path: Path) -> None:
    of = task(functional.cross_entropy, num_labels)
    calm = trained(of, tmp_path, "sync", 4)
    middle = calm.history[-1].at_s / 2
    faults = tmp_path / "faults.txt"
    faults.write_text(f"{middle:.9f} kill worker 1\n{middle * 1.2:.9f} kill worker 2\n")
    result = trained(of, tmp_path, "sync", 4, faults=str(faults))
    torch.testing.assert_close(parameters(result), plain_pytorch(of)[0], rtol=1e-12, atol=1e-12)


def test_a_sum_over_samples_gets_the_updates_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = task(summed)
    expected, _ = plain_pytorch(of)
    for workers in (1, 4):
        found = parameters(trained(of, tmp_path, "sync", workers))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert ("sum over samples" in capsys.readouterr().err) == (workers > 1)
    found = parameters(trained(of, tmp_path, "single", 1, microbatches=3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = parameters(trained(of, tmp_path, "sync", 2, microbatches=3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert "sum over samples" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="the loss is a sum over samples, not a mean"):
        staged = trained(of, tmp_path, "single", 2, stages=2)
    torch.testing.assert_close(parameters(staged), expected, rtol=1e-12, atol=1e-12)


def test_a_mean_over_fewer_things_than_samples_is_told_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = task(functional.cross_entropy)
    trained(of, tmp_path, "sync", 2)
    assert "ModuleTask(..., weight=" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="not the mean of its parts' losses"):
        trained(of, tmp_path, "single", 2, stages=2)


def test_a_weight_is_not_for_sums(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="omit weight"):
        trained(task(summed, lambda batch: len(batch[0])), tmp_path, "single", 2, stages=2)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_must_be_a_number_of_at_least_zero(weight: float, tmp_path: Path) -> None:
    with pytest.raises(RainbandError, match="must be a number of at least 0"):
        trained(task(functional.cross_entropy, lambda batch: weight), tmp_path, "sync", 2)


# ---- the trial ----


class Everything(nn.Module):
    """A model with dropout, statistics of batches, and random numbers in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)  # type: ignore[no-any-return]


def noisy(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs + 0.3 * torch.randn_like(outputs)) ** 2).mean()


def noisy_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs + 0.1 * torch.randn_like(outputs)) ** 2).sum()


def contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def sum_and_penalty(outputs: Tensor, labels: Tensor) -> Tensor:
    return summed(outputs, labels) + 100 * (outputs**2).mean()


def at_least_one(outputs: Tensor, labels: Tensor) -> Tensor:
    return summed(outputs, labels) / max(1, int((labels != -100).sum()))


def fails(outputs: Tensor, labels: Tensor) -> Tensor:
    raise RuntimeError("not with these samples")


JUDGED: dict[str, tuple[LossFn, Callable[[Any], Any] | None, float, bool, str]] = {
    "mean": (functional.cross_entropy, None, 0.0, False, ""),
    "sum": (summed, None, 0.0, True, "the loss is a sum"),
    "sum with ignored labels": (summed, None, 0.6, True, "the loss is a sum"),
    "ignored labels": (functional.cross_entropy, None, 0.6, False, "by "),
    "ignored labels with a weight": (functional.cross_entropy, num_labels, 0.6, False, ""),
    "parts without labels": (functional.cross_entropy, None, 0.98, False, "a part alone has no loss"),
    "a wrong weight": (weighted, num_labels, 0.3, False, "must be what its mean divides by"),
    "random mean": (noisy, None, 0.0, False, ""),
    "random sum": (noisy_sum, None, 0.0, True, "the loss is a sum"),
    "contrastive": (contrastive, None, 0.0, False, "not the mean of its parts"),
    "labels in one part": (at_least_one, None, 0.98, False, ""),
    "sum and penalty": (sum_and_penalty, None, 0.0, False, "not the mean of its parts"),
    "failing": (fails, None, 0.0, False, ""),
}


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("model", [net, Everything])
def test_a_few_samples_show_how_a_loss_is_made_of_its_parts(name: str, model: Callable[[], nn.Module]) -> None:
    loss, weight, ignored, is_sum, message = JUDGED[name]
    of = task(loss, weight, ignored)
    torch.manual_seed(5)
    found = try_parts(of, model(), of.data(), BATCH)
    assert found.is_sum == is_sum, found
    assert message in found.message and bool(message) == bool(found.message)


def seed_all() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def test_a_trial_leaves_no_trace() -> None:
    of, model = task(summed), Everything()
    model.layers[1].eval()
    given = torch.ones(8, dtype=torch.float64)
    model.layers[1].weight.grad = given
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    seed_all()
    expected = torch.rand(3), np.random.rand(), random.random()
    seed_all()
    assert try_parts(of, model, of.data(), BATCH).is_sum
    assert torch.equal(torch.rand(3), expected[0]) and (np.random.rand(), random.random()) == expected[1:]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.grad for parameter in model.parameters() if parameter.grad is not None] == [given]
    assert model.layers[1].weight.grad is given


def test_a_batch_that_is_not_split_needs_no_trial() -> None:
    of = task(summed)
    assert try_parts(of, net(), of.data(), 1) == LossParts()


# ---- microbatches on stages with several workers ----


class Weighed(Shaped):
    """Samples of weight 0, 1 or 2, by their first value."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        answer = model(x)
        weights = self.weights(x)
        return ((answer * answer).reshape(len(x), -1).mean(1) * weights).sum() / weights.sum()

    def weights(self, x: Tensor) -> Tensor:
        return (x.reshape(len(x), -1)[:, 0] * 2).round().clamp(0, 2)

    def weight(self, batch: Any) -> float:
        return float(self.weights(batch[0]).sum())


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 2]])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_weights_of_microbatches_are_known_to_every_worker_of_a_stage(replicas: list[int], microbatches: int) -> None:
    of = Weighed("chain", batch_size=4)
    plan = planned(of, 2, replicas=replicas, microbatches=microbatches)
    for batch in (Batch(0, 0, 1), Batch(0, 2, 1)):
        whole = whole_gradient(of, batch)
        network = MemoryNetwork(plan.size)
        workers = [worker_of(of, plan, rank, network) for rank in range(plan.size)]
        found = run_together([_gradient(worker, batch) for worker in workers])
        for one in found:
            assert one.loss == pytest.approx(whole.loss)


async def _gradient(worker: Any, batch: Batch) -> Any:
    return await worker.gradient(batch)


def test_stages_of_several_workers_train_with_weights_as_one_process() -> None:
    of = Weighed("chain", batch_size=4)
    strategy = Single(lr=0.1, optimizer="sgd")
    alone = trained_stages(of, planned(of, 1, microbatches=1), strategy)
    for replicas in ([1, 1], [2, 1], [1, 2]):
        stages = trained_stages(of, planned(of, 2, replicas=replicas, microbatches=4), strategy)
        found = {name: value for worker in stages for name, value in worker.submodel.held().items()}
        for name, value in alone[0].submodel.held().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_no_warning_for_an_ordinary_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = task(functional.cross_entropy, ignored=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(of, tmp_path, "single", 2, stages=2)
        trained(of, tmp_path, "sync", 2)
    assert not capsys.readouterr().err
