"""Custom training loops whose workers train models of their own: `rainband run --strategy averaging train.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.plugins import load_strategy, strategy_names
from rainband.protocol.accounting import NOT_FINITE
from rainband.runtimes.configure import check_custom_loop
from rainband.runtimes.training_loop.local_steps import LocalStepsLoop
from rainband.strategies.averaging.adaptive_period import AdaptivePeriod
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.averaging.one_shot import OneShot
from rainband.strategies.single import Single
from rainband.strategy import Strategy
from rainband.transports.shared_rounds import RoundsMemory
from rainband.worker.model_rounds import LEFT_OUT_BY_LOOP
from tests.one_process import OneProcess, joined
from tests.processes import RunLauncher
from tests.test_run_script import Told
from tests.test_training_loop import DATA, net

AVERAGING = ["--strategy", "averaging", "--workers", "2"]


class Alone(OneProcess):
    """The membership of the only worker of a run in rounds."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy, num_servers=0)
        self.coordinator = Coordinator(RunSettings(num_workers=1, num_servers=0, seed=0), strategy)
        self.memory = RoundsMemory(1)
        self.round_files = self.memory.fds


@contextmanager
def joined_alone(model: Any, optimizer: Any, member: Alone) -> Iterator[LocalStepsLoop]:
    try:
        with LocalStepsLoop(model, [optimizer], member) as run:
            yield run
    finally:
        member.memory.close()


def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    inputs, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


def trained(join: Callable[..., Any], member: OneProcess, make: Callable[..., Optimizer], workers: int = 0) -> Any:
    """Train for three passes, with a learning-rate schedule; return the parameters and the batches, by their sums."""
    model, seen = net(), []
    optimizer = make(model.parameters())
    scheduler = StepLR(optimizer, 1, 0.5)
    with join(model, optimizer, member) as run:
        for _ in run.epochs(3):
            for batch in run.batches(DATA, batch_size=4, num_workers=workers):
                seen.append(float(batch[0].sum()))
                step(model, optimizer, batch)
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()], seen


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=0.01)])
@pytest.mark.parametrize("strategy", [Averaging(period=4), Averaging(period=4, state="average"), OneShot()])
def test_one_worker_makes_the_steps_of_one_process(make: Any, strategy: Strategy) -> None:
    alone = Alone(strategy)
    ours, seen = trained(joined_alone, alone, make)
    plain, of_plain = trained(joined, OneProcess(Single(), num_servers=0), make)
    assert seen == of_plain and len(seen) == 18
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)
    assert (alone.accounting.applied, alone.accounting.batches) == (18, 18)


@pytest.mark.parametrize("strategy", [Averaging(period=4), Averaging(period=4, state="average"), Single()])
def test_an_optimizer_that_calls_its_closure_again_makes_the_steps_of_plain_pytorch(strategy: Strategy) -> None:
    def minimize(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    calls, batches, ours, plain = list[int](), list[Any](), net(), net()
    optimizer, of_plain = (LBFGS(model.parameters(), lr=0.5, max_iter=3) for model in (ours, plain))
    member = Alone(strategy) if strategy.requires.local_steps else OneProcess(strategy, num_servers=0)
    join: Any = joined_alone if strategy.requires.local_steps else joined
    with join(ours, optimizer, member) as run:
        for _ in run.epochs(2):
            for batch in run.batches(DATA, batch_size=4):
                batches.append(batch)
                minimize(ours, optimizer, batch)
    evaluated = len(calls)
    for batch in batches:
        minimize(plain, of_plain, batch)
    assert len(batches) == 12 and evaluated == len(calls) - evaluated > 12
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_processes_of_a_loader_fetch_the_same_batches() -> None:
    make = lambda p: SGD(p, lr=0.1)  # noqa: E731
    (one, fetched), (other, seen) = (trained(joined_alone, Alone(Averaging(period=4)), make, n) for n in (1, 0))
    assert fetched == seen
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_batches_that_the_loop_leaves_out_are_counted() -> None:
    alone, model = Alone(Averaging(period=4)), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined_alone(model, optimizer, alone) as run:
        for _ in run.epochs(2):
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 2:
                    run.skip("too easy")
                elif number == 3:
                    continue
                else:
                    step(model, optimizer, batch)
    accounting = alone.accounting
    assert (accounting.applied, accounting.skipped) == (8, {LEFT_OUT_BY_LOOP: 4})


def test_a_gradient_that_is_not_finite_is_skipped_and_changes_nothing() -> None:
    alone, model = Alone(Averaging(period=4)), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined_alone(model, optimizer, alone) as run:
        for _ in run.epochs(1):
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                before = [p.detach().clone() for p in model.parameters()]
                step(model, optimizer, (batch[0] * (float("nan") if number == 1 else 1.0), batch[1]))
                unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                assert unchanged is (number == 1)
    assert (alone.accounting.applied, alone.accounting.skipped) == (5, {NOT_FINITE: 1})


def test_a_loop_that_ends_early_leaves_the_rest_to_others() -> None:
    alone, model = Alone(Averaging(period=4)), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined_alone(model, optimizer, alone) as run:
        for _ in run.epochs(2):
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                step(model, optimizer, batch)
                if number == 1:
                    break
            break
    assert (alone.accounting.applied, alone.accounting.not_processed) == (2, 10)


def test_adaptive_period_follows_the_loss_that_the_loop_reports() -> None:
    alone, model = Alone(AdaptivePeriod(period=2, interval=2)), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined_alone(model, optimizer, alone) as run:
        for _ in run.epochs(1):
            for inputs, labels in run.batches(DATA, batch_size=4):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                run.log(loss=loss)
                optimizer.step()
        models = run.coroutine.worker.models
    assert models.loss > 0 and models.shared["first_loss"] > 0


def refused(use: Callable[[LocalStepsLoop, nn.Module, Optimizer], None], strategy: Strategy) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined_alone(model, optimizer, Alone(strategy)) as run:
        use(run, model, optimizer)


def pauses(run: LocalStepsLoop, model: nn.Module, optimizer: Optimizer) -> None:
    with run.paused():
        raise AssertionError("it is refused before")


def has_no_number_of_epochs(run: LocalStepsLoop, model: nn.Module, optimizer: Optimizer) -> None:
    next(iter(run.batches(DATA, batch_size=4)))


def has_its_own_loader(run: LocalStepsLoop, model: nn.Module, optimizer: Optimizer) -> None:
    step(model, optimizer, (torch.zeros(4, 5), torch.zeros(4, dtype=torch.long)))


def accumulates(run: LocalStepsLoop, model: nn.Module, optimizer: Optimizer) -> None:
    for _ in run.epochs(1):
        for inputs, labels in run.batches(DATA, batch_size=4):
            cross_entropy(model(inputs), labels).backward()


def reports_no_loss(run: LocalStepsLoop, model: nn.Module, optimizer: Optimizer) -> None:
    for _ in run.epochs(1):
        for batch in run.batches(DATA, batch_size=4):
            step(model, optimizer, batch)


@pytest.mark.parametrize(
    ("use", "strategy", "told"),
    [
        (pauses, Averaging(), "the other workers wait for this one at each mean"),
        (has_no_number_of_epochs, Averaging(), r"needs the number of epochs: write `for epoch in run.epochs\(10\):`"),
        (has_its_own_loader, Averaging(), "requires a new batch of run.batches"),
        (accumulates, Averaging(), "requires one step per batch"),
        (reports_no_loss, AdaptivePeriod(), r"follows the loss: call run.log\(loss=loss\) before each optimizer.step"),
    ],
)
def test_what_would_have_another_meaning_is_refused(use: Any, strategy: Strategy, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        refused(use, strategy)


def test_every_strategy_runs_in_a_loop_or_says_why_not() -> None:
    works, refusals = [], {}
    for name in strategy_names():
        try:
            check_custom_loop(name, load_strategy(name, {}).requires)
            works.append(name)
        except ValueError as error:
            refusals[name] = str(error)
    assert {"averaging", "one_shot", "block_momentum", "adaptive_period", "diloco", "gossip", "elastic"} < set(works)
    assert {"sync", "all_reduce", "downpour", "single"} < set(works)
    assert sorted(refusals) == ["async_gossip", "conjugate_gradient", "hogwild", "pipedream", "sandblaster"]
    for name, told in refusals.items():
        assert told.startswith(f"{name} does not work in a custom training loop, because ") and ": use " in told


# ---- processes ----


def accounts(told: Told) -> tuple[int, int, int, int]:
    found = told.json["accounting"]
    return found["applied"], found["batches"], found["lost"], found["applied_twice"]


@pytest.mark.processes
def test_two_workers_average_and_have_the_same_model(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(launcher, tmp_path, [*AVERAGING, "period=7", "train.py"], optimizer="torch.optim.Adafactor")
    assert told.exit_code == 0, told.err
    assert accounts(told) == (40, 40, 0, 0)
    assert len(told.sums) == 2 and told.sums[0] == told.sums[1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_period_of_one_is_sync_with_a_batch_for_each_worker(launcher: RunLauncher, tmp_path: Path) -> None:
    sums = []
    for name, words in (
        ("averaging", [*AVERAGING, "period=1"]),
        ("sync", ["--strategy", "sync", "--servers", "1", "--workers", "2", "batch_per_worker=true"]),
    ):
        (folder := tmp_path / name).mkdir()
        sums.append(Told(launcher, folder, [*words, "train.py"]).sums[0])
    assert sums[0] == pytest.approx(sums[1], abs=2e-6)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gossip", "block_momentum", "diloco", "one_shot", "elastic", "all_reduce"])
def test_the_others_work_in_a_loop_too(strategy: str, launcher: RunLauncher, tmp_path: Path) -> None:
    servers = ["--servers", "1"] if strategy == "elastic" else []
    told = Told(launcher, tmp_path, ["--strategy", strategy, "--workers", "2", *servers, "train.py"])
    assert told.exit_code == 0, told.err
    assert told.json["accounting"]["lost"] == 0 and told.json["accounting"]["applied_twice"] == 0
    assert len(told.sums) == 2 and told.sums[0] == told.sums[1]


@pytest.mark.processes
def test_when_a_worker_is_killed_the_others_repeat_its_batches(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(
        launcher,
        tmp_path,
        ["--strategy", "averaging", "--workers", "3", "period=3", "train.py"],
        inside="if run.rank == 1 and epoch == 1: __import__('os').kill(__import__('os').getpid(), 9)",
    )
    assert told.exit_code == 0, told.err
    assert accounts(told) == (40, 40, 0, 0)
    assert len(told.sums) == 2 and told.sums[0] == told.sums[1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_worker_that_stops_the_run_stops_all_after_the_same_round(launcher: RunLauncher, tmp_path: Path) -> None:
    told = Told(
        launcher,
        tmp_path,
        [*AVERAGING, "period=3", "train.py"],
        inside="if run.rank == 1 and run.progress > 0.3: run.stop('converged')",
    )
    applied, batches, lost, twice = accounts(told)
    assert (batches, lost, twice) == (40, 0, 0) and 0 < applied < 40
    assert len(told.sums) == 2 and told.sums[0] == told.sums[1]
