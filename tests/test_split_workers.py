"""Workers that share each batch: buffers, random numbers, missed updates, joining, pausing, stopping, and refusals."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import MultiStepLR, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, get_worker_info

from rainband.protocol.accounting import NOT_FINITE
from rainband.rounds import average
from rainband.rounds.exchange import Part, RoundId
from rainband.rounds.joining import LAST_EPOCH
from rainband.rounds.view import position
from rainband.runtimes.training_loop.script_random import CommonRandom
from rainband.runtimes.training_loop.split.batches import SplitBatches
from rainband.runtimes.training_loop.split.loop import SplitLoop
from rainband.runtimes.training_loop.split.orders import BatchOrder, PassId, ShuffledOrder
from rainband.runtimes.training_loop.split.parts import batch_length, part_of
from rainband.runtimes.training_loop.split.passes import Pass
from tests.split_group import Group, run_group
from tests.test_split_batches import DATA, Join, Plain, Script, backward, net, train

WORKERS = [2, 3]


def equal_models(models: list[nn.Module]) -> bool:
    first = models[0].state_dict()
    return all(torch.equal(value, first[key]) for model in models[1:] for key, value in model.state_dict().items())


# ---- buffers and random numbers ----


@pytest.mark.parametrize("workers", WORKERS)
def test_batchnorm_statistics_are_the_mean_over_the_parts(workers: int) -> None:
    """The running mean of equal parts is that of the batch; the variance is the mean of the parts' variances."""
    inputs = torch.randn(12, 5, generator=torch.Generator().manual_seed(2)).double()

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)).double()
        with join(model, SGD(model.parameters(), lr=0.0)) as run:
            for (batch,) in run.batches(TensorDataset(inputs), batch_size=12, shuffle=False):
                model(batch).sum().backward()
        return model

    models = run_group(script, workers)
    parts = inputs.chunk(workers)
    mean = 0.5 * torch.stack([part.mean(0) for part in parts]).mean(0)
    variance = 0.5 + 0.5 * torch.stack([part.var(0) for part in parts]).mean(0)
    for model in models:
        state = model.state_dict()
        torch.testing.assert_close(state["0.running_mean"], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state["0.running_var"], variance, rtol=1e-12, atol=1e-12)
        assert state["0.num_batches_tracked"] == 1
    assert equal_models(models)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_buffer_that_no_batch_changes_keeps_its_bits(workers: int) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = nn.Linear(5, 3).double()
            self.register_buffer("mask", torch.rand(5).double() / 3)
            self.register_buffer("seen", torch.zeros(5).double())
            self.mask: Tensor
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen = self.seen + x.mean(0)  # a new tensor each time
            out: Tensor = self.linear(x * self.mask)
            return out

    def script(join: Join) -> nn.Module:
        model = Masked()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=6, drop_last=True):
                train(model, optimizer, batch)
        return model

    plain, models = script(Plain), run_group(script, workers)
    for model in models:
        assert torch.equal(model.state_dict()["mask"], plain.state_dict()["mask"])
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    assert equal_models(models)


def test_dropout_masks_differ_between_workers() -> None:
    masks: list[Tensor] = []

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5)).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for inputs, _ in run.batches(DATA, batch_size=8):
                outputs = model(inputs)
                masks.append((outputs == 0).detach())
                optimizer.zero_grad()
                outputs.sum().backward()
                optimizer.step()
        return model

    models = run_group(script, 2)
    assert not torch.equal(masks[0], masks[1])
    assert equal_models(models)


def test_the_first_worker_has_the_dropout_masks_of_one_process() -> None:
    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
        optimizer = Adam(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.loader(DataLoader(DATA, batch_size=4, shuffle=True)):
                train(model, optimizer, batch)
        return model

    plain, (model,) = script(Plain), run_group(script, 1)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())


# ---- data ----


class FromProcesses(Dataset[Any]):
    """Samples that tell in which process they were loaded."""

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor, int]:
        info = get_worker_info()
        return *DATA[k], -1 if info is None else info.id

    def __len__(self) -> int:
        return len(DATA)


class OneOfTwo:
    """Rounds of a group of two, of which this worker is the second; after some rounds it is alone."""

    def __init__(self, alone_from: int) -> None:
        self.random = CommonRandom()
        self.alone_from = alone_from
        self.batch = -1

    def begin(self, dataset: Any, length: int, data: object, trains: bool) -> Pass:
        return Pass(PassId(0, 0), length, None, trains)

    def order(self, one: Pass, order: BatchOrder) -> Iterator[Any]:
        return order.begin(one.name)

    def draw(self, one: Pass) -> int | None:
        self.batch += 1
        return self.batch

    def end(self, one: Pass) -> None: ...

    def drew(self, one: Pass, batch: Any) -> Any:
        return batch

    def cut(self, one: Pass, batch: Sequence[int] | None, lengths: Sequence[int] = (), digest: int = 0) -> Part:
        if not batch:
            return Part((), is_over=True)
        first = 0 if self.batch >= self.alone_from else len(batch) // 2
        return Part(batch[first:], first, len(batch) - first, len(batch))


@pytest.mark.parametrize("alone_from, loaded_again", [(0, 0), (7, 1), (3, 4)])
def test_parts_are_loaded_ahead_and_again_if_they_change(alone_from: int, loaded_again: int) -> None:
    """Two processes load four parts ahead, of which all are wrong when the other worker is lost."""
    order = ShuffledOrder(26, 4, 0, drop_last=False)
    batches = SplitBatches(OneOfTwo(alone_from), FromProcesses(), order, 4, {"num_workers": 2})
    expected = [batch[0 if k >= alone_from else len(batch) // 2 :] for k, batch in enumerate(order.batches(0))]
    found, again = [], 0
    for inputs, _, processes in batches:
        found.append(inputs[:, 0].tolist())
        again += bool((processes < 0).all())
    assert found == [DATA.tensors[0][rows, 0].tolist() for rows in expected]
    assert again == loaded_again


def test_the_loader_has_the_length_and_the_attributes_of_a_data_loader() -> None:
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def script(join: Join) -> nn.Module:
        model = net()
        with join(model, SGD(model.parameters(), lr=0.1)) as run:
            batches = run.batches(DATA, batch_size=4)
            assert run.mean(torch.tensor(float(run.rank))) == 0.5  # before any batch
            share = [x for inputs, _ in run.eval_batches(DATA, batch_size=8) for x in inputs[:, 0].tolist()]
            seen[run.rank] += [share, len(batches), batches.dataset is DATA, batches.batch_size]
            seen[run.rank].append(len(run.batches(DATA, batch_size=4, drop_last=True)))
            seen[run.rank].append(len(run.loader(DataLoader(DATA, batch_size=5))))
            assert run.mean(float(run.rank), weight=1 + run.rank) == 2 / 3
        return model

    run_group(script, 2)
    assert sorted(seen[0][0] + seen[1][0]) == sorted(DATA.tensors[0][:, 0].tolist())
    assert seen[0][1:] == seen[1][1:] == [7, True, 4, 6, 6]


def test_parts_of_nested_batches() -> None:
    batch = {"x": torch.arange(4), "more": (torch.arange(8).view(4, 2), ["a", "b", "c", "d"]), "scale": torch.tensor(2)}
    assert batch_length(batch) == 4
    part = part_of(batch, [1, 2])
    assert part["x"].tolist() == [1, 2]
    assert part["more"][0].tolist() == [[2, 3], [4, 5]]
    assert part["more"][1] == ["b", "c"]
    assert part["scale"] == 2
    assert part_of(batch, [3, 0])["more"][1] == ["d", "a"]
    with pytest.raises(ValueError, match=r"the tensors of a batch have \[3, 4\] samples"):
        batch_length((torch.zeros(4), torch.zeros(3)))
    with pytest.raises(ValueError, match="has no tensor"):
        batch_length([1])


# ---- workers that miss updates, join, pause, or end the run ----


@pytest.mark.parametrize("workers", WORKERS)
def test_a_worker_that_skips_a_nan_receives_the_state_of_the_others(workers: int) -> None:
    """One sample is NaN: in one process its whole batch is skipped, here the part that has it."""
    skipped: Counter[int] = Counter()
    inputs, labels = DATA.tensors
    poisoned = TensorDataset(inputs.clone().index_fill_(0, torch.tensor([9]), math.nan), labels)
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = Adam(model.parameters(), lr=0.05)
        scheduler = StepLR(optimizer, 3, gamma=0.5)
        with join(model, optimizer) as run:
            run.register(scheduler)
            for _ in range(2):
                for x, y in run.batches(poisoned, batch_size=6):
                    loss = cross_entropy(model(x), y)
                    if torch.isnan(loss):
                        skipped[run.rank] += 1
                        continue
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
        assert scheduler.last_epoch == 10
        assert [p["lr"] for p in optimizer.param_groups] == [0.05 * 0.5**3]
        return model

    models = run_group(script, workers, group)
    assert equal_models(models)
    assert all(torch.isfinite(value).all() for value in models[0].state_dict().values())
    assert sum(skipped.values()) == 2
    assert group.view.transfers == 2 + workers - 1  # and the initial state


@pytest.mark.parametrize(("left_out", "batches"), [(0, 4), (1, 4), (2, 5), (3, 4)])
def test_a_part_that_is_left_out_adds_a_batch_only_if_the_next_one_is_the_last(left_out: int, batches: int) -> None:
    """The worker computes its part of the next batch with old parameters: it is moved to a later batch of the pass."""
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.05)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(TensorDataset(*DATA[:24]), batch_size=6)):
                if run.rank != 1 or number != left_out:
                    train(model, optimizer, batch)
        return model

    assert equal_models(run_group(script, 2, group))
    view = group.view
    assert (view.batches, view.applied, view.skipped) == (batches, 21, (("no backward pass", 3),))
    assert view.carried_over == (3 if left_out < 3 else 0)


@pytest.mark.parametrize("workers", WORKERS)
def test_leaving_out_a_batch_by_the_mean_loss_is_the_same_on_all_workers(workers: int) -> None:
    inputs, labels = DATA[:24]
    poisoned = TensorDataset(inputs.clone().index_fill_(0, torch.tensor([9]), math.nan), labels)
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.05)
        with join(model, optimizer) as run:
            for x, y in run.batches(poisoned, batch_size=6):
                loss = cross_entropy(model(x), y)
                if math.isnan(run.mean(loss)):
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model

    assert equal_models(run_group(script, workers, group))
    view = group.view
    assert (view.batches, view.applied, sum(dict(view.skipped).values()), view.carried_over) == (4, 18, 6, 0)


def test_the_gradient_of_the_remaining_parts_is_their_mean() -> None:
    """With integers, the mean over the samples that arrived is exact."""
    data = TensorDataset(torch.tensor([[1.0], [2.0], [3.0], [math.nan]]).double())
    gradients: list[float] = []

    def script(join: Join) -> nn.Module:
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = SGD(model.parameters(), lr=0.0)
        with join(model, optimizer) as run:
            for (x,) in run.batches(data, batch_size=4, shuffle=False):
                loss = model(x).mean()
                if torch.isnan(loss):
                    continue
                loss.backward()
                assert model.weight.grad is not None
                gradients.append(model.weight.grad.item())
        return model

    group = Group()
    run_group(script, 2, group)
    # the worker that skipped may run one more loop body before it receives the state: its gradient is set to zero
    assert sorted(gradients) in ([1.5], [0.0, 1.5])
    assert (group.view.applied, group.view.skipped) == (2, (("no backward pass", 2),))


def test_a_worker_that_joins_late_catches_up() -> None:
    """It does nothing in passes that are over, and its scheduler has the state of the others."""
    second_pass, ends = threading.Event(), []
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = Adam(model.parameters(), lr=0.05)
        per_pass, per_step = MultiStepLR(optimizer, [1, 2], gamma=0.5), StepLR(optimizer, 5, gamma=0.9)
        batches = 0
        with join(model, optimizer) as run:
            run.register(per_pass, per_step)
            loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=True)
            for epoch in run.epochs(3):
                if epoch == 1 and not second_pass.is_set():
                    second_pass.set()
                    group.wait(lambda: group.is_asked)
                for batch in run.loader(loader):
                    train(model, optimizer, batch)
                    per_step.step()
                    batches += 1
                per_pass.step()
        ends.append((batches, per_pass.last_epoch, per_step.last_epoch, optimizer.param_groups[0]["lr"]))
        return model

    models = run_group(script, 1, group, joins=[second_pass])
    assert len(models) == 2 and equal_models(models)
    assert sorted(ends) == [(14, 3, 21, ends[0][3]), (21, 3, 21, ends[0][3])]


def test_a_worker_pauses_and_returns() -> None:
    group = Group()
    parts: dict[int, list[int]] = {0: [], 1: []}
    ends: list[int] = []

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        per_pass = StepLR(optimizer, 100)
        with join(model, optimizer) as run:
            run.register(per_pass)
            for epoch in range(3):
                for number, batch in enumerate(run.batches(DATA, batch_size=4, drop_last=True)):
                    parts[run.rank].append(len(batch[0]))
                    train(model, optimizer, batch)
                    if run.rank == 1 and (epoch, number) == (0, 1):
                        with run.paused():
                            group.wait(lambda: group.view.epoch == 1)
                    if run.rank == 0 and (epoch, number) == (1, 0):
                        group.wait(lambda: group.is_asked)
                per_pass.step()
        ends.append(per_pass.last_epoch)
        return model

    models = run_group(script, 2, group)
    assert equal_models(models)
    assert ends == [3, 3]  # the pass in which it had paused was over in the state that it received
    assert group.view.transfers == 2  # the initial state, and that after the pause
    assert (group.view.applied, group.view.skipped, group.view.not_seen) == (72, (), 0)
    assert 4 in parts[0]  # while it was alone


def test_a_worker_that_returns_when_the_others_have_left_ends_in_good_order() -> None:
    group = Group()
    after_all = position(RoundId(LAST_EPOCH, 0), 0)

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with join(model, optimizer) as run:
            for epoch in range(2):
                for batch in run.batches(DATA, batch_size=4):
                    train(model, optimizer, batch)
                    if run.rank == 1 and not epoch:
                        with run.paused():
                            group.wait(lambda: positions()[0] == after_all)
        return model

    def positions() -> list[int]:
        assert group.memory is not None
        return [words.position for words in group.memory.words]

    assert equal_models(run_group(script, 2, group))
    assert max(positions()) < 1 << 63  # they are written as signed numbers of 64 bits


@pytest.mark.parametrize("workers", WORKERS)
def test_numbers_that_are_averaged_change_no_account(workers: int) -> None:
    """Also in a batch without an exchange of gradients, and after a pass."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for _ in range(2):
                for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                    if number % 2 == 0:
                        with run.no_sync():
                            assert run.mean(backward(model, batch)) > 0
                    else:
                        backward(model, batch)
                        optimizer.step()
                        optimizer.zero_grad()
                backward(model, DATA[:4])
                optimizer.zero_grad()
                run.mean(1.0)
        return model

    group = Group()
    run_group(script, workers, group)
    assert (group.view.applied, group.view.skipped, group.view.batches) == (52, (), 14)


@pytest.mark.parametrize("own", [False, True])
def test_one_worker_stops_the_run_for_all(own: bool) -> None:
    ends = []

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        number = 0
        with join(model, optimizer) as run:
            for number in range(100):
                if own:
                    train(model, optimizer, run.part(DATA.tensors))
                else:
                    for batch in run.batches(DATA, batch_size=26):
                        train(model, optimizer, batch)
                if run.rank == 1 and number == 3:
                    run.stop("converged")
                if run.stopped:
                    break
        ends.append((number, run.stopped))
        return model

    models = run_group(script, 2)
    assert equal_models(models)
    assert sorted(ends) == [(4, "another worker has stopped the run"), (4, "converged")]


@settings(max_examples=25)
@given(kills=st.dictionaries(st.integers(0, 2), st.integers(0, 60), max_size=2))
def test_killed_workers_leave_every_sample_counted_and_all_models_equal(kills: dict[int, int]) -> None:
    """Each sample adds its own unit vector to the parameters, so these count how often each one was applied."""
    samples = TensorDataset(torch.eye(16).double())
    epochs, group, ends = 2, Group(), []
    group.kills = dict(kills)

    def script(join: Join) -> nn.Module:
        model = nn.Linear(16, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = SGD(model.parameters(), lr=1.0)
        per_step = StepLR(optimizer, 1000)
        with join(model, optimizer) as run:
            run.register(per_step)
            for _ in range(epochs):
                for (x,) in run.batches(samples, batch_size=4):
                    optimizer.zero_grad()
                    (-model(x).sum() / len(x)).backward()
                    total = run.gradients.last_weight
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad *= total  # undo the mean: whole numbers
                    optimizer.step()
                    per_step.step()
        ends.append(per_step.last_epoch)
        return model

    models = run_group(script, 3, group)
    assert equal_models(models)
    assert len(set(ends)) <= 1
    applied = models[0].state_dict()["weight"].flatten()
    assert applied.sum() == group.view.applied
    assert applied.max() <= epochs
    assert applied.sum() + group.view.not_seen == 16 * epochs


# ---- loops that do something else ----


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_with_its_own_loader_averages_and_says_so(workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every worker draws its own batches: the result is that of one process with all of them."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs, labels = DATA.tensors
        with join(model, optimizer) as run:
            rows = slice(run.rank, 24, workers) if isinstance(run, SplitLoop) else slice(0, 24)
            for _ in range(4):
                train(model, optimizer, (inputs[rows], labels[rows]))
        return model

    plain, models = script(Plain), run_group(script, workers)
    assert equal_models(models)
    torch.testing.assert_close(models[0].state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    assert capsys.readouterr().err.count("every worker trains on all of the data") == 1


def test_numbers_of_the_first_worker_apply_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 2 and run.rank == 1:
                    optimizer.param_groups[0]["lr"] = 5.0
                train(model, optimizer, batch)
        assert optimizer.param_groups[0]["lr"] == 0.1
        return model

    models = run_group(script, 2)
    assert equal_models(models)
    assert capsys.readouterr().err.count("lr of an optimizer differs between workers") == 1


def steps(change: Any) -> Script:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                change(run, model, optimizer, batch)
        return model

    return script


def gradients_by_hand(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    loss = cross_entropy(model(batch[0]), batch[1])
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def forgotten_exchange(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    with run.no_sync():
        backward(model, batch)
    optimizer.step()


def weight_without_exchange(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.weight(3)
    with run.no_sync():
        backward(model, batch)


def new_parameters(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    train(model, optimizer, batch)
    model.add_module("head", nn.Linear(3, 3).double())


def negative_weight(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.weight(-1)


def state_of_a_number(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.register(3)


def sampler_of_ddp(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.loader(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)))


def loader_for_dataset(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.batches(DataLoader(DATA, batch_size=4))


def stream_without_loader(run: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.batches(iter(DATA), batch_size=4)


@pytest.mark.parametrize(
    "change, message",
    [
        (gradients_by_hand, "the gradient of 0.weight was not computed by loss.backward()"),
        (forgotten_exchange, "gradients of run.no_sync() that were not averaged"),
        (weight_without_exchange, "cannot be combined"),
        (new_parameters, "head.weight was added to the model or an optimizer after rainband.join"),
        (negative_weight, "run.weight(-1) must be 0 or more"),
        (state_of_a_number, "run.register needs objects with state_dict and load_state_dict, and int has none"),
        (sampler_of_ddp, "omit the DistributedSampler"),
        (loader_for_dataset, "for a DataLoader, iterate over run.loader(loader)"),
        (stream_without_loader, "has no length: make a DataLoader of it"),
    ],
)
def test_a_mistake_is_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        run_group(steps(change), 2)
    assert message in str(caught.value)


def test_wrapped_models_and_sparse_gradients_are_refused() -> None:
    class Ddp(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:  # without a process group
            nn.Module.__init__(self)

    for model, message in [
        (nn.Sequential(Ddp()), "the model is wrapped in Ddp, which exchanges gradients itself"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0 has sparse gradients"),
    ]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        with pytest.raises(ValueError) as caught:
            run_group(lambda join, m=model, o=optimizer: join(m, o), 1)  # type: ignore[misc]
        assert message in str(caught.value)


def test_a_failed_backward_pass_leaves_no_trace() -> None:
    """A user that catches the error of one batch (out of memory) goes on; that batch has no update."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise MemoryError("made by the test")

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, (x, y) in enumerate(run.batches(DATA, batch_size=4)):
                optimizer.zero_grad()
                hidden = model[:2](x)
                if number == 2:
                    hidden = Fails.apply(hidden)
                try:
                    cross_entropy(model[2](hidden), y).backward()
                except MemoryError:
                    continue
                optimizer.step()
        return model

    plain, models = script(Plain), run_group(script, 2)
    assert equal_models(models)
    torch.testing.assert_close(models[0].state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_an_order_is_the_same_for_any_number_of_workers() -> None:
    order = ShuffledOrder(26, 4, seed=3, drop_last=False)
    assert list(order.batches(1)) == list(order.batches(1)) != list(order.batches(2))
    assert sorted(k for batch in order.batches(0) for k in batch) == list(range(26))
    assert [len(batch) for batch in ShuffledOrder(26, 4, 3, True).batches(0)] == [4] * 6


# ---- parameters that the loop itself changes ----


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,), (1,)])
@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_that_differ_after_the_loop_has_changed_them_become_those_of_the_first_worker(
    workers: int, ranks: Sequence[int], steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for step, batch in enumerate(run.batches(DATA, batch_size=8)):
                train(model, optimizer, batch)
                if step == steps - 1 and run.rank in ranks:
                    nn.init.normal_(next(model.parameters()), mean=run.rank + 1.0)  # as other random numbers
        return model

    models = run_group(script, workers, group)
    assert equal_models(models)
    assert group.view.drifted == (workers - 1 if 0 in ranks else 1)
    assert capsys.readouterr().err.count("the parameters of a worker differed from those of the others") == 1


def test_an_equal_change_on_all_workers_moves_no_state() -> None:
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=8):
                train(model, optimizer, batch)
                with torch.no_grad():
                    next(model.parameters()).clamp_(-0.1, 0.1)
        return model

    assert equal_models(run_group(script, 2, group))
    assert group.view.drifted == 0


@pytest.mark.parametrize("workers", WORKERS)
def test_nan_in_a_batch_that_all_workers_skip_reaches_no_buffer(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = torch.randn(24, 5, generator=torch.Generator().manual_seed(2)).double()
    inputs[[3, 5, 9], 0] = math.nan  # in each worker's part of the first batch

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)).double()
        with join(model, SGD(model.parameters(), lr=0.0)) as run:
            for (batch,) in run.batches(TensorDataset(inputs), batch_size=12, shuffle=False):
                loss = model(batch).sum()
                if torch.isfinite(loss):
                    loss.backward()
        return model

    models = run_group(script, workers)
    assert equal_models(models)
    assert all(torch.isfinite(value).all() for value in models[0].state_dict().values())
    assert "NaN or infinity in the buffer running_mean" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_scaler_leaves_out_counts_as_skipped(workers: int, zero_first: bool, fused: bool) -> None:
    group = Group()
    data = TensorDataset(torch.cat([torch.full((8, 1), 1e38), torch.ones(18, 1)]), torch.zeros(26))
    steps: list[int] = []

    def script(join: Join) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=0.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        with join(model, optimizer) as run:
            for x, _ in run.batches(data, batch_size=4, shuffle=False):
                if zero_first:
                    optimizer.zero_grad()
                scaler.scale(model(x).sum() / len(x)).backward()
                scaler.step(optimizer)
                scaler.update()
                if not zero_first:
                    optimizer.zero_grad()
        steps.append(int(math.log2(2.0**16 / scaler.get_scale())))
        return model

    run_group(script, workers, group)
    assert set(steps) == {2}
    assert (group.view.applied, dict(group.view.skipped)) == (26 - 2 * 4, {NOT_FINITE: 2 * 4})


def test_gradients_on_an_accelerator_are_averaged_in_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here, so the copies stand for it: the result has the same bits."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=8):
                train(model, optimizer, batch)
        return model

    expected = run_group(script, 3)
    monkeypatch.setattr(average, "is_elsewhere", lambda tensor: True)
    assert equal_models([*run_group(script, 3), expected[0]])


def test_a_loop_that_raises_after_a_step_counts_its_batch() -> None:
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError), join(model, optimizer) as run:
            for step, batch in enumerate(run.batches(DATA, batch_size=4)):
                train(model, optimizer, batch)
                if step == 2:
                    raise ZeroDivisionError
        return model

    assert equal_models(run_group(script, 2, group))
    assert group.view.applied == 2 * 4
    assert {exchange.last_view.applied for exchange in group.exchanges.values()} == {3 * 4}


def test_many_long_reasons_for_skipped_batches_are_counted_in_bounded_space() -> None:
    group = Group()

    def script(join: Join) -> nn.Module:
        model = net()
        with join(model, SGD(model.parameters(), lr=0.1)) as run:
            for number, _ in enumerate(run.batches(DATA, batch_size=1)):
                run.skip(f"sample {number} is damaged: {'x' * 100_000}")
        return model

    run_group(script, 2, group)
    skipped = dict(group.view.skipped)
    assert (len(skipped), sum(skipped.values()), skipped["other reasons"]) == (17, 26, 10)
    assert max(map(len, skipped)) == 200
