"""Batches that a custom loop draws and does not step on: training is as in plain PyTorch, and they count as skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from rainband.strategies.bounded_delay import BoundedDelay
from rainband.strategies.downpour import Downpour
from rainband.strategies.soft_sync import SoftSync
from rainband.strategies.stale_sync import StaleSync
from rainband.strategies.sync import Sync
from rainband.strategy import Strategy
from tests.one_process import PLAIN, OneProcess, joined, run_workers
from tests.test_training_loop import DATA, Join, backward, net, same_as_plain, train

Batches = Any
BOTH = pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])


def by_break(batches: Batches, model: nn.Module, optimizer: Optimizer) -> None:
    for number, batch in enumerate(batches):
        if number == 2:
            break
        train(model, optimizer, batch)


def by_zip(batches: Batches, model: nn.Module, optimizer: Optimizer) -> None:
    for batch, _ in zip(batches, range(2), strict=False):
        train(model, optimizer, batch)


def by_iterator(batches: Batches, model: nn.Module, optimizer: Optimizer) -> None:
    """It is left open, and closed after the next pass has begun."""
    left_open.append(iter(batches))
    for _ in range(2):
        train(model, optimizer, next(left_open[-1]))
    next(left_open[-1])
    del left_open[:-1]


left_open: list[Any] = []


@BOTH
@pytest.mark.parametrize("leave", [by_break, by_zip, by_iterator])
def test_a_batch_drawn_when_the_loop_is_left_is_skipped(leave: Callable[..., None], strategy: Any) -> None:
    """Two steps in each of three passes: the third batch of each is drawn only."""
    member = OneProcess(strategy)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, member) as run:
        for _ in range(3):
            leave(run.batches(DATA, batch_size=2), model, optimizer)
    left_open.clear()
    accounting = member.accounting
    assert (accounting.applied, accounting.skipped) == (6, {"never stepped on": 3})
    assert member.num_pushed == 6


@BOTH
@pytest.mark.parametrize("when", ["before zero_grad", "after zero_grad", "after backward"])
def test_a_loop_that_leaves_out_what_is_not_finite(when: str, strategy: Any) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
                bad = number in (0, 3)
                if bad and when == "before zero_grad":
                    continue
                optimizer.zero_grad()
                if bad and when == "after zero_grad":
                    continue
                cross_entropy(model(inputs * math.inf if bad else inputs), labels).backward()
                if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                    continue
                optimizer.step()
        return model

    accounting = same_as_plain(script, pushes=4, strategy=strategy).accounting
    reason = "not finite" if when == "after backward" else "never stepped on"
    assert (accounting.applied, accounting.skipped) == (4, {reason: 2})


def test_a_left_out_batch_between_accumulated_ones_is_skipped_alone() -> None:
    """Steps of batches 0 and 1, of 3, and of 4 and 5."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 2:
                    continue
                backward(model, batch)
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    member = same_as_plain(script, pushes=3)
    assert [sum(len(r) for r in push.push_id) for push in member.pushes if not push.skip] == [2, 1, 2]
    assert (member.accounting.applied, member.accounting.skipped) == (5, {"never stepped on": 1})


def test_a_step_before_the_backward_pass_of_a_batch_does_not_count_that_batch() -> None:
    """Steps of batches 0 and 1, and of 2 and 3, each at the beginning of the next turn; the last two are left over."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number and number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                backward(model, batch)
        return model

    member = same_as_plain(script, pushes=2)
    first = [[(r.portion, r.first) for r in push.push_id] for push in member.pushes if not push.skip]
    assert first == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    assert (member.accounting.applied, member.accounting.skipped) == (4, {"never stepped on": 2})


def test_a_step_after_a_pass_that_was_left_counts_its_last_batch() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            batch = next(iter(run.batches(DATA, batch_size=4)))
            for _ in range(3):  # to see whether the model can learn one batch
                train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=3).accounting
    assert (accounting.applied, accounting.untracked_pushes, accounting.skipped) == (1, 2, {})


@BOTH
def test_a_scaler_that_leaves_out_a_step_of_a_loop_that_zeroes_gradients_last(strategy: Any) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with join(model, optimizer) as run:
            for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
                loss = cross_entropy(model(inputs), labels) * (math.inf if number in (2, 5) else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=number < 3)
        return model

    accounting = same_as_plain(script, pushes=4, strategy=strategy).accounting
    assert (accounting.applied, accounting.skipped) == (4, {"never stepped on": 2})


def test_two_passes_at_once_are_refused_and_batches_fetched_ahead_keep_their_ids() -> None:
    numbered = TensorDataset(torch.arange(12.0).reshape(12, 1))
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    member = OneProcess()
    seen: list[float] = []

    def step(batch: Any) -> None:
        seen.append(batch[0].item())
        model(batch[0]).sum().backward()
        optimizer.step()

    with joined(model, optimizer, member) as run:
        first = iter(run.batches(numbered, batch_size=1, num_workers=1))
        step(next(first))
        second = iter(run.batches(numbered, batch_size=1, num_workers=1))
        step(next(second))
        with pytest.raises(ValueError, match="iterate over one pass at a time"):
            next(first)
        for _ in range(10):
            step(next(second))
    assert sorted(seen) == list(range(12))
    assert (member.accounting.applied, member.accounting.skipped) == (12, {})


@pytest.mark.parametrize("left_out", [{3}, {0, 3}, {1, 2, 3}], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        Sync(batch_per_worker=True),
        Downpour(),
        SoftSync(),
        StaleSync(bound=0),
        StaleSync(),
        StaleSync(n_push=2),
        BoundedDelay(tau=1),
    ],
    ids=["sync", "downpour", "soft_sync", "lock-step", "stale_sync", "two steps per push", "bounded_delay"],
)
def test_one_of_two_workers_may_leave_out_batches(strategy: Strategy, left_out: set[int]) -> None:
    """Also the last one of a pass: what others have made of the parameters meanwhile is no change by the loop."""
    member = OneProcess(strategy, num_workers=2)
    expected = 0

    def script(worker: OneProcess) -> None:
        nonlocal expected
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01)
        with joined(model, optimizer, worker) as run:
            for _ in run.epochs(3):
                for number, batch in enumerate(run.batches(DATA, batch_size=3)):
                    if worker.index == 0 and number in left_out:
                        expected += 1
                        continue
                    train(model, optimizer, batch)

    run_workers(member, script)
    accounting = member.accounting
    assert expected
    assert accounting.skipped == {"never stepped on": expected}
    assert accounting.applied == 3 * 8 - expected
    assert not member.coordinator.reporting.staleness().broken
