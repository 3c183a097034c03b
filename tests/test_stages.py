"""Several workers that compute one model together have its gradient, its loss and its fate in common."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.model_parallel.execution.submodel import Submodel
from rainband.model_parallel.execution.worker import ReplicaPull
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_loss import build_model
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.strategy import Batch
from rainband.tasks.task import parameter_groups
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.stage_tasks import Shaped, planned, whole_gradient, worker_of

NAMES = ["chain", "skips", "branches", "tied", "several", "recurrent", "transformer", "on_shapes"]
BY_SAMPLE = ["chain", "branches", "tied", "several", "transformer"]  # the others mix the samples of a batch
BATCH = Batch(0, 1, 7)


def stage_gradient(task: Shaped, plan: StagePlan, order: list[int] | None = None) -> tuple[list[Any], MemoryNetwork]:
    network = MemoryNetwork(plan.size)
    workers = [worker_of(task, plan, machine, network) for machine in range(plan.size)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers], order)
    return gradients, network


def assert_same(task: Shaped, gradients: list[Any]) -> None:
    """Each parameter's gradient is on exactly one of the workers, and is the whole model's."""
    whole = whole_gradient(task, BATCH)
    for number, expected in enumerate(whole.tensors):
        held = [gradient.tensors[number] for gradient in gradients if gradient.tensors[number] is not None]
        assert len(held) == (expected is not None)
        if expected is not None:
            torch.testing.assert_close(held[0], expected, rtol=1e-9, atol=1e-12)
    for gradient in gradients:
        assert gradient.loss == pytest.approx(whole.loss, rel=1e-9)
        assert (gradient.samples, gradient.batches, gradient.is_finite) == (whole.samples, whole.batches, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_team_has_the_gradient_and_loss_of_the_whole_model(name: str, stages: int) -> None:
    task = Shaped(name)
    gradients, _ = stage_gradient(task, planned(task, stages))
    assert_same(task, gradients)


@pytest.mark.parametrize("name", BY_SAMPLE)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("microbatches", [2, 3, 9])
def test_a_batch_in_microbatches_has_the_same_gradient(name: str, schedule: str, microbatches: int) -> None:
    task = Shaped(name)  # three of four samples are of unequal size, and nine are more than there are
    gradients, _ = stage_gradient(task, planned(task, 2, microbatches=microbatches, schedule=schedule))
    assert_same(task, gradients)


@given(st.sampled_from(NAMES), st.integers(2, 3), st.integers(0, 10_000), st.permutations(range(3)))
@settings(max_examples=15)
def test_units_may_be_anywhere_and_workers_may_be_slow(name: str, machines: int, seed: int, order: list[int]) -> None:
    task = Shaped(name)
    dice = random.Random(seed)
    units = cut(task.model(), task.data().batch(range(2))).units
    placement = {unit: dice.randrange(machines) for unit in units}
    first, last = units[0], units[-1]
    placement |= {first: 0, last: machines - 1, units[len(units) // 2]: 1 % machines}
    plan = planned(task, placement, kind="partition")
    gradients, _ = stage_gradient(task, plan, [machine for machine in order if machine < plan.size])
    assert_same(task, gradients)


def test_a_value_crosses_once_for_each_machine_and_microbatch() -> None:
    task = Shaped("branches")
    units = cut(task.model(), task.data().batch(range(2))).units
    right = {"right", "sigmoid"}
    plan = planned(task, {unit: int(unit in right) for unit in units}, kind="partition", microbatches=2)
    _, network = stage_gradient(task, plan)
    crossing = [(to, tag[3:]) for _, to, tag in network.sent if tag[-2] in ("value", "gradient")]
    there = [(1, (microbatch, "value", "tanh")) for microbatch in range(2)] + [
        (0, (m, "value", "sigmoid")) for m in range(2)
    ]
    back = [(0, (m, "gradient", "tanh")) for m in range(2)] + [(1, (m, "gradient", "sigmoid")) for m in range(2)]
    assert sorted(crossing) == sorted(there + back)


def test_parameters_are_held_by_one_worker_each() -> None:
    task = Shaped("chain")
    plan = planned(task, 2)
    workers = [worker_of(task, plan, machine, MemoryNetwork(2)) for machine in range(2)]
    memory = [sum(vector.numel() for vector in worker.flat.vectors) for worker in workers]
    names = [set(worker.submodel.held()) for worker in workers]
    assert names[0] == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert names[1] == {"4.weight", "4.bias"}
    assert memory == [2 * (64 + 16), 32 + 16]  # each parameter begins at a multiple of 16 elements
    emptied = [p.numel() for worker in workers for p in worker.submodel.model.parameters()]
    assert emptied == [64, 8, 64, 8, 0, 0, 0, 0, 0, 0, 24, 3]


def test_a_tied_weight_is_held_by_the_first_who_uses_it_and_given_to_the_others() -> None:
    task = Shaped("tied")
    plan = planned(task, {"embed": 0, "hidden": 1, "tanh": 1, "out": 2})
    network = MemoryNetwork(3)
    workers = [worker_of(task, plan, machine, network) for machine in range(3)]
    with torch.no_grad():  # what the others have is not believed
        workers[2].submodel.ties[0].parameter.fill_(7)
    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    assert_same(task, gradients)
    assert [sum(t is not None for t in gradient.tensors) for gradient in gradients] == [1, 2, 0]


def test_what_is_not_finite_on_one_worker_is_skipped_by_all() -> None:
    task = Shaped("chain")
    plan = planned(task, 2)
    network = MemoryNetwork(2)
    workers = [worker_of(task, plan, machine, network) for machine in range(2)]
    module = workers[0].submodel.model.get_submodule("0")
    assert isinstance(module, nn.Linear)
    module.weight.register_hook(lambda gradient: gradient * float("nan"))
    mine, theirs = run_together([worker.gradient(BATCH) for worker in workers])
    assert mine.is_finite is False
    assert theirs.is_finite is False
    assert all(t is None or bool(t.isfinite().all()) for t in theirs.tensors)  # of itself it would not have known


def test_a_plan_for_another_model_is_refused_with_what_to_do() -> None:
    plan = planned(Shaped("chain"), 2)
    with pytest.raises(ValueError, match="make a new one with rainband placement"):
        worker_of(Shaped("branches"), plan, 0, MemoryNetwork(2))


# ---- the end ----


def waiting_for_an_order() -> tuple[list[Any], Any, Any]:
    """Three workers, of whom the last has asked for its first work item; and its loop, with what it waits for."""
    task, network = Shaped("chain"), MemoryNetwork(3)
    workers = [worker_of(task, planned(task, 3), place, network) for place in range(3)]
    loop = workers[2].work_items().__anext__().__await__()
    return workers, loop, next(loop)


def test_the_end_of_another_is_no_reason_to_miss_what_the_first_has_still_to_say() -> None:
    workers, loop, wanted = waiting_for_an_order()
    workers[1].links.say_end()
    assert not wanted.may_never_complete(stopping=False) and not wanted.ready()
    workers[0].order("over", None)  # was under way
    assert wanted.ready()
    with pytest.raises(StopAsyncIteration):
        next(loop)


def test_a_wait_in_vain_for_the_first_fails_and_its_later_messages_still_arrive() -> None:
    workers, loop, wanted = waiting_for_an_order()
    workers[0].links.say_end()
    assert wanted.may_never_complete(stopping=False)
    loop.close()  # the strategy is over; from now on its process follows orders
    workers[0].order("answer", None)
    assert workers[2].next_order().ready()


# ---- models that are built without values ----


class Deferred(Shaped):
    deferred = True


def built(task: Shaped, places: int) -> list[Any]:
    plan = planned(task, places)
    shares = []
    for place in range(places):
        model = build_model(task)
        submodel = Submodel(task, model, task.data(), plan, place)
        submodel.flat(parameter_groups(task, model))
        shares.append(submodel)
    return shares


def test_a_deferred_model_has_values_only_where_they_are_used() -> None:
    shares = built(Deferred("chain"), 2)
    there = [[name for name, p in submodel.model.named_parameters() if not p.is_meta] for submodel in shares]
    assert there == [["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]]


def test_first_values_are_a_function_of_the_name_and_the_seed() -> None:
    one, other = built(Deferred("chain"), 2), built(Deferred("chain"), 3)
    values = [{key: v for submodel in shares for key, v in submodel.held().items()} for shares in (one, other)]
    assert values[0].keys() == values[1].keys() == dict(Shaped("chain").model().named_parameters()).keys()
    for key, value in values[0].items():
        assert torch.equal(value, values[1][key])
    assert not torch.equal(values[0]["0.weight"], values[0]["2.weight"])


def test_a_deferred_model_trains_like_any_other() -> None:
    task = Deferred("transformer")
    gradients, _ = stage_gradient(task, planned(task, 2))
    assert all(gradient.is_finite for gradient in gradients)
    assert sum(t is not None for gradient in gradients for t in gradient.tensors) == len(
        list(task.model().parameters())
    )


def test_a_deferred_tied_weight_has_one_value_wherever_it_is_used() -> None:
    """The gradient is that of a whole model with the values that the workers made."""
    task = Deferred("tied")
    plan = planned(task, {"embed": 0, "hidden": 1, "tanh": 1, "out": 2})
    network = MemoryNetwork(3)
    workers = [worker_of(task, plan, place, network) for place in range(3)]
    held = {name: value.clone() for worker in workers for name, value in worker.submodel.held().items()}
    assert held.keys() == {"embed.weight", "hidden.weight", "hidden.bias"}

    class WithTheirValues(Shaped):
        def model(self) -> nn.Module:
            model = super().model()
            model.load_state_dict(held | {"out.weight": held["embed.weight"]})
            return model

    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    assert_same(WithTheirValues("tied"), gradients)


def test_a_layer_that_cannot_make_its_own_values_is_reported() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    class WithScale(Deferred):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), Scale()).double()

    with pytest.raises(ValueError, match=r"'1' \(Scale\) has parameters .* and no reset_parameters\(\)"):
        built(WithScale("chain"), 2)


def test_a_tied_weight_is_given_anew_for_an_answer() -> None:
    """Its owner may have made an update since the last batch."""
    task = Shaped("tied")
    network = MemoryNetwork(2)
    workers = [worker_of(task, planned(task, 2), place, network) for place in range(2)]
    run_together([worker.gradient(BATCH) for worker in workers])
    whole = task.model()
    words = task.data().batch(range(4))
    with torch.no_grad():
        whole.get_parameter("embed.weight").mul_(2)
        workers[0].submodel.model.get_parameter("embed.weight").mul_(2)
    answer = run_together([worker.answer([0, False, list(words), {}]) for worker in workers])[0]
    torch.testing.assert_close(answer, whole.eval()(*words), rtol=0, atol=1e-15)


# ---- a round that is over for one of a team ----


class FakeTeam:
    """One other member, which says whether the round is still open for it."""

    others = (1,)

    def __init__(self, says: bool) -> None:
        self.says = says
        self.told: list[object] = []

    def tell_all(self, key: object, value: bool) -> None:
        self.told.append((key, value))

    async def receive(self, other: int, key: object) -> bool:
        assert (other, key) == (1, ("open", 3))
        return self.says


class FakePull:
    """A pull of round 3 that is open here, or over."""

    at_version = 3

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.pulls = self.leases = self
        self.skipped: list[int] = []

    def skip_rounds(self, last: int) -> None:
        self.skipped.append(last)

    def __await__(self) -> Generator[None, None, bool]:
        return self.is_open
        yield


@pytest.mark.parametrize(("mine", "theirs"), [(True, True), (True, False), (False, True)])
def test_a_round_that_is_over_for_one_of_a_team_is_over_for_all_of_it(mine: bool, theirs: bool) -> None:
    pull, links = FakePull(mine), FakeTeam(theirs)
    with pytest.raises(StopIteration) as end:
        ReplicaPull(pull, links).__await__().send(None)  # type: ignore[arg-type]
    assert end.value.value is (mine and theirs)
    assert links.told == [(("open", 3), mine)]  # in any case: the other waits for it
    assert pull.skipped == ([] if mine and theirs else [3])
