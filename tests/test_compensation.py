"""Delay compensation against its formula: g + strength * g * g * (w - what the worker was given)."""

from __future__ import annotations

import pytest
import torch

from rainband.protocol.messages import COORDINATOR, Assign, Forget, InitBlock, Params, Pull
from rainband.rules import ApplyEvery, ApplyOnArrival, Compensated, StalenessBound, compensated
from rainband.rules.rule import Rule
from rainband.server.server import Server
from rainband.strategies.bounded_delay import BoundedDelay
from rainband.strategies.downpour import Downpour
from rainband.strategies.soft_sync import SoftSync
from rainband.strategies.stale_sync import StaleSync
from rainband.strategy import Strategy
from tests.builders import (
    WORKERS,
    full,
    make_buffer,
    make_plan,
    make_push,
    make_server_part,
    named,
    send,
    specs_of,
    value_of,
)
from tests.harness import Faults, SimulatedCluster
from tests.ledger import Case
from tests.test_simulation import INSTANT, cluster_of

STRATEGIES: list[Strategy] = [
    Downpour(lr=0.05, optimizer="sgd", compensation=0.5),
    Downpour(lr=0.05, optimizer="sgd", compensation=0.5, overlap=False),
    SoftSync(n=2, lr=0.05, compensation=0.5),
    StaleSync(bound=1, lr=0.05, compensation=0.5),
    BoundedDelay(tau=2, lr=0.05, compensation=0.5),
    Downpour(lr=0.05, optimizer="sgd", compensation=2.0, compensation_decay=0.95),
]


def make_server(rule: Rule) -> Server:
    half = make_server_part(lambda: rule, lr=0.5)
    server = Server(lambda _: half, lambda specs, buffers: [make_buffer(spec, buffers) for spec in specs])
    server.receive(COORDINATOR, Assign(make_plan(16), specs_of(1), ({},), num_replicas=2))
    server.receive(WORKERS[0], InitBlock(0, "float32", 32), full(0.0))
    return server


def pull(server: Server, worker: int, clock: int = 0) -> tuple[int, float]:
    """Return the version that a worker is given, and the value of all elements."""
    (out,) = server.receive(WORKERS[worker], Pull(1, clock=clock))
    assert isinstance(out.message, Params)
    message, values = server.read(out.message)
    assert values is not None
    return message.version, values[0].item()


def test_a_gradient_of_2_that_missed_a_step_of_minus_1_counts_as_0_with_strength_one_half() -> None:
    server = make_server(Compensated(ApplyOnArrival(), strength=0.5))
    for worker in (0, 1):
        assert pull(server, worker) == (0, 0.0)

    send(server, make_push(named(0, 0), worker=0), 2.0)
    assert value_of(server.blocks[0]) == -1.0  # it has missed nothing
    send(server, make_push(named(0, 1), worker=1), 2.0)

    assert value_of(server.blocks[0]) == -1.0  # 2 + 0.5 * 2 * 2 * (-1 - 0) = 0


def test_with_a_memory_the_correction_is_divided_by_the_root_of_the_mean_square() -> None:
    """m = 3/4. First g = 4: s = 4. Then g = 2: s = 3/4 * 4 + 1/4 * 4 = 4, its root is 2."""
    server = make_server(Compensated(ApplyOnArrival(), strength=0.5, memory=0.75))
    for worker in (0, 1):
        pull(server, worker)

    send(server, make_push(named(0, 0), worker=0), 4.0)
    assert value_of(server.blocks[0]) == -2.0  # it has missed nothing
    send(server, make_push(named(0, 1), worker=1), 2.0)

    # 2 + 0.5 / 2 * 2 * 2 * (-2 - 0) = 0, but for the 1e-7 under the root
    assert value_of(server.blocks[0]) == pytest.approx(-2.0, abs=1e-6)


def test_elements_with_large_gradients_are_corrected_less() -> None:
    """After gradients (1, 3), and the same again: s = g * g * (1 - m * m), so the strength of the second is a third."""
    rule = Compensated(ApplyOnArrival(), strength=1.0, memory=0.5)
    rule._remember(torch.tensor([1.0, 3.0]))
    rule._remember(torch.tensor([1.0, 3.0]))

    once, thrice = rule._scaled(torch.ones(2)).tolist()
    assert once == pytest.approx(1 / 0.75**0.5, rel=1e-6) and once == pytest.approx(3 * thrice, rel=1e-6)


def test_each_block_remembers_for_itself() -> None:
    make = compensated(ApplyOnArrival, 1.0, 0.5)
    first, second = make(), make()
    first._remember(torch.ones(1))  # type: ignore[attr-defined]
    assert second.mean_square is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"compensation": 1.0, "compensation_decay": 1.0}, "compensation_decay=1.0: choose 0 .* below 1"),
        ({"compensation_decay": 0.95}, "requires compensation: add compensation=2"),
    ],
)
def test_a_memory_of_nothing_or_for_ever_is_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        StaleSync(**settings)  # type: ignore[arg-type]


def test_it_is_what_the_worker_was_given_that_counts_not_what_it_was_given_last() -> None:
    """It fetches ahead: the gradient that comes now was computed before that."""
    server = make_server(Compensated(ApplyOnArrival(), strength=0.25))
    for worker in (0, 1):
        pull(server, worker)
    send(server, make_push(named(0, 0), worker=0), 4.0)  # to -2
    assert pull(server, 1, clock=1) == (1, -2.0)

    send(server, make_push(named(0, 1), worker=1, version=0), 1.0)  # 1 + 0.25 * 1 * 1 * (-2 - 0) = 0.5
    assert value_of(server.blocks[0]) == -2.25
    send(server, make_push(named(0, 2), worker=1, version=1), 2.0)  # 2 + 0.25 * 2 * 2 * (-2.25 + 2) = 1.75
    assert value_of(server.blocks[0]) == -3.125


def test_a_reply_has_the_copy_that_is_kept_also_if_it_leaves_later() -> None:
    server = make_server(Compensated(ApplyOnArrival(), strength=0.5))
    (out,) = server.receive(WORKERS[1], Pull(1, clock=0))
    send(server, make_push(named(0, 0), worker=0), 2.0)

    assert isinstance(out.message, Params)
    message, values = server.read(out.message)
    assert message.version == 0 and values is not None and values[0] == 0.0


def test_one_copy_is_kept_for_each_worker_and_none_for_the_forgotten() -> None:
    rule = Compensated(ApplyOnArrival(), strength=0.5)
    server = make_server(rule)
    for step in range(3):
        for worker in (0, 1):
            version, _ = pull(server, worker, clock=step)
            send(server, make_push(named(worker, step), worker, version=version, clock=step + 1))
    assert {worker: len(copies) for worker, copies in rule.given.items()} == {0: 1, 1: 1}

    server.receive(COORDINATOR, Forget(1))
    assert set(rule.given) == {0}


def test_it_can_be_put_around_any_rule_and_shows_what_that_one_can_do() -> None:
    around = Compensated(StalenessBound(3), 0.5)
    limit = around.limit()
    assert around.clocked and limit is not None and limit.bound == 3
    assert not Compensated(ApplyEvery(2), 0.5).clocked
    assert compensated(ApplyOnArrival, 0.0) is ApplyOnArrival


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_strategies_run_with_it_to_the_end_also_when_a_worker_dies(strategy: Strategy) -> None:
    for seed in range(4):
        accounting = (
            SimulatedCluster(seed, Case(strategy, 3, num_servers=2), Faults(kills=seed % 2))
            .run()
            .coordinator.reporting.accounting()
        )
        assert accounting is not None and accounting.balanced and accounting.applied == accounting.batches


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_every_gradient_finds_the_copy_it_was_computed_with(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = []
    true_absorb = Compensated.absorb

    def absorb(rule, block, push, gradient):  # type: ignore[no-untyped-def]
        if push.version not in rule.given.get(push.worker, {}):
            missing.append(push)
        true_absorb(rule, block, push, gradient)

    monkeypatch.setattr(Compensated, "absorb", absorb)
    cluster = cluster_of(strategy, 3, INSTANT)
    cluster.start()
    cluster.run()
    assert cluster.coordinator.state.outcome == "finished" and missing == []


def test_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="compensation=-1.0: choose 0"):
        Downpour(compensation=-1.0)
    with pytest.raises(ValueError, match="leave n_push and n_fetch at 1"):
        Downpour(compensation=0.1, n_push=2)
    with pytest.raises(ValueError, match="leave n_push at 1"):
        StaleSync(compensation=0.1, n_push=2)
