"""A custom training loop, joined by one worker that waits for its pushes, equals plain PyTorch in common patterns."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from rainband.errors import ServerLost
from rainband.join import join as public_join
from rainband.protocol.lr_schedules import Schedule
from rainband.protocol.messages import Halt, Peer
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.rules import ApplyOnArrival
from rainband.runtimes.training_loop.loop import TrainingLoop
from rainband.runtimes.training_loop.single_process import SingleProcessLoop
from rainband.strategies.downpour import Downpour
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from rainband.strategy import Requirements, ServerPart, Strategy, Worker
from tests.lion import Lion
from tests.one_process import PLAIN, OneProcess, joined

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))  # six batches of four
Join = Callable[[Any, Any], Any]
Script = Callable[[Join], nn.Module]  # what a user writes


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = backward(model, batch)
    optimizer.step()
    return loss


def same_as_plain(script: Script, pushes: int, strategy: Any = PLAIN) -> OneProcess:
    """Run the script alone and joined; the models must be equal, and `pushes` gradients pushed."""
    plain = script(lambda model, optimizer: SingleProcessLoop())
    member = OneProcess(strategy)
    shared = script(lambda model, optimizer: joined(model, optimizer, member))
    for (name, a), b in zip(plain.state_dict().items(), shared.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert member.num_pushed == pushes
    assert (
        member.accounting.applied + sum(member.accounting.skipped.values())
        == member.accounting.batches - member.accounting.not_processed
    )
    return member


# ---- everyday patterns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
def test_three_lines_are_enough(strategy: Any) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with join(model, optimizer) as run:
            for _ in range(2):
                for batch in run.batches(DATA, batch_size=4):
                    train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=12, strategy=strategy).accounting
    assert (accounting.batches, accounting.applied, accounting.not_processed, accounting.untracked_pushes) == (
        12,
        12,
        0,
        0,
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_schedule_made_before_or_after_joining(when: str) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 2, gamma=0.1) if when == "before" else None
        with join(model, optimizer) as run:
            scheduler = scheduler or StepLR(optimizer, 2, gamma=0.1)
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                scheduler.step()
        return model

    member = same_as_plain(script, pushes=6)
    assert [bool(push.groups) for push in member.pushes] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]  # the first says how it begins


def test_a_one_cycle_schedule_that_moves_rate_and_momentum() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=7)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                scheduler.step()
        return model

    same_as_plain(script, pushes=6)


def test_a_schedule_that_looks_at_the_loss() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                scheduler.step(train(model, optimizer, batch).item())
        return model

    same_as_plain(script, pushes=6)


def test_two_groups_with_schedules_of_their_own() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        groups = [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": 0.05, "note": "head"},
        ]
        optimizer = SGD(groups, lr=0.1, weight_decay=0.01)
        scheduler = LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1.1**n])
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                scheduler.step()
        return model

    same_as_plain(script, pushes=6)


def test_a_learning_rate_that_is_a_tensor() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                optimizer.param_groups[0]["lr"] *= 0.5
        return model

    same_as_plain(script, pushes=6)


def test_clipping_the_gradients() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                optimizer.zero_grad()
                backward(model, batch)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
        return model

    same_as_plain(script, pushes=6)


def test_accumulating_gradients_over_four_batches_with_a_rest() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for _ in run.epochs(1):
                for number, batch in enumerate(run.batches(DATA, batch_size=4), 1):
                    backward(model, batch)
                    if number % 4 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                optimizer.step()  # the two that are left
        return model

    member = same_as_plain(script, pushes=2)
    named = [[(r.portion, r.first, r.last) for r in push.push_id] for push in member.pushes]
    assert named == [
        [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)],
        [(4, 0, 1), (5, 0, 1)],
    ]  # over portion ends
    assert member.accounting.applied == 6


def test_mixed_precision_on_the_cpu() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for inputs, labels in run.batches(DATA, batch_size=4):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
        return model

    same_as_plain(script, pushes=6)


@pytest.mark.parametrize("told", [False, True])
def test_a_batch_that_the_loop_leaves_out_is_skipped_whether_it_says_so_or_not(told: bool) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 2:
                    if told:
                        run.skip()
                    continue
                train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=5).accounting
    assert (accounting.applied, accounting.skipped) == (5, {"skipped by the loop" if told else "never stepped on": 1})


def test_breaking_out_early() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 3:
                    break
                train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=3).accounting
    assert (accounting.applied, accounting.skipped, accounting.not_processed) == (3, {"never stepped on": 1}, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluating_in_the_middle_sees_what_the_last_step_made(mode: Any) -> None:
    seen: list[list[float]] = []

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        losses = []
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                model.eval()
                with mode():
                    losses.append(cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).item())
                model.train()
        seen.append(losses)
        return model

    same_as_plain(script, pushes=6)
    same_as_plain(script, pushes=6, strategy=Sync(batch_per_worker=True))
    assert seen[1] == pytest.approx(seen[0]) and seen[3] == pytest.approx(seen[0])


def test_a_loader_of_ones_own_is_counted_by_its_pushes() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer):
            for batch in DataLoader(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    member = same_as_plain(script, pushes=6)
    assert all(push.push_id == () for push in member.pushes)
    assert (member.accounting.batches, member.accounting.untracked_pushes, member.accounting.not_processed) == (0, 6, 0)


def test_a_closure() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):

                def closure(batch: Any = batch) -> Tensor:
                    optimizer.zero_grad()
                    return backward(model, batch)

                loss = optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)
                assert loss is not None and loss > 0
        return model

    same_as_plain(script, pushes=6)


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True), Single()], ids=["downpour", "sync", "single"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_whose_third_step_is_infinite(fused: bool, strategy: Any) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with join(model, optimizer) as run:
            for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels) * (math.inf if number == 2 else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return model

    pushes = 0 if isinstance(strategy, Single) else 5
    accounting = same_as_plain(script, pushes=pushes, strategy=strategy).accounting
    assert (accounting.applied, accounting.skipped) == (5, {"not finite": 1})


def test_a_head_that_never_gets_a_gradient_stays_as_it_is() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = net(), nn.Linear(7, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.body(inputs)
            return result

    def script(join: Join) -> nn.Module:
        model = TwoHeads()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    same_as_plain(script, pushes=6)


@pytest.mark.parametrize("before", [True, False], ids=["freezing", "unfreezing"])
def test_freezing_and_unfreezing_midway(before: bool) -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        model[0].requires_grad_(before)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 3:
                    model[0].requires_grad_(not before)
                train(model, optimizer, batch)
        return model

    same_as_plain(script, pushes=6)


def test_frozen_parameters_are_not_sent() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    member = same_as_plain(script, pushes=6)
    assert member.pushed_numel == 6 * (3 * 7 + 3)  # of 66: the weight and the bias of the last layer


def test_a_subclass_that_calls_the_step_of_its_parent() -> None:
    class Talkative(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer: SGD = Talkative(model.parameters(), lr=0.1) if join is not alone else SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    def alone(model: Any, optimizer: Any) -> SingleProcessLoop:
        return SingleProcessLoop()

    member = OneProcess(Averaging())  # which leaves the step to the worker: a server could not import the class
    shared = script(lambda model, optimizer: joined(model, optimizer, member))
    assert equal(shared, script(alone))
    assert member.num_pushed == 6


def test_hooks_of_ones_own_run_once_and_may_change_the_gradients() -> None:
    calls: list[str] = []

    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("before")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def see(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("after" if optimizer.param_groups[0]["params"][0].grad is not None else "too early")

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(see)
        with join(model, optimizer) as run:
            optimizer.register_step_pre_hook(halve)
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    same_as_plain(script, pushes=6)
    assert calls == ["before", "after"] * 12


def test_an_average_of_the_weights_beside_the_model() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                average.update_parameters(model)
        return average

    same_as_plain(script, pushes=6)
    same_as_plain(script, pushes=6, strategy=Sync(batch_per_worker=True))


def test_a_compiled_model() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        compiled = torch.compile(model, backend="eager")
        optimizer = SGD(compiled.parameters(), lr=0.1)
        with join(compiled, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(compiled, optimizer, batch)
        return model

    same_as_plain(script, pushes=6)


def test_gradients_that_are_zeroed_in_place_and_read_after_the_step() -> None:
    norms: list[list[float]] = []

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                optimizer.zero_grad(set_to_none=False)
                backward(model, batch)
                optimizer.step()
                seen.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
        norms.append(seen)
        return model

    same_as_plain(script, pushes=6)
    assert norms[1] == pytest.approx(norms[0]) and all(norms[0])


def test_two_steps_on_one_batch_are_a_step_and_an_extra() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=12).accounting
    assert (accounting.applied, accounting.untracked_pushes) == (6, 6)


def test_two_optimizers_of_one_class() -> None:
    """As a GAN has them: each steps on its own part, although gradients of the other's lie about."""

    def script(join: Join) -> nn.Module:
        model = net()
        first, second = Adam(model[0].parameters(), lr=0.01), Adam(model[2].parameters(), lr=0.02)
        with join(model, [first, second]) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, first, batch)
                train(model, second, batch)
        return model

    assert same_as_plain(script, pushes=12).accounting.untracked_pushes == 6


def test_sixteen_bit_parameters_keep_small_steps_on_the_servers() -> None:
    model = net().bfloat16()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = SGD(model.parameters(), lr=1e-4)
    with joined(model, optimizer, OneProcess()):
        for _ in range(100):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    for before, parameter in zip(
        start, model.parameters(), strict=True
    ):  # 100 steps of 0.0001, which bfloat16 rounds away
        torch.testing.assert_close(parameter.detach(), before - 0.01, atol=2e-3, rtol=0)


# ---- the optimizer's state comes along, and back --------------------------------------------------------------------


def halves(parameters: Any, first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Two parameter groups with settings of their own."""
    everyone = list(parameters)
    return [{"params": everyone[:2], **first}, {"params": everyone[2:], **second}]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum in the second group": lambda p: SGD(halves(p, {}, {"momentum": 0.9}), lr=0.1),
    "momentum in the first group": lambda p: SGD(halves(p, {"momentum": 0.9}, {}), lr=0.1),
    "amsgrad in the second group": lambda p: Adam(halves(p, {}, {"amsgrad": True}), lr=0.01),
    "centered in the second group": lambda p: torch.optim.RMSprop(
        halves(p, {"momentum": 0.5}, {"centered": True}), lr=0.01
    ),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "lion": lambda p: Lion(p, lr=0.01),
}


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_plain_steps_four_joined_and_three_plain_equal_ten_plain(kind: str, strategy: Any) -> None:
    batches = [DATA[4 * i % 24 : 4 * i % 24 + 4] for i in range(6)] * 2

    def ten(join: Join) -> tuple[nn.Module, Optimizer]:
        model = net()
        model.append(nn.LayerNorm(3))
        model.scale = nn.Parameter(torch.tensor(1.0))  # of no dimension, and without a gradient
        optimizer = OPTIMIZERS[kind](model.parameters())
        for batch in batches[:3]:
            train(model, optimizer, batch)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number < 4:
                    train(model, optimizer, batch)
                else:
                    run.skip()
        for batch in batches[3:6]:
            train(model, optimizer, batch)
        return model, optimizer

    plain, plain_optimizer = ten(lambda model, optimizer: SingleProcessLoop())
    member = OneProcess(strategy)
    member.optimizers = ("tests.lion:Lion",)
    shared, optimizer = ten(lambda model, optimizer: joined(model, optimizer, member))
    assert equal(plain, shared)
    a, b = plain_optimizer.state_dict(), optimizer.state_dict()
    assert b["param_groups"] == a["param_groups"]
    assert b["state"].keys() == a["state"].keys()
    for entry, expected in zip(b["state"].values(), a["state"].values(), strict=True):
        assert entry.keys() == expected.keys()
        for name, value in entry.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, rtol=1e-6, atol=2e-7) for x, y in pairs)


def test_channels_last_weights_keep_their_state_in_place() -> None:
    images = TensorDataset(torch.randn(8, 3, 4, 4), torch.randint(0, 2, (8,)))

    def script(join: Join) -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
        optimizer = Adam(model.parameters(), lr=0.01)
        train(model, optimizer, images[:])
        with join(model, optimizer) as run:
            for batch in run.batches(images, batch_size=4):
                train(model, optimizer, batch)
        train(model, optimizer, images[:])
        return model

    same_as_plain(script, pushes=2)


def test_saving_the_optimizer_inside_the_loop_saves_what_the_servers_have() -> None:
    model, plain = net(), net()
    optimizer, ours = Adam(model.parameters(), lr=0.01), Adam(plain.parameters(), lr=0.01)
    with joined(model, optimizer, OneProcess()) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
            train(plain, ours, batch)
            assert optimizer.state_dict()["state"][0]["step"] == ours.state_dict()["state"][0]["step"]
        with pytest.raises(ValueError, match="before rainband.join"):
            optimizer.load_state_dict(ours.state_dict())
    assert equal(model, plain)
    copied = copy.deepcopy(optimizer)
    assert not copied._optimizer_step_pre_hooks


# ---- what travels ---------------------------------------------------------------------------------------------------


def test_sums_of_three_steps_are_pushed_and_the_rest_at_the_end() -> None:
    model, plain = net(), net()
    optimizer, ours = SGD(model.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    member = OneProcess(Downpour(n_push=4, overlap=False))
    with joined(model, optimizer, member) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=4)):
            if number % 4 == 0:
                ours.zero_grad()
            optimizer.zero_grad(set_to_none=False)  # which must not touch what the strategy keeps
            backward(model, batch)
            optimizer.step()
            backward(plain, batch)
            if number in (3, 5):
                ours.step()
    assert equal(model, plain)
    assert [sum(len(r) for r in push.push_id) for push in member.pushes] == [4, 2]


def test_a_step_that_waits_for_a_second_one_is_pushed_when_there_are_no_more_batches() -> None:
    """No other worker would get this batch: its owner would wait for another batch, and all for the end."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    member = OneProcess(Downpour(n_push=2))
    with joined(model, optimizer, member) as run:
        for _ in run.epochs(1):
            for batch in run.batches(DATA, batch_size=5):  # five batches
                train(model, optimizer, batch)
    assert [sum(len(r) for r in push.push_id) for push in member.pushes] == [2, 2, 1]
    assert member.accounting.applied == 5


def test_a_loop_may_tell_its_loss_to_those_who_watch() -> None:
    member = OneProcess()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, member) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=16)):  # 16 samples and 8
            train(model, optimizer, batch)
            run.log(loss=torch.tensor(1.0 if number == 0 else 4.0, requires_grad=True))
            if number == 0:
                assert (run.client.stats.loss_sum, run.client.stats.loss_samples) == (16.0, 16)
        heartbeat = run.client.stats.heartbeat()
    assert (heartbeat.loss, heartbeat.loss_samples) == (2.0, 24)
    SingleProcessLoop().log(loss=1.0)  # where nobody watches


def test_an_infinite_gradient_is_skipped_without_servers_too() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    member = OneProcess(Single())
    with joined(model, optimizer, member) as run:
        for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
            train(model, optimizer, (inputs * math.inf if number == 2 else inputs, labels))
    assert (member.accounting.applied, member.accounting.skipped) == (5, {"not finite": 1})
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("replaced", [lambda model: model, lambda model: model[-1]], ids=["all", "one layer"])
def test_a_model_whose_parameters_were_replaced_is_reported(replaced: Callable[[nn.Module], nn.Module]) -> None:
    """All of them are noticed at the next step, some of them at the fourth, which is a power of two."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ValueError, match="other Parameter objects than at join.*without assign=True"),
        joined(model, optimizer, OneProcess(PLAIN)) as run,
    ):
        for number, batch in enumerate(run.batches(DATA, batch_size=4)):
            if number == 2:
                part = replaced(model)
                part.load_state_dict({name: value.clone() for name, value in part.state_dict().items()}, assign=True)
            train(model, optimizer, batch)


def test_between_fetches_the_workers_own_step_follows_the_users_rates() -> None:
    """With plain SGD it leads where the servers are led by the same gradient."""

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 2, gamma=0.5)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                scheduler.step()
        return model

    same_as_plain(script, pushes=6, strategy=Downpour(overlap=False, n_fetch=2))


def test_a_push_is_applied_with_its_own_senders_rate() -> None:
    member = OneProcess()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=1.0)
    with joined(model, optimizer, member):
        for rate, value in ((1.0, -1.0), (0.5, -1.5), (0.25, -1.75)):
            optimizer.param_groups[0]["lr"] = rate
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
            assert model.weight.item() == value
    assert [len(push.groups) for push in member.pushes] == [1, 1, 1]


def test_each_push_has_the_learning_rate_of_its_own_sender() -> None:
    member = OneProcess(num_servers=1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=1.0)

    def step(value: float) -> None:
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert model.weight.item() == value

    with joined(model, optimizer, member):
        optimizer.param_groups[0]["lr"] = 0.5
        step(-0.5)
        last = member.pushes[-1]
        [server] = member.servers.values()
        other = {"worker": 1, "sequence": 1, "groups": ({**last.groups[0], "lr": 0.25},)}
        ones = torch.ones(last.numel)
        server.receive(Peer("worker", 1), msgspec.structs.replace(last, **other), ones)
        step(-0.5 - 0.25 - 0.5)


@given(st.lists(st.sampled_from(["step", "accumulate", "skip", "again"]), max_size=12))
def test_whatever_the_loop_does_with_its_batches_the_accounting_says_so(deeds: list[str]) -> None:
    member = OneProcess(PLAIN)
    model = nn.Linear(5, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    open_, applied, skipped, untracked_pushes = 0, 0, 0, 0
    with joined(model, optimizer, member) as run:
        for _, deed in zip(run.batches(DATA, batch_size=2), deeds, strict=False):
            open_ += 1
            backward(model, DATA[:2])
            if deed == "skip":
                run.skip()
                skipped, open_ = skipped + open_, 0
            if deed in ("step", "again"):
                optimizer.step()
                applied, open_ = applied + open_, 0
            if deed == "again":
                optimizer.step()
                untracked_pushes += 1
    accounting = member.accounting
    drawn = min(12, len(deeds) + 1)  # zip draws one more than it needs
    unstepped = drawn - applied - skipped
    assert (accounting.applied, accounting.untracked_pushes) == (applied, untracked_pushes)
    wanted = {"skipped by the loop": skipped, "never stepped on": unstepped}
    assert accounting.skipped == {reason: count for reason, count in wanted.items() if count}


def test_a_loader_with_processes_of_its_own_brings_every_sample_once() -> None:
    numbered = TensorDataset(torch.arange(40.0).reshape(40, 1))
    member = OneProcess()
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    seen: list[float] = []
    with joined(model, optimizer, member) as run:
        for _ in run.epochs(2):
            for (inputs,) in run.batches(numbered, batch_size=3, num_workers=2, collate_fn=_doubled):
                seen += inputs.flatten().tolist()
                model(inputs).sum().backward()
                optimizer.step()
    assert sorted(seen) == sorted([2.0 * n for n in range(40)] * 2)
    assert (member.accounting.applied, member.accounting.batches) == (28, 28)


def _doubled(samples: list[tuple[Tensor, ...]]) -> tuple[Tensor]:
    return (torch.stack([2 * sample for (sample,) in samples]),)


def test_breaking_out_of_a_loader_that_fetches_ahead_loses_nothing() -> None:
    numbered = TensorDataset(torch.arange(12.0).reshape(12, 1))
    member = OneProcess()
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    seen: list[float] = []

    def some(run: TrainingLoop, number: int) -> None:
        for at, (inputs,) in enumerate(run.batches(numbered, batch_size=1, num_workers=1), 1):
            seen.append(inputs.item())
            model(inputs).sum().backward()
            optimizer.step()
            if at == number:
                return

    with joined(model, optimizer, member) as run:
        some(run, 3)
        some(run, 9)
    assert sorted(seen) == list(range(12))


# ---- what only the user knows ---------------------------------------------------------------------------------------


def test_progress_is_the_position_of_the_batch_in_the_whole_run() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            seen = []
            for _ in run.epochs(2):
                for batch in run.batches(DATA, batch_size=4):
                    seen.append(run.progress)
                    train(model, optimizer, batch)
            assert seen == pytest.approx([n / 12 for n in range(12)])
        return model

    same_as_plain(script, pushes=12)


def test_progress_needs_to_know_how_many_passes_there_are() -> None:
    with joined(model := net(), SGD(model.parameters()), OneProcess()) as run:
        with pytest.raises(ValueError, match=r"run.epochs\(10\)"):
            _ = run.progress
    with pytest.raises(ValueError, match=r"run.epochs\(10\)"):
        _ = SingleProcessLoop().progress


@pytest.mark.parametrize("num_workers", [0, 1])  # one fetches ahead, by leases that are given back
def test_who_is_away_gives_its_batches_back_and_goes_on_afterwards(num_workers: int) -> None:
    member = OneProcess()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, member) as run:
        for _ in run.epochs(1):
            for number, batch in enumerate(run.batches(DATA, batch_size=4, num_workers=num_workers)):
                train(model, optimizer, batch)
                if number == 2:
                    with run.paused():
                        while member.mail:
                            member.wait()
                        assert not member.coordinator.state.workers[0].leases
    assert (member.accounting.applied, member.accounting.refused) == (6, {})


def test_going_away_with_an_open_batch_is_refused() -> None:
    model = net()
    with joined(model, SGD(model.parameters()), OneProcess()) as run:
        for _ in run.batches(DATA, batch_size=4):
            with pytest.raises(ValueError, match=r"run.skip\(\)"), run.paused():
                pass
            run.skip()


def test_a_stopped_run_ends_the_loop_over_its_batches() -> None:
    member = OneProcess()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = 0
    with joined(model, optimizer, member) as run:
        for _ in run.epochs(5):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                steps += 1
                if steps == 8:
                    for out in member.coordinator.shutdown.stop("stopped", "interrupted"):
                        member.bus(member_of(out), out.to, out.message)
    assert steps == 8
    assert (member.accounting.applied, member.accounting.not_processed) == (8, 22)


def test_a_stopped_run_interrupts_a_loop_over_a_loader_of_its_own() -> None:
    member = OneProcess()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, member) as run:
        for number in range(5):
            train(model, optimizer, DATA[:4])
            if number == 2:
                for out in member.coordinator.shutdown.stop("stopped", "interrupted"):
                    member.bus(member_of(out), out.to, out.message)
    assert run.stopped == "interrupted"  # the code after the block runs
    assert member.accounting.untracked_pushes == 3
    assert member.left  # with the final parameters


@pytest.mark.parametrize("strategy", [PLAIN, Sync(batch_per_worker=True)], ids=["downpour", "sync"])
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_loop_that_stops_the_run_ends_after_the_current_batch(when: str, strategy: Any) -> None:
    """In the fourth batch of the second of sixty passes: no other pass is begun, and nothing is evaluated after it."""
    deeds: list[str] = []

    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        deeds.append("join")
        with join(model, optimizer) as run:
            for epoch in range(60):
                for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                    if (epoch, number, when) == (1, 3, "before the step"):
                        run.stop("converged")
                    train(model, optimizer, batch)
                    if (epoch, number, when) == (1, 3, "after the step"):
                        run.stop("converged")
                    deeds.append("step")
                deeds.append("evaluate")
        assert run.stopped == "converged"
        return model

    member = same_as_plain(script, pushes=10, strategy=strategy)
    assert deeds == ["join", *["step"] * 6, "evaluate", *["step"] * 4] * 2
    state = member.coordinator.state
    assert (state.outcome, state.reason) == ("stopped", "converged")
    assert (member.accounting.applied, member.accounting.skipped) == (10, {})


@pytest.mark.parametrize("joined_run", [True, False])
def test_a_loop_over_its_own_loader_is_left_when_it_stops_the_run(joined_run: bool) -> None:
    member = OneProcess()
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = 0
    with joined(model, optimizer, member) if joined_run else SingleProcessLoop() as run:
        assert run.stopped is None
        for batch in DataLoader(DATA, batch_size=4):
            train(model, optimizer, batch)
            steps += 1
            if steps == 2:
                run.stop()
    assert (steps, run.stopped) == (2, "stopped by the loop")
    if joined_run:
        assert member.accounting.untracked_pushes == 2


def test_an_interrupt_that_is_not_of_the_run_ends_the_script() -> None:
    model = net()
    with pytest.raises(KeyboardInterrupt), joined(model, SGD(model.parameters()), OneProcess()):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), SingleProcessLoop():
        raise KeyboardInterrupt


def member_of(out: Any) -> Any:
    from rainband.protocol.messages import COORDINATOR

    assert isinstance(out.message, Halt)
    return COORDINATOR


# ---- rounds ---------------------------------------------------------------------------------------------------------


def test_rounds_do_not_accumulate_and_say_what_to_do() -> None:
    model = net()
    with pytest.raises(ValueError, match="larger batch_size"):
        with joined(model, SGD(model.parameters()), OneProcess(Sync(batch_per_worker=True))) as run:
            for batch in run.batches(DATA, batch_size=4):
                backward(model, batch)


def test_rounds_need_batches_of_the_run() -> None:
    model = net()
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=r"run.batches\(...\).*downpour"):
        with joined(model, optimizer, OneProcess(Sync(batch_per_worker=True))):
            train(model, optimizer, DATA[:4])


def test_a_batch_left_out_of_a_round_is_skipped_by_the_round() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        with join(model, optimizer) as run:
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 1:
                    run.skip("too hard")
                    continue
                train(model, optimizer, batch)
        return model

    assert same_as_plain(script, pushes=5, strategy=Sync(batch_per_worker=True)).accounting.skipped == {"too hard": 1}


# ---- strategies that leave the step to the worker -------------------------------------------------------------------


@dataclass(frozen=True)
class Averaging(Strategy):
    """Steps locally, and tells the servers of it without ever looking back."""

    requires = Requirements(optimizer="workers")

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(OptimizerSpec("sgd", {"lr": 9.9}), Schedule())
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                optimizer.step(gradient)
                await worker.servers.push(gradient)

    def server(self, num_replicas: int) -> ServerPart:
        return ServerPart(ApplyOnArrival, OptimizerSpec("sgd", {"lr": 0.0}), Schedule())


@dataclass(frozen=True)
class Doubling(Strategy):
    """Steps locally with a gradient of its own making; looks at the parameters right after."""

    requires = Requirements(servers=False, max_replicas=1, optimizer="workers")

    async def run(self, worker: Worker) -> None:
        optimizer = worker.optimizer(OptimizerSpec("sgd"), Schedule())
        async for work_item in worker.work_items():
            for batch in work_item.batches:
                gradient = await worker.gradient(batch)
                optimizer.step(gradient + gradient)

    def server(self, num_replicas: int) -> ServerPart | None:
        return None


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)


def test_any_optimizer_runs_on_the_worker_where_the_strategy_leaves_it_there() -> None:
    def script(join: Join) -> nn.Module:
        model = net()
        for layer in (model[0], model[2]):
            layer.bias.requires_grad_(False)
        optimizer = muon(model)
        with join(model, optimizer) as run:
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        return model

    accounting = same_as_plain(script, pushes=0, strategy=Single()).accounting
    assert (accounting.applied, accounting.batches, accounting.not_processed) == (6, 6, 0)


def test_a_strategys_own_gradient_is_what_the_users_optimizer_steps_with() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with joined(model, optimizer, OneProcess(Doubling())):
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        assert model.weight.item() == -1.0  # 0.5 times twice the gradient 1


def test_skipping_without_servers_is_accounted_for() -> None:
    member = OneProcess(Single())
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, member) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=4)):
            if number < 2:
                train(model, optimizer, batch)
                optimizer.step()
            else:
                run.skip("late")
    accounting = member.accounting
    assert (accounting.applied, accounting.skipped, accounting.untracked_pushes) == (2, {"late": 4}, 2)


# ---- mistakes, told -----------------------------------------------------------------------------------------------


def test_an_optimizer_that_servers_cannot_run_is_reported_with_the_strategies_that_can() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"Muon cannot run block by block on the servers.*--strategy .*single"):
        with pytest.warns(UserWarning, match="not shared"), joined(model, muon(model), OneProcess()):
            pass


def test_a_class_of_ones_own_must_be_allowed_by_who_starts_the_run() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"rainband run --optimizer tests.lion:Lion"):
        with joined(model, Lion(model.parameters()), OneProcess()):
            pass


def test_two_optimizers_of_different_classes_are_refused() -> None:
    model = net()
    both = [SGD(model[0].parameters()), Adam(model[2].parameters())]
    with pytest.raises(ValueError, match="SGD and Adam"):
        with joined(model, both, OneProcess()):
            pass


def test_parameters_in_no_group_are_pointed_out() -> None:
    model = net()
    with pytest.warns(UserWarning, match=r"2 parameters .*\(2.weight, ...\).*\[first, second\]"):
        with joined(model, SGD(model[0].parameters()), OneProcess()):
            pass


def _add_a_group(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def _change_the_kind(model: nn.Module, optimizer: Optimizer) -> None:
    model.double()


def _turn_momentum_on(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (_add_a_group, "since rainband.join"),
        (_change_the_kind, "before joining"),
        (_turn_momentum_on, "set momentum before"),
    ],
)
def test_what_cannot_change_during_a_run_is_reported_by_the_step(change: Any, advice: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, OneProcess()):
        train(model, optimizer, DATA[:4])
        change(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match=advice):
            optimizer.step()


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"dataset": Endless(), "batch_size": 4}, "map-style"),
        ({"dataset": [], "batch_size": 4}, "empty"),
        ({"dataset": DATA, "batch_size": 0}, "1 or more"),
        ({"dataset": DATA, "batch_size": 4, "shuffle": False}, "omit it"),
        ({"dataset": DATA, "batch_size": 25, "drop_last": True}, "leaves no batch of 25"),
        ({"dataset": DATA, "batch_size": 4, "sampler": [1]}, "omit it"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_what_cannot_be_shared_out_is_refused(arguments: dict[str, Any], advice: str, together: bool) -> None:
    if advice == "omit it" and not together:
        return  # one process takes any order: see test_training_loop_data.py
    model = net()
    optimizer = SGD(model.parameters())
    with joined(model, optimizer, OneProcess()) if together else nullcontext(SingleProcessLoop()) as run:
        with pytest.raises(ValueError, match=advice):
            run.batches(**arguments)


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_that_is_made_once_gives_every_pass(own: bool) -> None:
    """As a DataLoader does; with `run.loader`, the script is that of workers that share each batch."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    with joined(model, optimizer, OneProcess()) as run:
        epochs = run.epochs(3)
        if own:
            batches = run.loader(torch.utils.data.DataLoader(DATA, batch_size=5, shuffle=True))
        else:
            batches = run.batches(DATA, batch_size=5)
        assert (len(batches), batches.total, batches.dataset, batches.batch_size) == (5, 5, DATA, 5)
        for _ in epochs:
            for batch in batches:
                train(model, optimizer, batch)
                seen.append(len(batch[0]))
    assert sorted(seen) == sorted(3 * [5, 5, 5, 5, 4])


def test_methods_of_workers_that_share_each_batch_work_or_say_what_to_type() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, OneProcess()) as run:
        run.register(StepLR(optimizer, 1000))
        with pytest.raises(ValueError, match="state_dict"):
            run.register(object())  # type: ignore[arg-type]
        assert run.is_first
        for number, batch in enumerate(run.batches(DATA, batch_size=6)):
            with run.no_sync() if number % 2 else nullcontext():  # the step pushes both gradients
                backward(model, batch)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        for refused in (
            lambda: run.part(DATA[:4]),
            lambda: run.mean(1.0),
            lambda: run.weight(3),
            lambda: run.eval_batches(DATA, batch_size=4),
            lambda: run.loader(torch.utils.data.DataLoader(DATA, batch_size=4)),
            lambda: run.loader(torch.utils.data.DataLoader(Endless())),
        ):
            with pytest.raises(
                ValueError, match=r"which they do not with downpour: omit --strategy, or use run.batches"
            ):
                refused()


def test_other_data_and_more_passes_than_planned_are_refused() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer, OneProcess()) as run:
        for _ in run.epochs(1):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
        with pytest.raises(ValueError, match="all 1 passes are over"):
            run.batches(DATA, batch_size=4)
        with pytest.raises(ValueError, match="must be called before"):
            run.epochs(3)
    other = net()
    with joined(other, SGD(other.parameters()), OneProcess()) as run:
        run.batches(DATA, batch_size=4)
        with pytest.raises(ValueError, match="one dataset"):
            run.batches(DATA, batch_size=8)


def test_after_an_error_in_the_loop_the_model_is_an_ordinary_one() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), joined(model, optimizer, OneProcess()):
        raise ZeroDivisionError
    before = model[0].weight.detach().clone()
    train(model, optimizer, DATA[:4])
    assert not torch.equal(model[0].weight, before)
    assert not optimizer._optimizer_step_pre_hooks


def test_without_a_run_a_script_trains_alone_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules["rainband.join"]._say_single_process.cache_clear()  # another test may have trained alone before
    model = net()
    for _ in range(2):
        with public_join(model, SGD(model.parameters())) as run:
            assert sum(len(labels) for _, labels in run.batches(DATA, batch_size=5)) == 24
            run.skip()
            with run.paused():
                pass
    assert capsys.readouterr().err.count("training in one process") == 1


def test_a_script_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__rainband__", OneProcess(), raising=False)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with public_join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
    with pytest.raises(ValueError, match="one `with rainband.join"):
        public_join(model, optimizer)
    with pytest.raises(ValueError, match="requires one optimizer or more"):
        public_join(model, [])


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.batches(DATA, batch_size=4),
        lambda run: run.stop("converged"),
        lambda run: run.skip(),
        lambda run: run.paused().__enter__(),
        lambda run: run.checkpoint(),
        lambda run: run.log(loss=1.0),
        lambda run: run.stopped,
    ],
)
def test_a_loop_without_a_with_block_is_told_to_write_one(use: Callable[[TrainingLoop], Any]) -> None:
    model = net()
    run = TrainingLoop(model, [SGD(model.parameters(), lr=0.1)], OneProcess(PLAIN))
    with pytest.raises(ValueError, match="put it inside a block, `with rainband.join"):
        use(run)


def test_an_error_of_the_run_that_the_loop_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `except Exception: continue`, after a server was lost."""
    member, wait = OneProcess(PLAIN), OneProcess.wait
    lost = [False]

    def wait_once_in_vain(member: OneProcess, timeout_s: float | None = None) -> bool:
        if lost[0] and timeout_s is None:
            lost[0] = False
            raise ServerLost("server 0", "waiting for its answers")
        return wait(member, timeout_s)

    monkeypatch.setattr(OneProcess, "wait", wait_once_in_vain)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    raised: list[str] = []
    with pytest.raises(ServerLost, match="server 0"), joined(model, optimizer, member) as run:
        for step, batch in enumerate(run.batches(DATA, batch_size=4)):
            lost[0] = step == 1
            try:
                train(model, optimizer, batch)
            except Exception as error:
                raised.append(str(error))
    assert len(raised) == 5 and len(set(raised)) == 1
