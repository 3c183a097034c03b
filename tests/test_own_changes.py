"""A custom loop that changes parameters itself is told so, and one whose strategy scales the learning rate gets it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from rainband.strategies.single import Single
from rainband.strategies.soft_sync import SoftSync
from rainband.strategies.sync import Sync
from rainband.strategy import Strategy
from tests.one_process import PLAIN, OneProcess, joined
from tests.test_training_loop import DATA, Join, backward, net, same_as_plain, train


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def one_row(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight[1] *= 0.5  # type: ignore[index, union-attr, operator]


def replace(model: nn.Module) -> None:
    model[2].bias.data = torch.ones(3)  # type: ignore[index, union-attr]


def decay(model: nn.Module) -> None:
    """By 0.00001 of each value: the product of a learning rate and a weight decay."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-5)


def restore(model: nn.Module) -> None:
    """In place, as to go back to the best checkpoint."""
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


CHANGES = {"0.weight": [clamp, decay, restore], "2.weight": [one_row], "2.bias": [replace]}


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
@pytest.mark.parametrize(("name", "change"), [(name, one) for name, some in CHANGES.items() for one in some])
def test_the_first_change_of_a_parameter_is_refused_by_its_name(
    name: str, change: Callable[[nn.Module], None], strategy: Strategy
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = 0
    with pytest.raises(ValueError, match=f"has changed the parameter {name} itself.*--strategy single"):
        with joined(model, optimizer, OneProcess(strategy)) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                steps += 1
                change(model)
    assert steps == 1


def test_in_one_process_a_change_is_kept() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                clamp(model)
        return model

    same_as_plain(script, pushes=0, strategy=Single())


def test_a_change_at_the_end_is_reported_and_keeps_the_trained_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = net(), net()
    optimizer, ours = SGD(model.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    with joined(model, optimizer, OneProcess()) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
            train(plain, ours, batch)
        restore(model)
    assert "has changed the parameter 0.weight itself" in capsys.readouterr().err
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


LARGE = TensorDataset(torch.randn(40, 100), torch.randint(0, 3, (40,)))


def large_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3))  # only some of its elements are compared


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
@pytest.mark.parametrize("when", [1, 3])
def test_a_change_of_one_element_of_many_is_noticed(when: int, strategy: Strategy) -> None:
    model = large_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = 0
    with pytest.raises(ValueError, match="has changed the parameter 0.weight itself"):
        with joined(model, optimizer, OneProcess(strategy)) as run:
            for batch in run.batches(LARGE, batch_size=4):
                train(model, optimizer, batch)
                steps += 1
                if steps == when:
                    with torch.no_grad():
                        model[0].weight[7, 33] = 0.0  # type: ignore[index]
    assert steps == when


@pytest.mark.parametrize("writes", [1, 2])
def test_a_loop_that_takes_changes_back_and_then_keeps_one_is_told_its_name(writes: int) -> None:
    """From the first change on that is taken back, all elements are compared."""
    model = large_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = 0
    with pytest.raises(ValueError, match="has changed the parameter 0.weight itself"):
        with joined(model, optimizer, OneProcess()) as run:
            for batch in run.batches(LARGE, batch_size=4):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.3).sub_(0.3)
                train(model, optimizer, batch)
                steps += 1
                with torch.no_grad():
                    for _ in range(writes if steps == 4 else 0):
                        model[0].weight[7, 33] += 0.5  # type: ignore[index, operator]
    assert steps == 4


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
def test_a_change_that_the_loop_takes_back_is_no_change(strategy: Strategy) -> None:
    """Averaged weights for an evaluation, and a perturbation for the backward pass."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                kept = copy.deepcopy(model.state_dict())
                restore(model)
                model.load_state_dict(kept)
                optimizer.zero_grad()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.3)
                backward(model, batch)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.3)
                optimizer.step()
        return model

    plain = script(lambda model, optimizer: _alone())
    member = OneProcess(strategy)
    shared = script(lambda model, optimizer: joined(model, optimizer, member))
    for a, b in zip(plain.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert member.accounting.applied == 6


def _alone() -> Any:
    from rainband.runtimes.training_loop.single_process import SingleProcessLoop

    return SingleProcessLoop()


def test_parameters_of_models_that_diverge_do_not_count_as_changed() -> None:
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=3e38)
    with joined(model, optimizer, OneProcess()):
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3e38)
            optimizer.step()
    assert not model.weight.isfinite().any()


# ---- the learning rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "num_workers", "factor"),
    [
        (Sync(batch_per_worker=True, scaling="linear"), 4, 4.0),
        (Sync(batch_per_worker=True, scaling="linear", backup_workers=1), 4, 3.0),
        (Sync(batch_per_worker=True, scaling="sqrt"), 4, 2.0),
        (Sync(batch_per_worker=True), 4, 1.0),
        (SoftSync(n=4, scaling="n"), 1, 0.25),
        (SoftSync(n=1, scaling="none"), 1, 1.0),
    ],
)
def test_the_strategy_scales_the_learning_rates_of_the_loop(
    strategy: Strategy, num_workers: int, factor: float
) -> None:
    """Two steps with gradient 1 at a rate of 0.5, and one at 0.25, which a schedule has set."""
    assert strategy.lr_factor(num_workers) == factor
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.5)
    member = OneProcess(strategy)
    member.num_workers = num_workers
    with joined(model, optimizer, member) as run:
        for number, (inputs, _) in enumerate(run.batches(DATA, batch_size=8)):
            optimizer.param_groups[0]["lr"] = 0.5 if number < 2 else 0.25
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            assert len(inputs) == 8
    assert model.weight.item() == pytest.approx(-factor * (0.5 + 0.5 + 0.25))
    assert optimizer.param_groups[0]["lr"] == 0.25


# ---- warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "optimizer", "warning"),
    [
        (PLAIN, {"momentum": 0.9}, "momentum=0.9 with 4 workers: gradients miss 3 updates on average"),
        (PLAIN, {"momentum": 0.2}, ""),
        (
            Sync(batch_per_worker=True, scaling="linear"),
            {},
            "the first step uses a learning rate of 0.4, 4 times that of one worker",
        ),
        (SoftSync(n=3), {}, "n=3 does not divide 4 workers"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_worker_prints_the_warnings_of_train_with_the_loops_own_settings(
    strategy: Strategy, optimizer: dict[str, float], warning: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    member = OneProcess(strategy)
    member.num_workers = 4
    member.index = rank
    with joined(model, SGD(model.parameters(), lr=0.1, **optimizer), member):
        pass
    printed = capsys.readouterr().err
    assert (warning in printed) if warning and rank == 0 else "WARNING" not in printed
