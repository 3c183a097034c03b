"""The first rounds of a loop: they find losses that are sums, measure one process, and change no result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.split.trial import LoopTrial, is_doubled, speed_sentence
from tests.split_group import Group, run_group
from tests.test_split_batches import DATA, HABITS, Join, Plain, net, train
from tests.test_split_workers import equal_models


def on_trial() -> Group:
    group = Group()
    group.trial_rounds = 4
    return group


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", HABITS)
def test_the_first_rounds_change_no_result(name: str, workers: int) -> None:
    plain = HABITS[name](Plain).state_dict()
    for model in run_group(HABITS[name], workers, on_trial()):
        torch.testing.assert_close(model.state_dict(), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_first_rounds_have_the_batchnorm_of_one_process(workers: int) -> None:
    """In these four rounds, one worker computes whole batches, so statistics are those of whole batches."""

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=6, drop_last=True):
                train(model, optimizer, batch)
        return model

    plain = script(Plain).state_dict()
    for model in run_group(script, workers, on_trial()):
        torch.testing.assert_close(model.state_dict(), plain, rtol=1e-12, atol=1e-12)


def summed(join: Join, every: int = 1, no_sync_from: int = 100) -> nn.Module:
    """Train with a loss that is the sum over samples, divided by a constant."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    with join(model, optimizer) as run:
        for _ in range(3):
            for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=5), 1):
                loss = cross_entropy(model(inputs), labels, reduction="sum") / 5
                if number % every and number >= no_sync_from:
                    with run.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                if number % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return model


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("every", "no_sync_from"), [(1, 100), (2, 100), (2, 3)])
def test_gradients_of_a_sum_are_added(
    workers: int, every: int, no_sync_from: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = summed(Plain, every, no_sync_from).state_dict()
    for model in run_group(lambda join: summed(join, every, no_sync_from), workers, on_trial()):
        torch.testing.assert_close(model.state_dict(), plain, rtol=1e-12, atol=1e-12)
    assert capsys.readouterr().err.count("the loss is a sum over samples, not a mean") == 1


def test_the_gradient_of_a_sum_doubles_and_that_of_noise_does_not() -> None:
    torch.manual_seed(0)
    gradient, noise = torch.randn(2, 200).double()
    assert is_doubled([(2 * gradient, gradient)])
    assert is_doubled([(2 * gradient + 0.3 * noise, gradient)])
    assert not is_doubled([(gradient, gradient)])
    assert not is_doubled([(gradient + 2 * noise, gradient)])  # dropout, or noise of a generative model
    assert not is_doubled([(noise, gradient)])
    assert not is_doubled([(0 * gradient, 0 * gradient)])
    assert not is_doubled([(gradient * float("inf"), gradient)])
    assert not is_doubled([])


def test_the_speed_is_that_of_rounds_with_parts_against_whole_batches() -> None:
    """Whole batches take 6 s, of which 2 s are waiting; rounds with parts take 2 s."""
    times: Iterator[float] = iter([0.0, 9.0, 15.0, 21.0, 27.0, *(29.0 + 2 * k for k in range(40))])
    trial = LoopTrial(lambda: next(times))
    whole, part = Part([0], 0, 64, 64, trial="whole"), Part([0], 0, 16, 64)
    sentences = [trial.round_begins(None, 0.0, 4)]
    sentences += [trial.round_begins(whole, 2.0 * (k + 1), 4) for k in range(4)]
    sentences += [trial.round_begins(part, 8.0, 4) for _ in range(35)]
    assert trial.is_over and sentences[:-1] == [""] * 39
    assert sentences[-1] == (
        "rainband: 4 workers share each batch of 64 (16 samples each): the updates of one process, 2.0 times as fast."
    )
    assert speed_sentence(1.0, 4, part).endswith("one process, about as fast.")
    slow = speed_sentence(0.52, 3, part)
    assert "3 workers share each batch of 64: the updates of one process, but only 0.52 times as fast. Start" in slow


@pytest.mark.parametrize("workers", [2, 3])
def test_a_model_with_running_means_goes_through_the_first_rounds(workers: int) -> None:
    group = on_trial()

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    models = run_group(script, workers, group)
    assert equal_models(models)
    assert group.view.applied == 26
