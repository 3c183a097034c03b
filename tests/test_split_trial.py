"""The first rounds of a loop: they find losses that are sums, measure one process, and change no result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset

from rainband.rounds.exchange import Part
from rainband.runtimes.training_loop.split.trial import LoopTrial, kind_of, speed_sentence
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


def test_a_lost_worker_leaves_each_sample_counted_once_in_a_sum() -> None:
    """The gradient is 1 for each sample of a batch, so a parameter counts how often its sample was used."""

    def script(join: Join) -> nn.Module:
        model = nn.ParameterList([torch.zeros(26).double()])
        optimizer = SGD(model.parameters(), lr=1.0)
        with join(model, optimizer) as run:
            for _ in range(3):
                for (samples,) in run.batches(TensorDataset(torch.arange(26)), batch_size=5):
                    optimizer.zero_grad()
                    model[0][samples].sum().backward()
                    optimizer.step()
        return model

    lost = 0
    for waits in range(9, 27):
        group = on_trial()
        group.kills = {waits % 3: waits}  # some workers wait less often, and are not killed
        models = run_group(script, 3, group)
        lost += 3 - len(models)
        for model in models:
            assert model.state_dict()["0"].tolist() == [-3.0] * 26
    assert lost >= 6


def test_the_gradient_of_a_sum_doubles_and_that_of_noise_does_not() -> None:
    torch.manual_seed(0)
    gradient, noise, values = torch.randn(3, 200).double()

    def kind(own: Tensor, whole: Tensor) -> str:
        return kind_of([(own, whole, values)])

    assert kind(2 * gradient, gradient) == "sum"
    assert kind(2 * gradient + 0.3 * noise, gradient) == "sum"
    assert kind(gradient, gradient) == kind(gradient + 0.2 * noise, gradient) == "mean"
    assert kind(gradient + 2 * noise, gradient) == ""  # dropout, or noise of a generative model
    assert kind(noise, gradient) == ""
    assert kind(0 * gradient, 0 * gradient) == ""
    assert kind(gradient * float("inf"), gradient) == ""
    assert kind_of([]) == ""


def test_a_sum_and_something_else_is_told_from_both() -> None:
    torch.manual_seed(0)
    gradient, noise, values = torch.randn(3, 200).double()
    assert kind_of([(1.4 * gradient + 0.1 * noise, gradient, values)]) == "mixed"
    for penalty in (0.01 * values, 0.01 * values.sign(), -0.001 * values):
        assert kind_of([(2 * gradient + penalty, gradient + penalty, values)]) == "mixed"
    assert kind_of([(2 * gradient + 1e-6 * values, gradient + 1e-6 * values, values)]) == "sum"  # rounding errors


def losses(name: str, join: Join) -> nn.Module:
    """Train with losses of which some are sums."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.01)
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            if name == "weighted":
                run.weight(len(inputs))
            outputs = model(inputs)
            total = cross_entropy(outputs, labels, reduction="sum")
            if name == "two backwards":
                total.backward(retain_graph=True)
                outputs.square().mean().backward()
            elif name == "two sums":
                total.backward(retain_graph=True)
                outputs.square().sum().backward()
            elif name == "a mean":
                (total / 4 + outputs.square().mean()).backward()
            else:
                (total + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["a penalty", "two backwards"])
def test_a_sum_and_something_else_is_refused(name: str, workers: int) -> None:
    with pytest.raises(ValueError, match="is a sum over samples plus something else.*reduction='mean'"):
        run_group(lambda join: losses(name, join), workers, on_trial())


@pytest.mark.parametrize("workers", [2, 3])
def test_several_sums_are_added(workers: int) -> None:
    plain = losses("two sums", Plain).state_dict()
    for model in run_group(lambda join: losses("two sums", join), workers, on_trial()):
        torch.testing.assert_close(model.state_dict(), plain, rtol=1e-12, atol=1e-12)


def test_a_loop_that_weights_its_gradients_is_not_judged() -> None:
    assert equal_models(run_group(lambda join: losses("weighted", join), 2, on_trial()))


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
