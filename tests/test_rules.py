"""The rules by themselves: they need no server, only something that writes down what they apply."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rainband.protocol.data_plan import DataPlan
from rainband.protocol.messages import Pull, Push
from rainband.rules import ApplyOnArrival, MeanOfRound
from rainband.rules.compensated import Around
from rainband.rules.rule import Rule
from tests.builders import item_push, make_plan, make_push, named, rounds_plan


class Recorder:
    """A block that only writes down."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self.version = 0
        self.clocks: dict[int, int] = {}
        self.applied: list[Tensor] = []
        self.absent: list[set[int]] = []
        self.order: list[list[Push]] = []

    def apply(self, gradient: Tensor, pushes: Sequence[Push], absent: Collection[int]) -> None:
        self.applied.append(gradient.clone())
        self.absent.append(set(absent))
        self.order.append(list(pushes))
        self.version += 1

    def advance(self, pushes: Sequence[Push]) -> None:
        self.order.append(list(pushes))
        self.version += 1

    def numbers(self) -> list[float]:
        return [gradient.item() for gradient in self.applied]


def number(value: float) -> Tensor:
    return torch.tensor([value])


# ---- apply on arrival ----


def test_every_gradient_is_applied_when_it_comes() -> None:
    rule, block = ApplyOnArrival(), Recorder(make_plan())

    rule.absorb(block, make_push(named(0, 1)), number(2.0))
    rule.absorb(block, make_push(named(0, 0), absent=(3,)), number(5.0))

    assert block.numbers() == [2.0, 5.0]
    assert block.absent == [set(), {3}]
    assert rule.buffered == 0


def test_a_skipped_push_is_no_step() -> None:
    rule, block = ApplyOnArrival(), Recorder(make_plan())
    rule.absorb(block, make_push(named(0, 1), skip="not finite"), None)
    assert block.applied == [] and block.version == 0


def test_anyone_reads_what_there_is() -> None:
    """Also a reader whose last push was refused, and so ticked no clock."""
    assert ApplyOnArrival().admits(Recorder(make_plan()), Pull(sequence=5, clock=5), reader=0)


# ---- the mean of a round ----


def test_1_2_and_6_give_3() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=3))

    rule.absorb(block, item_push(plan, 0, position=0), number(1.0))
    rule.absorb(block, item_push(plan, 0, position=1), number(2.0))
    assert block.numbers() == [] and rule.buffered == 2

    rule.absorb(block, item_push(plan, 0, position=2), number(6.0))
    assert block.numbers() == [3.0] and rule.buffered == 0


def test_a_work_item_of_three_samples_weighs_three_times_one_of_one() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=2))

    rule.absorb(block, item_push(plan, 0, position=0, samples=3), number(2.0))
    rule.absorb(block, item_push(plan, 0, position=1, samples=1), number(10.0))

    assert block.numbers() == [4.0]  # (3 * 2 + 1 * 10) / 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_bits_do_not_depend_on_who_was_faster(order: tuple[int, ...]) -> None:
    """1 + 1e8 - 1e8 is 0 or 1 in float32, depending on the order of the sum."""
    work_items = [1.0, 1e8, -1e8]
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=3))

    for position in order:
        rule.absorb(block, item_push(plan, 0, position=position), number(work_items[position]))

    in_work_item_order = (number(work_items[0]) + number(work_items[1])).add_(number(work_items[2])) / 3
    assert torch.equal(block.applied[0], in_work_item_order)
    assert [push.push_id[0].portion for push in block.order[0]] == [0, 1, 2]


@pytest.mark.parametrize("order, stored", [((0, 1, 2, 3), 0), ((1, 0, 2, 3), 1), ((0, 3, 2, 1), 2), ((3, 2, 1, 0), 3)])
def test_only_gradients_that_arrive_before_their_turn_are_stored(order: tuple[int, ...], stored: int) -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(num_batches=8, items_per_round=4))

    most = 0
    for position in order:
        rule.absorb(block, item_push(plan, 0, position=position), number(4.0))
        most = max(most, len(rule.early))

    assert most == stored and block.numbers() == [4.0] and rule.early == {}


def test_a_parameter_is_absent_only_if_it_is_absent_in_all_work_items() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=2))

    rule.absorb(block, item_push(plan, 0, position=0, absent=(1, 2)), number(1.0))
    rule.absorb(block, item_push(plan, 0, position=1, absent=(2, 3)), number(1.0))

    assert block.absent == [{2}]


def test_a_skipped_work_item_does_not_count_in_a_mean() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=3))

    rule.absorb(block, item_push(plan, 0, position=0, absent=(1,)), number(1.0))
    rule.absorb(block, item_push(plan, 0, position=1, samples=0, skip="not finite"), None)
    assert rule.buffered == 1
    rule.absorb(block, item_push(plan, 0, position=2, absent=(1,)), number(5.0))

    assert block.numbers() == [3.0] and block.absent == [{1}]


def test_a_round_in_which_all_is_skipped_goes_by_without_a_step() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=2))

    for position in (1, 0):
        rule.absorb(block, item_push(plan, 0, position=position, samples=0, skip="not finite"), None)

    assert block.applied == [] and block.version == 1


def test_the_short_last_round_of_an_epoch_needs_only_its_own_work_items() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(num_batches=4, items_per_round=3))
    for position in range(3):
        rule.absorb(block, item_push(plan, 0, position=position), number(1.0))

    rule.absorb(block, item_push(plan, 1, position=0), number(7.0))

    assert block.numbers() == [1.0, 7.0]


def test_a_round_begins_empty() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=2))
    for round_, value in ((0, 1.0), (1, 5.0)):
        for position in (1, 0):
            rule.absorb(block, item_push(plan, round_, position=position, absent=(round_,)), number(value))

    assert block.numbers() == [1.0, 5.0] and block.absent == [{0}, {1}]


def test_a_gradient_is_only_lent() -> None:
    """A gradient that waits for its turn is copied, because the sender's memory is used again."""
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=2))
    lent = number(4.0)

    rule.absorb(block, item_push(plan, 0, position=1), lent)
    lent.fill_(100.0)
    rule.absorb(block, item_push(plan, 0, position=0), lent.fill_(2.0))

    assert block.numbers() == [3.0]
    assert lent.item() == 2.0


def test_what_a_forgotten_worker_gave_stays() -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(items_per_round=3))
    rule.absorb(block, item_push(plan, 0, position=0, worker=1), number(1.0))
    rule.absorb(block, item_push(plan, 0, position=2, worker=1), number(6.0))

    rule.forget(block, worker=1)
    rule.flush(block)
    assert rule.buffered == 2 and block.numbers() == []

    rule.absorb(block, item_push(plan, 0, position=1, worker=0), number(2.0))
    assert block.numbers() == [3.0]


def test_version_r_may_be_read_once_it_is_there() -> None:
    block = Recorder(rounds_plan())
    block.version = 2
    assert [MeanOfRound().admits(block, Pull(1, at_version=r), reader=0) for r in (1, 2, 3)] == [True, True, False]


@given(st.permutations(range(4)), st.lists(st.integers(-99, 99), min_size=4, max_size=4))
def test_the_mean_does_not_depend_on_the_order_of_arrival(order: list[int], values: list[int]) -> None:
    rule, block = MeanOfRound(), Recorder(plan := rounds_plan(num_batches=4, items_per_round=4, portion_batches=1))

    for position in order:
        assert rule.buffered == order.index(position)
        rule.absorb(block, item_push(plan, 0, position=position), number(4.0 * values[position]))

    assert block.numbers() == [float(sum(values))]


def test_a_rule_around_another_hands_on_everything() -> None:
    """Do-nothing defaults would otherwise hide what the inner rule does."""
    declared = {name for name in vars(Rule) if not name.startswith("_")}
    assert declared <= set(vars(Around))
