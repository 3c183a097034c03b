"""The plan names every batch once; marks are a set, only smaller; groups never mix."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol.accepted_set import AcceptedSet, groups
from rainband.protocol.data_plan import (
    MAX_PORTION_BATCHES,
    BatchRange,
    DataPlan,
    bits,
    choose_portion_batches,
    num_batches,
    ranges,
    validate_push_id,
    work_items,
)
from tests.builders import make_plan, named, rounds_plan

# ---- the plan, free-running ----


def test_ten_samples_in_batches_of_four_are_three_batches_and_the_last_has_two() -> None:
    plan = make_plan(num_samples=10, batch_size=4, portion_batches=2)

    assert plan.batches_per_epoch == 3
    assert [plan.batches_in(p) for p in range(plan.num_portions)] == [2, 1]
    assert [plan.samples_in(0, 0), plan.samples_in(0, 1), plan.samples_in(1, 0)] == [4, 4, 2]


def test_samples_are_counted_with_the_short_last_batch_of_each_epoch() -> None:
    plan = make_plan(num_samples=10, batch_size=4, epochs=1 << 20)

    assert [plan.samples_of(batches) for batches in range(8)] == [0, 4, 8, 10, 14, 18, 20, 24]


def test_portions_are_numbered_through_all_epochs() -> None:
    plan = make_plan(num_batches=3, portion_batches=2, epochs=2)

    assert plan.num_portions == 4
    assert [plan.epoch_of(p) for p in range(4)] == [0, 0, 1, 1]
    assert [plan.number(p, 0) for p in range(4)] == [0, 2, 0, 2]
    assert plan.full(2) == 0b11 and plan.full(3) == 0b1


def test_the_position_in_the_schedule_is_the_fraction_of_the_run_before_the_batch() -> None:
    plan = make_plan(num_batches=4, portion_batches=2, epochs=2)

    assert plan.progress(0, 0) == 0
    assert plan.progress(1, 1) == 3 / 8
    assert plan.progress(2, 0) == 1 / 2


# ---- the plan, in rounds ----


def test_seven_batches_for_three_columns_are_three_rounds_and_the_last_has_one_work_item() -> None:
    plan = rounds_plan(num_batches=7, items_per_round=3, portion_batches=2)

    assert plan.rounds_per_epoch == 3
    assert [plan.items_in_round(r) for r in range(3)] == [3, 3, 1]


def test_a_portion_is_one_column_of_consecutive_rounds() -> None:
    plan = rounds_plan(num_batches=7, items_per_round=3, portion_batches=2)
    numbers = [[plan.number(p, k) for k in range(plan.batches_in(p))] for p in range(plan.num_portions)]

    assert numbers == [[0, 3], [1, 4], [2, 5], [6], [], []]
    assert [plan.position_of(p) for p in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [plan.round_of(0, 0), plan.round_of(0, 1), plan.round_of(3, 0)] == [0, 1, 2]


def test_rounds_are_numbered_through_all_epochs() -> None:
    plan = rounds_plan(num_batches=3, items_per_round=2, portion_batches=2, epochs=2)

    assert plan.rounds_per_epoch == 2
    assert [plan.items_in_round(r) for r in range(4)] == [2, 1, 2, 1]
    assert [plan.round_of(p, 0) for p in range(plan.num_portions)] == [0, 0, 2, 2]


def test_more_columns_than_batches_leave_columns_empty() -> None:
    plan = rounds_plan(num_batches=2, items_per_round=5, portion_batches=1)

    assert plan.rounds_per_epoch == 1 and plan.items_in_round(0) == 2
    assert [plan.batches_in(p) for p in range(plan.num_portions)] == [1, 1, 0, 0, 0]


def test_all_work_items_of_a_round_share_one_learning_rate() -> None:
    plan = rounds_plan(num_batches=6, items_per_round=3, portion_batches=2)

    assert {plan.progress(p, 0) for p in range(3)} == {0.0}
    assert {plan.progress(p, 1) for p in range(3)} == {0.5}


plans = st.builds(
    make_plan,
    num_batches=st.integers(1, 40),
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    portion_batches=st.integers(1, 7),
    items_per_round=st.integers(0, 6),
)


def all_batches(plan: DataPlan) -> list[tuple[int, int]]:
    return [(p, k) for p in range(plan.num_portions) for k in range(plan.batches_in(p))]


@given(plans)
def test_every_batch_of_every_epoch_has_exactly_one_name(plan: DataPlan) -> None:
    numbers = Counter((plan.epoch_of(p), plan.number(p, k)) for p, k in all_batches(plan))

    assert numbers == {(e, n): 1 for e in range(plan.epochs) for n in range(plan.batches_per_epoch)}


@given(plans)
def test_the_batches_below_a_portion_are_those_of_the_portions_before_it(plan: DataPlan) -> None:
    below = [plan.batches_below(portion) for portion in range(plan.num_portions + 1)]
    assert below == [sum(plan.batches_in(p) for p in range(portion)) for portion in range(plan.num_portions + 1)]


@given(plans)
def test_every_sample_of_every_epoch_is_in_exactly_one_batch(plan: DataPlan) -> None:
    assert sum(plan.samples_in(p, k) for p, k in all_batches(plan)) == plan.num_samples * plan.epochs
    assert all(1 <= plan.samples_in(p, k) <= plan.batch_size for p, k in all_batches(plan))


@given(plans.filter(lambda plan: plan.items_per_round > 0))
def test_a_round_is_made_of_as_many_work_items_as_it_says_in_columns_from_0_on(plan: DataPlan) -> None:
    rounds = range(plan.rounds_per_epoch * plan.epochs)
    positions: dict[int, list[int]] = {r: [] for r in rounds}
    for portion, k in all_batches(plan):
        positions[plan.round_of(portion, k)].append(plan.position_of(portion))

    assert {r: sorted(c) for r, c in positions.items()} == {r: list(range(plan.items_in_round(r))) for r in rounds}


@given(plans)
def test_positions_are_in_the_run_and_never_go_back_inside_a_portion(plan: DataPlan) -> None:
    for portion in range(plan.num_portions):
        positions = [plan.progress(portion, k) for k in range(plan.batches_in(portion))]
        assert positions == sorted(positions) and all(0 <= at < 1 for at in positions)


@pytest.mark.parametrize("wrong", ["num_samples", "batch_size", "epochs", "portion_batches", "batches_per_item"])
def test_a_plan_of_nothing_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}=0: must be at least 1"):
        make_plan(**{wrong: 0})


def test_a_portion_is_whole_work_items_and_fits_one_machine_word() -> None:
    with pytest.raises(ValueError, match="must be a multiple of batches_per_item=3"):
        make_plan(portion_batches=4, batches_per_item=3)
    with pytest.raises(ValueError, match="portion_batches=65: must be at most 64"):
        make_plan(portion_batches=65)


@given(st.integers(1, 10**6), st.integers(0, 100), st.integers(1, MAX_PORTION_BATCHES))
def test_a_portion_has_whole_work_items_and_at_most_64_batches(per_epoch: int, workers: int, work_item: int) -> None:
    chosen = choose_portion_batches(per_epoch, workers, work_item)

    assert work_item <= chosen <= MAX_PORTION_BATCHES and chosen % work_item == 0


def test_320_batches_for_four_workers_are_portions_of_20() -> None:
    assert choose_portion_batches(320, num_workers=4, batches_per_item=1) == 20
    assert choose_portion_batches(320, num_workers=4, batches_per_item=3) == 18


# ---- names ----


def test_a_range_is_its_batches() -> None:
    r = BatchRange(7, 2, 5, lease=1)

    assert r.mask == 0b11100 and len(r) == 3
    assert list(bits(r.mask)) == [2, 3, 4]


def test_batches_0_1_and_4_are_two_ranges() -> None:
    assert ranges(3, [4, 0, 1], lease=2) == (BatchRange(3, 0, 2, 2), BatchRange(3, 4, 5, 2))
    assert num_batches(ranges(3, [4, 0, 1], lease=2)) == 3


@given(st.sets(st.integers(0, 63)))
def test_a_name_is_exactly_its_batches(batches: set[int]) -> None:
    name = ranges(0, batches, lease=1)

    assert {k for r in name for k in bits(r.mask)} == batches
    assert num_batches(name) == len(batches)
    assert validate_push_id(make_plan(num_batches=64, portion_batches=64), name) is None


@pytest.mark.parametrize(
    "name, why",
    [
        (named(2, 0), "portion 2 is not in the plan of 2"),
        (named(-1, 0), "portion -1 is not in the plan of 2"),
        (named(0, 3, 5), "batches 3-5 are not in portion 0 of 4"),
        (named(0, -1, 1), "batches -1-1 are not in portion 0 of 4"),
        (named(0, 2, 2), "batches 2-2 are not in portion 0 of 4"),
        (named(0, 3, 1), "batches 3-1 are not in portion 0 of 4"),
        (named(0, 0, 2) + named(0, 1, 3), "batches of portion 0 are named twice"),
    ],
)
def test_a_name_outside_the_plan_is_refused_with_a_reason(name: tuple[BatchRange, ...], why: str) -> None:
    assert validate_push_id(make_plan(num_batches=8, portion_batches=4), name) == why


def test_in_rounds_a_push_is_one_work_item_of_the_round_it_names() -> None:
    plan = rounds_plan(num_batches=6, items_per_round=3, portion_batches=2)

    assert validate_push_id(plan, named(1, 1), at_version=1) is None
    for name, at_version in [(named(1, 1), 0), (named(1, 1), -1), (named(1, 0, 2), 0)]:
        assert "are not a work item of round" in (validate_push_id(plan, name, at_version) or "")
    for name in [(), named(0, 0) + named(1, 0)]:
        assert "a push in rounds must have one work item" in (validate_push_id(plan, name, at_version=0) or "")


# ---- marks ----


def test_marks_remember_which_and_not_how_far() -> None:
    accepted_set = AcceptedSet(make_plan(num_batches=8, portion_batches=4))

    assert accepted_set.add(named(0, 1)) == []
    assert accepted_set.has_all(named(0, 1)) and not accepted_set.has_some(named(0, 0))
    assert accepted_set.has_some(named(0, 0, 2)) and not accepted_set.has_all(named(0, 0, 2))
    assert accepted_set.count == 1 and accepted_set.of(0) == 0b0010


def test_a_complete_portion_is_reported_once_and_becomes_part_of_an_interval() -> None:
    accepted_set = AcceptedSet(make_plan(num_batches=8, portion_batches=4))

    assert accepted_set.add(named(1, 0, 4)) == [1]
    assert accepted_set.first_open == 0 and accepted_set.is_full(1)
    assert accepted_set.add(named(0, 0, 4)) == [0]
    assert accepted_set.first_open == 2 and accepted_set.open == {}
    assert accepted_set.add(named(1, 0, 4)) == []
    assert accepted_set.of(1) == 0b1111 and accepted_set.count == 8


def test_an_empty_column_is_complete_from_the_start() -> None:
    accepted_set = AcceptedSet(
        rounds_plan(num_batches=4, items_per_round=3, portion_batches=1)
    )  # rounds of 3 work items and of 1

    for portion in range(4):
        accepted_set.add(named(portion, 0))

    assert accepted_set.first_open == accepted_set.plan.num_portions == 6


@st.composite
def plans_and_names(draw: st.DrawFn) -> tuple[DataPlan, list[tuple[BatchRange, ...]]]:
    plan = draw(plans)
    portions = [p for p in range(plan.num_portions) if plan.batches_in(p)]
    names = []
    for _ in range(draw(st.integers(0, 12))):
        portion = draw(st.sampled_from(portions))
        batches = draw(st.sets(st.integers(0, plan.batches_in(portion) - 1), min_size=1))
        names.append(ranges(portion, batches, lease=1))
    return plan, names


def as_set(name: tuple[BatchRange, ...]) -> set[tuple[int, int]]:
    return {(r.portion, k) for r in name for k in bits(r.mask)}


@given(plans_and_names())
def test_marks_are_a_set(drawn: tuple[DataPlan, list[tuple[BatchRange, ...]]]) -> None:
    plan, names = drawn
    accepted_set, model = AcceptedSet(plan), set[tuple[int, int]]()
    for name in names:
        assert accepted_set.has_all(name) == (as_set(name) <= model)
        assert accepted_set.has_some(name) == bool(as_set(name) & model)
        already = {p for p in range(plan.num_portions) if accepted_set.is_full(p)}

        completed = accepted_set.add(name)

        model |= as_set(name)
        complete = {p for p in range(plan.num_portions) if {(p, k) for k in range(plan.batches_in(p))} <= model}
        assert set(completed) == complete - already and len(completed) == len(set(completed))
        assert accepted_set.count == len(model)
        assert {(p, k) for p in range(plan.num_portions) for k in bits(accepted_set.of(p))} == model
        assert {p for p in range(plan.num_portions) if accepted_set.is_full(p)} == complete
        assert all(p in complete for p in range(accepted_set.first_open))


@given(plans)
def test_when_all_is_had_the_marks_are_one_number(plan: DataPlan) -> None:
    accepted_set = AcceptedSet(plan)
    for portion in reversed(range(plan.num_portions)):
        accepted_set.add(ranges(portion, range(plan.batches_in(portion)), lease=1))

    assert (accepted_set.first_open, accepted_set.open, accepted_set.count) == (
        plan.num_portions,
        {},
        plan.num_batches,
    )


# ---- what is reassigned ----


def test_batches_are_grouped_by_the_blocks_that_have_them() -> None:
    # Batch 0 is on both blocks, 1 and 2 on the first only, 3 on neither.
    assert groups(0b1111, [0b0111, 0b0001]) == ((1, 2), (3,))


def test_blocks_that_have_different_halves_make_two_groups() -> None:
    assert groups(0b1111, [0b0011, 0b1100]) == ((0, 1), (2, 3))


def test_what_all_blocks_have_is_not_reassigned() -> None:
    assert groups(0b111, [0b111, 0b111]) == ()


def test_the_batches_of_a_work_item_are_all_of_one_group() -> None:
    assert work_items([(0, 1, 2), (4,), (5, 7)], batches_per_item=2) == [(0, 1), (2,), (4,), (5, 7)]


@given(st.integers(1, 12), st.lists(st.integers(0, 2**12 - 1), min_size=1, max_size=6), st.integers(1, 5))
def test_work_items_cover_what_is_missing_once_and_meet_no_block_half(length: int, masks: list[int], size: int) -> None:
    full = (1 << length) - 1
    masks = [mask & full for mask in masks]
    cut = work_items(groups(full, masks), size)

    missing = [k for k in range(length) if not all(mask >> k & 1 for mask in masks)]
    assert sorted(k for work_item in cut for k in work_item) == missing
    for work_item in cut:
        assert 1 <= len(work_item) <= size
        for mask in masks:
            assert len({mask >> k & 1 for k in work_item}) == 1  # has all of it, or nothing


def test_a_plan_survives_the_wire() -> None:
    plan = rounds_plan(epochs=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=DataPlan) == plan
