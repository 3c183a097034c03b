"""Workers that take different ways through a loop: they end with one model and are told, or it is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from tests.split_group import Group, run_group
from tests.test_split_batches import DATA, HABITS, Join, Script, backward, net, train
from tests.test_split_workers import equal_models

Decision = Callable[[Any, int, Tensor], bool]  # of the run, the epoch and the loss


def early_stop(decide: Decision, inside: bool, epochs: int = 5) -> tuple[Script, dict[int, int]]:
    """Return a script that leaves a pass, or all of them, and the number of steps that each worker makes."""
    steps: dict[int, int] = {}

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
        with join(model, optimizer) as run:
            for epoch in range(epochs):
                for batch in run.batches(DATA, batch_size=4):
                    loss = train(model, optimizer, batch)
                    steps[run.rank] = steps.get(run.rank, 0) + 1
                    if inside and decide(run, epoch, loss):
                        break
                if not inside and decide(run, epoch, loss):
                    break
        return model

    return script, steps


def one_worker(run: Any, epoch: int, loss: Tensor) -> bool:
    return bool(run.rank == 1 and epoch == 1)


@pytest.mark.parametrize("inside", [True, False], ids=["a pass", "all passes"])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_stop_at_different_steps_have_one_model_and_are_told(
    workers: int, inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script, steps = early_stop(one_worker, inside)
    group = Group()
    models = run_group(script, workers, group)
    assert len(models) == workers and equal_models(models)
    assert steps[1] < steps[0] == 5 * 7  # the others go on
    assert group.view.applied == 5 * 26  # also with the samples that were the part of the worker that left
    told = capsys.readouterr().err
    assert told.count("a worker has left its loop over the batches, and others went on") == 1
    assert "use run.mean(loss)" in told


@pytest.mark.parametrize("inside", [True, False], ids=["a pass", "all passes"])
def test_a_decision_by_the_mean_loss_is_the_same_on_all_workers(
    inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script, steps = early_stop(lambda run, epoch, loss: run.mean(loss) < 0.9, inside)
    models = run_group(script, 3)
    assert equal_models(models)
    assert len(set(steps.values())) == 1 and steps[0] < 5 * 7
    assert "rainband" not in capsys.readouterr().err


def on_one_worker(where: str) -> Script:
    """Return a script in which one worker takes a mean: before or after the gradients of a batch, or after a pass."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.3)
        with join(model, optimizer) as run:
            for _ in range(3):
                for batch in run.batches(DATA, batch_size=4):
                    if where == "before" and run.rank == 1:
                        run.mean(1.0)
                    train(model, optimizer, batch)
                    if where == "after" and run.is_first:
                        run.mean(1.0)
                if where == "pass" and run.is_first:
                    run.mean(1.0)
        return model

    return script


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("where", ["before", "after", "pass"])
def test_a_mean_that_some_workers_do_not_take_is_an_error(where: str, workers: int) -> None:
    with pytest.raises(ValueError, match="all workers must call it.*if run.is_first: print"):
        run_group(on_one_worker(where), workers)


def test_a_mean_is_that_of_the_workers_that_do_not_skip_the_batch() -> None:
    """A worker that leaves its part out calls no run.mean, and nobody misses it."""
    found: dict[int, list[float]] = {}

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.3)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=6)):
                if number == 2 and run.rank == 1:
                    continue
                loss = train(model, optimizer, batch)
                found.setdefault(run.rank, []).append(run.mean(float(run.rank)))
                assert loss.isfinite()
        return model

    assert equal_models(run_group(script, 2))
    assert found[0][2] == 0.0 and found[0][0] == 0.5


# ---- gradients that nobody averages ----


def of_autograd(how: str) -> Script:
    """Return a script that calls torch.autograd.grad for parameters, beside backward()."""

    def script(join: Join) -> nn.Module:
        first, second = net(), net()
        optimizers = [SGD(first.parameters(), lr=0.1), SGD(second.parameters(), lr=0.1)]
        with join([first, second], optimizers) as run:
            for inputs, labels in run.batches(DATA, batch_size=6):
                train(first, optimizers[0], (inputs, labels))
                loss = cross_entropy(second(inputs), labels)
                if how == "norm":  # weights one loss by the gradient of another one, as VQGAN does
                    (last,) = torch.autograd.grad(loss, second[2].weight, retain_graph=True)
                    loss = loss / last.norm()
                    optimizers[1].zero_grad()
                    loss.backward()
                else:
                    gradients = torch.autograd.grad(loss, list(second.parameters()))
                    for parameter, gradient in zip(second.parameters(), gradients, strict=True):
                        parameter.grad = gradient
                if how == "closure":
                    optimizers[1].step(lambda loss=loss: loss)
                else:
                    optimizers[1].step()
        return nn.ModuleList([first, second])

    return script


@pytest.mark.parametrize("how", ["step", "closure"])
def test_gradients_of_autograd_grad_beside_backward_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match="the gradient of 1.0.weight was not computed by loss.backward"):
        run_group(of_autograd(how), 2)
    run_group(of_autograd(how), 1)


def test_a_number_that_follows_from_autograd_grad_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    run_group(of_autograd("norm"), 3)
    told = capsys.readouterr().err
    assert told.count("torch.autograd.grad has computed a gradient of 1.2.weight") == 1
    assert "take run.mean(number)" in told
    run_group(of_autograd("norm"), 1)
    assert "autograd" not in capsys.readouterr().err


def test_a_loop_outside_the_block_is_refused() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        run = join(model, SGD(model.parameters(), lr=0.1))
        for batch in run.batches(DATA, batch_size=4):
            backward(model, batch)
        return model

    with pytest.raises(ValueError, match="with rainband.join.model, optimizer. as run"):
        run_group(script, 1)


def test_a_backward_before_the_loop_is_no_loader_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    run_group(HABITS["backward_before_and_after_the_passes"], 2)
    assert "own data loader" not in capsys.readouterr().err
