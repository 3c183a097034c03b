"""SyncBatchNorm over the workers of a round is BatchNorm over the whole batch; ghost batch and weight normalization."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

import rainband
from rainband.model.layers import GhostBatchNorm
from rainband.model.sync_batch_norm import SharedBatchNorm, refuse_sync_batch_norm, set_group, share_statistics
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from tests.split_group import Group, run_group
from tests.test_split_batches import Join

IMAGES = torch.randn(22, 3, 4, 4, generator=torch.Generator().manual_seed(2)).double() + 3.0
LABELS = torch.arange(22) % 5


def model(momentum: float | None = 0.3, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.SyncBatchNorm(4, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.SyncBatchNorm(6, momentum=momentum),
        nn.Linear(6, 5),
    ).double()


def trained(workers: int, reduction: str = "mean", group: Group | None = None, **settings: Any) -> list[nn.Module]:
    """Train with batches of 8, 8 and 6 samples, which three workers cannot divide equally; twice."""

    def script(join: Join) -> nn.Module:
        net = model(**settings)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        with join(net, optimizer) as run:
            for _ in range(2):
                for x, y in run.batches(TensorDataset(IMAGES, LABELS), batch_size=8):
                    net.zero_grad()
                    functional.cross_entropy(net(x), y, reduction=reduction).backward()
                    optimizer.step()
        return net

    return run_group(script, workers, group)


@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_loop_has_the_parameters_and_statistics_of_one_process(
    workers: int, reduction: str, settings: dict[str, Any]
) -> None:
    group = Group()
    group.trial_rounds = 2 if reduction == "sum" else 0  # they find out that it is a sum
    (alone,) = trained(1, reduction, **settings)
    for net in trained(workers, reduction, group, **settings):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name)


def test_local_statistics_would_be_others() -> None:
    """The models that are compared above differ with BatchNorm."""

    def script(join: Join) -> nn.Module:
        net = model()
        net[1], net[5] = nn.BatchNorm2d(4).double(), nn.BatchNorm1d(6).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        with join(net, optimizer) as run:
            for x, y in run.batches(TensorDataset(IMAGES, LABELS), batch_size=8):
                functional.cross_entropy(net(x), y).backward()
        return net

    one, two = run_group(script, 1)[0].state_dict(), run_group(script, 2)[0].state_dict()
    assert not torch.allclose(one["1.running_var"], two["1.running_var"], rtol=1e-6)


class Alone:
    """A group of one worker."""

    shares, counts, weight = True, True, 3.0

    def mean(self, numbers: list[float], weight: float) -> tuple[list[float], float]:
        return numbers, weight


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (5, 4, 2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_torchs_where_one_worker_has_all_samples(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(3)
    theirs = nn.SyncBatchNorm(4, bias=bias).double()
    mine = copy.deepcopy(theirs)
    share_statistics(mine)
    set_group(mine, Alone())
    x = torch.randn(shape).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(one) for layer, one in zip((theirs, mine), inputs, strict=True)]
    for y in outputs:
        (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    for ours, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours, other)
    assert isinstance(mine, SharedBatchNorm) and mine.state_dict().keys() == theirs.state_dict().keys()


def test_half_precision_is_normalized_in_single_precision() -> None:
    layer = nn.SyncBatchNorm(4)
    share_statistics(layer)
    set_group(layer, Alone())
    x = torch.randn(64, 4).bfloat16() + 100
    y = layer(x)
    assert y.dtype is torch.bfloat16
    assert y.float().mean().abs() < 0.01


def test_a_copy_of_a_model_has_no_group_and_uses_its_own_batch() -> None:
    layer = nn.SyncBatchNorm(4)
    share_statistics(layer)
    set_group(layer, Alone())
    copied = copy.deepcopy(layer)
    x = torch.randn(6, 4)
    torch.testing.assert_close(copied(x), nn.BatchNorm1d(4)(x))


def test_where_workers_have_batches_of_their_own_it_is_refused() -> None:
    with pytest.raises(ValueError, match="choose sync"):
        refuse_sync_batch_norm(model())


TASK = rainband.ModuleTask(model, TensorDataset(IMAGES, LABELS), functional.cross_entropy, batch_size=8, epochs=2)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [2, 5])  # of five workers, some have no samples of a batch
def test_fit_has_the_parameters_and_statistics_of_one_process(workers: int, tmp_path: Path) -> None:
    sgd: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1}
    alone = rainband.fit(TASK, Single(**sgd), runs=tmp_path).module.state_dict()
    shared = rainband.fit(TASK, Sync(**sgd), workers=workers, runs=tmp_path).module.state_dict()
    for name, value in shared.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-9, msg=name)


# ---- alternatives ----


def test_ghost_batch_normalization_is_that_of_each_group() -> None:
    x = torch.randn(9, 4)
    ghost, plain = GhostBatchNorm(4, group=4), nn.BatchNorm1d(4)
    torch.testing.assert_close(
        ghost(x), torch.cat([plain(x[:4]), plain(x[4:])])
    )  # a single sample joins the last group
    torch.testing.assert_close(ghost.running_mean, plain.running_mean)
    assert ghost.num_batches_tracked == 2
    ghost.eval(), plain.eval()
    torch.testing.assert_close(ghost(x), plain(x))
    with pytest.raises(ValueError, match="at least 2 samples"):
        GhostBatchNorm(4, group=1)


def test_ghost_groups_are_the_same_for_one_worker_and_two() -> None:
    """If the parts are whole groups, two workers have the gradients of one process."""

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 4), GhostBatchNorm(4, group=4), nn.Linear(4, 5)).double()
        data = TensorDataset(IMAGES[:16, :, 0, 0], LABELS[:16])
        optimizer = SGD(net.parameters(), lr=0.1)
        with join(net, optimizer) as run:
            for x, y in run.batches(data, batch_size=16):
                functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        return net

    (alone,), both = run_group(script, 1), run_group(script, 2)
    for name, value in alone.named_parameters():
        torch.testing.assert_close(both[0].get_parameter(name), value, rtol=1e-12, atol=1e-12)


def test_weight_normalization_is_that_of_one_process() -> None:
    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        net = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 5)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        with join(net, optimizer) as run:
            for x, y in run.batches(TensorDataset(IMAGES[:, :, 0, 0], LABELS), batch_size=8):
                net.zero_grad()
                functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        return net

    (alone,), three = run_group(script, 1), run_group(script, 3)
    for name, value in alone.named_parameters():
        torch.testing.assert_close(three[0].get_parameter(name), value, rtol=1e-12, atol=1e-12)
