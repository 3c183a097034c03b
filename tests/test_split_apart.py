"""Workers that take different ways through a loop: they end with one model and are told, or it is an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.split_group import Group, run_group
from tests.test_split_batches import DATA, HABITS, Join, Plain, Script, backward, net, train
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


# ---- batches that differ, or are drawn ahead ----


class OwnNumbers(Sampler[int]):
    """Draws an order with random numbers that differ between the workers."""

    seeds = count()

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(next(self.seeds))

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(DATA), generator=self.random).tolist())


class OwnStream(IterableDataset[Any]):
    """Has the samples in an order that differs between the workers."""

    def __iter__(self) -> Iterator[Any]:
        return (DATA[k] for k in OwnNumbers())


def own_order(way: str) -> Script:
    def script(join: Join) -> nn.Module:
        model, numbers = net(), OwnNumbers()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            if way == "part":
                for rows in torch.tensor(list(numbers)).split(4):
                    train(model, optimizer, run.part((DATA.tensors[0][rows], DATA.tensors[1][rows])))
            else:
                data = DataLoader(OwnStream(), 4) if way == "stream" else DataLoader(DATA, 4, sampler=numbers)
                for batch in run.loader(data):
                    train(model, optimizer, batch)
        return model

    return script


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("way", ["sampler", "stream", "part"])
def test_workers_with_other_batches_are_refused(way: str, workers: int) -> None:
    with pytest.raises(ValueError, match="this worker has other samples in a batch than the first one.*run.generator"):
        run_group(own_order(way), workers)
    run_group(own_order(way), 1)


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Draw each batch before the one before is used, as prefetchers do."""
    batches = iter(batches)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("way", ["inputs", "copies", "part"])
def test_batches_that_are_drawn_ahead_are_refused(way: str, workers: int) -> None:
    """At the first step; or after the pass, if the graph of the loss does not hold the batch itself."""
    steps: dict[int, int] = {}

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            if way == "part":
                batches: Any = (run.part((inputs + 0, labels + 0)) for inputs, labels in DataLoader(DATA, 4))
            else:
                batches = run.loader(DataLoader(DATA, 4))
            for inputs, labels in ahead(batches):
                if way == "copies":
                    inputs, labels = inputs + 0, labels + 0
                train(model, optimizer, (inputs, labels))
                steps[run.rank] = steps.get(run.rank, 0) + 1
        return model

    with pytest.raises(ValueError, match="draws each batch before the backward.. of the one before.*num_workers=2"):
        run_group(script, workers)
    assert max(steps.values(), default=0) == (6 if way == "copies" else 0)
    run_group(script, 1)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_loop_may_leave_out_its_first_batches(epoch: int) -> None:
    """As one that is resumed does; and it may step after the pass."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number in range(2):
                for step, batch in enumerate(run.batches(DATA, batch_size=4)):
                    if number == epoch and step < 3:
                        continue
                    train(model, optimizer, batch)
        return model

    plain = script(Plain).state_dict()
    for model in run_group(script, 3):
        torch.testing.assert_close(model.state_dict(), plain, rtol=1e-12, atol=1e-12)


def test_an_error_in_a_thread_of_the_loop_is_raised_at_its_end() -> None:
    """The thread reads ahead; its error ends the pass, and the loop has nothing to train with."""

    def script(join: Join) -> nn.Module:
        model = net()
        with join(model, SGD(model.parameters(), lr=0.1)) as run:
            loader = run.batches(DATA, batch_size=4)
            read: list[Any] = []

            def fill() -> None:
                with suppress(ValueError):
                    read.extend(loader)

            reader = threading.Thread(target=fill)
            reader.start()
            reader.join()
            assert not read
        return model

    for workers in (1, 2):
        with pytest.raises(ValueError, match="was read in another thread"):
            run_group(script, workers)


# ---- what is reported ----


def reported(what: str) -> Script:
    def script(join: Join) -> nn.Module:
        model, centers = net(), nn.Parameter(torch.zeros(3, 3).double())
        optimizer, other = SGD(model.parameters(), lr=0.1), SGD([centers], lr=0.1)
        if what == "hook":
            model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        with join(model, optimizer) as run:
            if what == "unused":
                for _ in run.batches(DATA, batch_size=4):
                    pass
            for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=6)):
                outputs = model(inputs)
                loss = cross_entropy(outputs, labels)
                if what == "other optimizer":
                    loss = loss + (outputs - centers[labels]).square().mean()
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                if what == "uneven" and run.rank == 0 and number == 2:
                    outputs.square().mean().backward()
                optimizer.step()
                other.step()
                if number == 1 and what == "evaluation":
                    break
            if what == "evaluation":
                model.eval()
                for batch in run.batches(DATA, batch_size=6):
                    train(model, optimizer, batch)
        return model

    return script


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hook", "a hook on 0.weight .*change p.grad after backward"),
        ("unused", "has read all batches of a pass without a backward"),
        ("other optimizer", r"SGD steps parameters that are neither in the model nor.*\[model, head\]"),
        ("uneven", "worker 1 made fewer backward.. passes in a batch"),
        ("evaluation", "the model is in evaluation mode.*Call model.train"),
    ],
)
def test_what_differs_from_one_process_is_reported_once(
    what: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_group(reported(what), 2)
    told = capsys.readouterr().err
    assert len(re.findall(message, told)) == 1
    if what not in ("other optimizer",):
        run_group(reported(what), 1)
        assert "rainband" not in capsys.readouterr().err


def test_two_means_over_different_targets_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for inputs, labels in run.batches(DATA, batch_size=8):
                outputs = model(inputs)
                some = labels.masked_fill(inputs[:, 0] > 0.2, -100)
                optimizer.zero_grad()
                (cross_entropy(outputs, labels) + cross_entropy(outputs, some)).backward()
                optimizer.step()
        return model

    assert equal_models(run_group(script, 2))
    assert "means over different numbers of targets" in capsys.readouterr().err


def test_losses_are_read_only_inside_the_block() -> None:
    before = torch.autograd.backward
    run_group(HABITS["ignored_targets"], 2)
    assert torch.autograd.backward is before
