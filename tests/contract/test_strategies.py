"""The laws of every strategy, found by its file, and further promises of some of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rainband.coordinator.coordinator import Coordinator, RunSettings
from rainband.model.block_optimizer import blockwise_obstacle
from rainband.model.flat_parameters import Flat
from rainband.plugins import find_strategy, load_strategy, strategy_names
from rainband.protocol.data_plan import DataPlan, num_batches
from rainband.protocol.messages import Join, Message, Peer, Push, Welcome
from rainband.rules.rule import Rule, RuleBlock
from rainband.runtimes.processes.drive import drive
from rainband.settings import as_dict, build
from rainband.strategies.downpour import Downpour
from rainband.strategies.single import Single
from rainband.strategies.sync import Sync
from rainband.strategy import Batch, ServerPart, Strategy
from rainband.tasks.quadratic import Quadratic
from rainband.worker.client import Client
from rainband.worker.worker import ModuleWorker, Sampler
from tests.builders import make_plan
from tests.harness import Faults, Node, Outcome, SimulatedCluster, run
from tests.ledger import ELEMENTS, LR, Case, Wrong
from tests.random_runs import Softly
from tests.unscaled import AtFullWeight

every_strategy = pytest.mark.parametrize("name", strategy_names())
# What a coordinator leads goes over the data as often as it needs, without an optimizer: test_sandblaster has its laws.
LED = [name for name in strategy_names() if load_strategy(name, {}).requires.coordinated]
# Workers that share each batch need no servers.
# With servers that own blocks; trees of servers have random faults in `rainband fuzz`.
WITH_SERVERS_ONLY: dict[str, dict[str, Any]] = {"sync": {"batch_per_worker": True}, "tree": {"variant": "base"}}


def with_servers(name: str) -> Strategy:
    return load_strategy(name, WITH_SERVERS_ONLY.get(name, {}))


WITH_SERVERS = [name for name in strategy_names() if with_servers(name).server(1) is not None and name not in LED]
every_strategy_with_servers = pytest.mark.parametrize("name", WITH_SERVERS)
# Others push changes of models: tests/test_neighbors.py has their laws.
PUSHING_GRADIENTS = [name for name in WITH_SERVERS if with_servers(name).requires.optimizer == "servers"]
every_strategy_that_pushes_gradients = pytest.mark.parametrize("name", PUSHING_GRADIENTS)


AS_LEDGER: dict[str, Callable[[], Strategy]] = {"soft_sync": lambda: Softly(n=1)}
# Their rules apply every gradient as it is: its effect on the parameters is known. Of all others, rules may scale it.
UNSCALED = {"adaptive_bound", "bounded_delay", "downpour", "stale_sync", "sync"}


def exact(name: str) -> Strategy:
    """The strategy with plain SGD at a power of two, every gradient counting the same: then its numbers are exact."""
    if name in AS_LEDGER:
        return AS_LEDGER[name]()
    strategy = with_plain_sgd(name)
    return strategy if name in UNSCALED else AtFullWeight(strategy)


def with_plain_sgd(name: str) -> Strategy:
    cls = find_strategy(name)
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return build(
        cls,
        {key: value for key, value in {"lr": LR, "optimizer": "sgd", "guard": False}.items() if key in fields}
        | WITH_SERVERS_ONLY.get(name, {}),
    )


# ---- how it is written ----


@every_strategy
def test_it_is_a_frozen_dataclass_named_like_its_file(name: str) -> None:
    cls: Any = find_strategy(name)

    assert dataclasses.fields(cls) and cls.__dataclass_params__.frozen
    assert cls.__name__ == "".join(word.capitalize() for word in name.split("_"))
    assert isinstance(cls(), Strategy) and inspect.iscoroutinefunction(cls.run)


@every_strategy
def test_its_requirements_say_which_parts_it_has(name: str) -> None:
    for strategy in (load_strategy(name, {}), with_servers(name)):
        has_the_parts_it_requires(strategy)


def has_the_parts_it_requires(strategy: Strategy) -> None:
    requires = strategy.requires
    assert (strategy.server(2) is not None) == requires.servers
    assert (type(strategy).coordinate is not Strategy.coordinate) == requires.coordinated
    assert requires.servers or requires.optimizer == "workers"
    if (part := strategy.server(2)) is not None:
        assert (part.rule().reads == "round") == (requires.waits == "rounds")
        assert (part.rule().reads == "any") == (requires.replay_obstacle() == "")


@every_strategy
def test_its_file_begins_with_its_equations_and_ends_them_with_when_to_use_it(name: str) -> None:
    words = sys.modules[find_strategy(name).__module__].__doc__ or ""

    equations = [line for line in words.splitlines() if re.match(r" {4,}.*(=|<-|->)", line)]
    assert equations, "an algorithm's file opens with its equations, indented by four"
    assert "\n\nUse " in words and ". Avoid " in " ".join(words.split())
    assert find_strategy(name).__doc__


@every_strategy
def test_its_defaults_work_and_its_settings_survive_being_written_down(name: str) -> None:
    strategy = load_strategy(name, {})
    as_typed = {key: str(value).lower() if value is None else str(value) for key, value in as_dict(strategy).items()}

    assert build(type(strategy), as_dict(strategy)) == strategy
    assert build(type(strategy), as_typed) == strategy


@pytest.mark.parametrize("name", sorted(set(strategy_names()) - set(LED)))
def test_a_wrong_optimizer_is_reported_when_the_strategy_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=r"no optimizer named 'sdg' \(did you mean sgd\?\)"):
        load_strategy(name, {"optimizer": "sdg"})


# ---- its server part ----


@every_strategy_with_servers
def test_each_block_gets_a_rule_of_its_own_that_holds_nothing_yet(name: str) -> None:
    half = with_servers(name).server(num_replicas=3)
    assert isinstance(half, ServerPart)
    first, second = half.rule(), half.rule()

    def parts(rule: Rule) -> list[object]:
        return [part for part in vars(rule).values() if isinstance(part, list | dict | set)]

    assert first is not second
    assert not {id(part) for part in parts(first)} & {id(part) for part in parts(second)}
    assert first.buffered == 0 and first.reads in ("any", "admitted", "round")


@every_strategy_with_servers
def test_its_optimizer_can_run_block_by_block(name: str) -> None:
    half = with_servers(name).server(num_replicas=3)
    assert half is not None and blockwise_obstacle(half.optimizer) is None


# ---- it runs ----


@every_strategy_that_pushes_gradients
@pytest.mark.parametrize("direct", [False, True], ids=["asked", "in place"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_it_runs_to_the_end_and_every_batch_counts_once(name: str, num_workers: int, direct: bool) -> None:
    for seed in range(3):
        outcome = run(seed, Case(exact(name), num_workers, num_servers=2, epochs=2, direct=direct))
        accounting = outcome.coordinator.reporting.accounting()
        assert accounting is not None and accounting.applied == accounting.batches == 16


@every_strategy_that_pushes_gradients
def test_a_worker_may_die(name: str) -> None:
    for seed in range(6):
        run(seed, Case(exact(name), num_workers=3, num_servers=2), Faults(kills=1, restarts=seed % 2))


@every_strategy_that_pushes_gradients
def test_it_can_be_stopped(name: str) -> None:
    for seed in range(6):
        run(seed, Case(exact(name), num_workers=2, num_servers=2), Faults(stop=True))


@every_strategy_with_servers
def test_it_runs_with_torchs_own_optimizer_and_its_own_defaults(name: str) -> None:
    """The parameters are not exact here; the batch accounting must still balance."""
    runtime = SimulatedCluster(0, Case(with_servers(name), num_workers=2, num_servers=2), node=OnASlope)
    accounting = runtime.run().coordinator.reporting.accounting()
    assert accounting is not None and accounting.balanced and accounting.applied == accounting.batches == 8


class Scaled(Rule):
    """Apply every gradient on arrival, some times, multiplied by a factor."""

    def __init__(self, factor: float, times: int) -> None:
        self.factor, self.times = factor, times

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        for _ in range(self.times if gradient is not None else 0):
            block.apply(cast(Tensor, gradient) * self.factor, [push], push.absent)


class Scaling(Downpour):
    """Downpour with another rule."""

    rule: tuple[float, int] = (1.0, 1)

    def server(self, num_replicas: int) -> ServerPart:
        return dataclasses.replace(super().server(num_replicas), rule=partial(Scaled, *self.rule))


@pytest.mark.parametrize(
    "rule, wrong", [((0.5, 1), ""), ((0.0, 1), "applies zeros"), ((0.5, 2), "twice"), ((0.5, 0), "does not balance")]
)
def test_a_rule_may_scale_gradients_but_not_repeat_or_lose_them(
    rule: tuple[float, int], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaling, "rule", rule)
    case = Case(AtFullWeight(Scaling(lr=LR, optimizer="sgd", guard=False)), num_workers=2, num_servers=2)
    with pytest.raises(Wrong, match=wrong) if wrong else nullcontext():
        run(0, case)


class Borrowed(Rule):
    """Buffer every gradient without a copy, and apply all at the end."""

    def __init__(self) -> None:
        self.kept: list[tuple[Push, Tensor]] = []

    @property
    def buffered(self) -> int:
        return sum(num_batches(push.push_id) for push, _ in self.kept)

    def absorb(self, block: RuleBlock, push: Push, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.kept.append((push, gradient))

    def flush(self, block: RuleBlock) -> None:
        for push, gradient in self.kept:
            block.apply(gradient, [push], push.absent)
        self.kept = []


class Borrowing(Downpour):
    """Downpour whose rule keeps gradients that were only lent to it."""

    def server(self, num_replicas: int) -> ServerPart:
        return dataclasses.replace(super().server(num_replicas), rule=Borrowed)


def test_a_rule_may_not_keep_a_gradient_without_a_copy() -> None:
    case = Case(AtFullWeight(Borrowing(lr=LR, optimizer="sgd", guard=False)), num_workers=2, num_servers=2)
    with pytest.raises(Wrong, match="clone"):
        run(0, case)


class OnASlope(Node):
    """As in the harness, but the parameters it computes with need not be known beforehand."""

    def check_round_read(self, round_: int, plan: DataPlan) -> None:
        """They are checked where they are known."""


# ---- equal to one process ----


class InABowl(OnASlope):
    """The gradient of batch i is w - target_i: now it matters where it is taken, and in which order."""

    def gradients(self, number: int) -> list[Tensor | None]:
        return [parameter - target(number) for parameter in self.memory.parameters]


def target(number: int) -> Tensor:
    return torch.sin(torch.arange(float(ELEMENTS)) + number)


def trained(strategy: Strategy, seed: int, num_workers: int, faults: Faults = Faults(), **sizes: Any) -> Outcome:  # noqa: B008
    runtime = SimulatedCluster(seed, Case(strategy, num_workers, num_servers=2, **sizes), faults, node=InABowl)
    return runtime.run()


def one_process(lr: float, rounds: list[list[tuple[int, int]]]) -> Tensor:
    """Plain SGD; each round is (batch, samples) pairs, whose mean gradient is one step."""
    w = torch.full((ELEMENTS,), 1.0)  # as the first block begins
    optimizer = torch.optim.SGD([w], lr=lr, fused=True)
    for work_items in rounds:
        total = sum(((w - target(batch)) * samples for batch, samples in work_items), torch.zeros(ELEMENTS))
        w.grad = total / sum(samples for _, samples in work_items)
        optimizer.step()
    return w


@pytest.mark.parametrize("direct", [False, True], ids=["asked", "in place"])
def test_downpour_with_one_worker_in_step_is_plain_sgd_to_the_last_bit(direct: bool) -> None:
    strategy = Downpour(lr=0.3, optimizer="sgd", n_push=1, overlap=False, local_lr=0.0)
    outcome = trained(strategy, seed=0, num_workers=1, direct=direct, epochs=2)

    assert torch.equal(outcome.blocks[0].values, one_process(0.3, [[(batch, 2)] for batch in range(16)]))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_sync_with_any_number_of_workers_is_one_process_with_a_larger_batch(num_workers: int) -> None:
    """Fifteen samples in batches of two: the last batch is short, and so may be the last round."""
    sizes = [2] * 7 + [1]
    rounds = [list(enumerate(sizes))[at : at + num_workers] for at in range(0, 8, num_workers)]
    outcome = trained(Sync(batch_per_worker=True, lr=0.3), seed=1, num_workers=num_workers, num_samples=15)

    torch.testing.assert_close(outcome.blocks[0].values, one_process(0.3, rounds), rtol=1e-6, atol=1e-6)


def test_the_result_of_sync_does_not_depend_on_who_was_faster_or_who_died_to_the_last_bit() -> None:
    quiet = trained(Sync(batch_per_worker=True, lr=0.3), seed=0, num_workers=3)
    for seed in range(1, 8):
        stormy = trained(
            Sync(batch_per_worker=True, lr=0.3),
            seed,
            3,
            Faults(kills=2, restarts=1, pauses=2, suspicions=2, duplicates=0.2),
        )
        for index, block in quiet.blocks.items():
            assert torch.equal(stormy.blocks[index].values, block.values)


# ---- without servers ----


class SingleProcessLoop:
    """One worker and its coordinator: a word to the coordinator is answered at once."""

    def __init__(self, strategy: Strategy, task: Quadratic, seed: int = 0) -> None:
        self.coordinator = Coordinator(RunSettings(num_workers=1, num_servers=0, seed=seed))
        self.strategy = strategy
        self.module = task.model()
        flat = Flat(self.module, [{"params": list(self.module.parameters())}])
        me = Peer("worker", 0)
        data = task.data()
        join = Join("data", len(data), flat.layout, task.batch_size, task.epochs, batches_per_item=1, rounds=False)
        welcome = self.coordinator.receive(me, join, 0.0)[0].message
        assert isinstance(welcome, Welcome)
        self.inbox: list[Message] = []

        def tell(message: Message) -> None:
            self.inbox += [out.message for out in self.coordinator.receive(me, message, 0.0)]

        client = Client(me, welcome.plan, flat, welcome.blocks, welcome.owners, [], tell)
        self.worker = ModuleWorker(0, 1, task, data, self.module, client)

    def run(self) -> None:
        drive(self.strategy.run(self.worker), self.wait)

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.inbox, "it waits, and nothing is under way"
        while self.inbox:
            self.worker.client.receive(self.inbox.pop(0))


def batches_in_order(plan: DataPlan) -> list[Batch]:
    return [Batch(p, k, 1) for p in range(plan.num_portions) for k in range(plan.batches_in(p))]


@pytest.mark.parametrize("items_per_round", [0, 3])
def test_the_batches_of_an_epoch_are_all_samples_once_and_in_another_order_than_those_of_the_next(
    items_per_round: int,
) -> None:
    plan = make_plan(num_samples=50, batch_size=8, epochs=2, portion_batches=2, items_per_round=items_per_round)
    sampler, epochs = Sampler(plan), dict[int, list[int]]({0: [], 1: []})
    for batch in batches_in_order(plan):
        indices = sampler.indices(batch).tolist()
        assert len(indices) == plan.samples_in(batch.portion, batch.k)
        epochs[plan.epoch_of(batch.portion)] += indices

    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "strategy, optimizer",
    [
        (Single(lr=0.1), lambda params: torch.optim.SGD(params, lr=0.1, fused=True)),
        (Single(lr=0.1, momentum=0.9), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)),
        (Single(lr=0.1, optimizer="adam"), lambda params: torch.optim.Adam(params, lr=0.1, fused=True)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_single_is_plain_torch_to_the_last_bit(strategy: Single, optimizer: Callable[..., Any]) -> None:
    task = Quadratic(dimension=5, samples=50, batch_size=8, epochs=2)
    alone = SingleProcessLoop(strategy, task)
    alone.run()

    module, data = task.model(), task.data()
    plain = optimizer(module.parameters())
    for batch in batches_in_order(alone.worker.plan):
        plain.zero_grad()
        (samples,) = data.batch(alone.worker.sampler.indices(batch))
        task.loss(module, (samples,)).backward()  # type: ignore[no-untyped-call]
        plain.step()
    assert torch.equal(next(alone.module.parameters()), next(module.parameters()))
    accounting = alone.coordinator.reporting.accounting()
    assert accounting is not None and accounting.balanced and accounting.applied == accounting.batches == 14
