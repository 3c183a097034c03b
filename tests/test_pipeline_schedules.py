"""Every schedule, for all small sizes, against its formulas; and a checker that finds what is wrong with a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.model_parallel.drawing.text import schedule_lines
from rainband.model_parallel.placement.placement import in_flight
from rainband.model_parallel.schedules.builders import gpipe, interleaved, one_f_one_b, pipedream, pipedream_2bw
from rainband.model_parallel.schedules.check import Costs, check
from rainband.model_parallel.schedules.play import Send, play
from rainband.model_parallel.schedules.table import Action, Table

SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 13)]


def test_they_read_as_in_the_papers() -> None:
    assert str(gpipe(2, 3)).splitlines() == ["0F0 0F1 0F2 0B0 0B1 0B2 0U0", "1F0 1F1 1F2 1B0 1B1 1B2 1U0"]
    assert str(one_f_one_b(2, 3)).splitlines() == ["0F0 0F1 0B0 0F2 0B1 0B2 0U0", "1F0 1B0 1F1 1B1 1F2 1B2 1U0"]
    assert str(pipedream([1, 1], 3)).splitlines() == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]
    assert str(interleaved(2, 2, 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0U0 2U0",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 1U0 3U0",
    ]
    assert str(pipedream([2, 1], 4)).splitlines() == [
        "0F0 0F2 0B0 0U0 0B2 0U1",
        "0F1 0F3 0B1 0U0 0B3 0U1",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3",
    ]


@given(
    size=st.sampled_from(SIZES),
    times=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    name=st.sampled_from([gpipe, one_f_one_b]),
)
def test_the_bubble_of_a_flush_is_the_same_for_gpipe_and_1f1b_whatever_the_times(
    size: tuple[int, int], times: tuple[int, int], name: object
) -> None:
    stages, microbatches = size
    table = name(stages, microbatches)  # type: ignore[operator]
    state = check(table, Costs(forward_s=(float(times[0]),), backward_s=(float(times[1]),)))
    assert state.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert state.total_s == pytest.approx((microbatches + stages - 1) * sum(times))


def test_gpipe_at_four_by_four_idles_for_three_sevenths() -> None:
    assert check(gpipe(4, 4)).bubble == pytest.approx(3 / 7)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_with_a_flush_1f1b_keeps_fewer_activations_and_all_keep_one_version(stages: int, microbatches: int) -> None:
    for batches in (1, 2):
        first, second = check(gpipe(stages, microbatches, batches)), check(one_f_one_b(stages, microbatches, batches))
        assert first.peak_activations == (microbatches,) * stages
        assert second.peak_activations == tuple(min(microbatches, stages - stage) for stage in range(stages))
        assert first.peak_versions == second.peak_versions == (1,) * stages


@pytest.mark.parametrize(("machines", "microbatches"), [size for size in SIZES if size[1] % size[0] == 0])
@pytest.mark.parametrize("stages_per_worker", [1, 2, 3])
def test_interleaving_divides_the_bubble(machines: int, microbatches: int, stages_per_worker: int) -> None:
    state = check(interleaved(machines, stages_per_worker, microbatches))
    assert state.bubble == pytest.approx((machines - 1) / (stages_per_worker * microbatches + machines - 1))
    total = stages_per_worker * microbatches
    ahead = [
        total if microbatches == machines else 2 * (machines - m - 1) + (stages_per_worker - 1) * machines
        for m in range(machines)
    ]
    assert state.peak_activations == tuple(min(total, count + 1) for count in ahead)
    assert state.peak_versions == (1,) * machines


def versions_needed(delay: int, microbatches: int) -> int:
    """A stage that is `delay` microbatches ahead of its backwards: those of the batches on the way, and the newest.

    From 2 * delay microbatches on it is delay + 1; in shorter runs several of them use the first version.
    """
    if delay == 0 or microbatches == 1:
        return 1
    return min(delay + 1, max(2, microbatches - delay + 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_pipedream_never_waits_and_keeps_a_version_for_each_batch_on_the_way(stages: int, microbatches: int) -> None:
    state = check(pipedream([1] * stages, microbatches))
    assert state.bubble == pytest.approx(
        (stages - 1) / (microbatches + stages - 1)
    )  # filling and draining, once for the run
    assert state.peak_activations == tuple(min(microbatches, stages - stage) for stage in range(stages))
    assert state.peak_versions == tuple(versions_needed(stages - 1 - stage, microbatches) for stage in range(stages))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_vertical_sync_costs_every_stage_the_versions_of_the_first(stages: int, microbatches: int) -> None:
    state = check(pipedream([1] * stages, microbatches, vertical_sync=True))
    assert state.peak_versions == (versions_needed(stages - 1, microbatches),) * stages


@pytest.mark.parametrize(("stages", "microbatches"), [size for size in SIZES if size[1] >= size[0]])
def test_two_buffers_are_two_and_never_wait(stages: int, microbatches: int) -> None:
    batches = 4
    state = check(pipedream_2bw(stages, microbatches, batches))
    assert set(state.peak_versions) == {2}
    assert state.bubble == pytest.approx((stages - 1) / (batches * microbatches + stages - 1))
    assert state.peak_activations == tuple(min(batches * microbatches, stages - stage) for stage in range(stages))


@pytest.mark.parametrize("replicas", [(2,), (2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (4, 2, 1), (1, 3, 2)])
@pytest.mark.parametrize("microbatches", [1, 5, 12, 24])
def test_replicas_keep_what_the_planner_counts_on(replicas: tuple[int, ...], microbatches: int) -> None:
    state = check(pipedream(replicas, microbatches))
    counted = [in_flight(replicas, stage) for stage, count in enumerate(replicas) for _ in range(count)]
    assert all(kept <= most for kept, most in zip(state.peak_activations, counted, strict=True))
    assert all(kept <= most for kept, most in zip(state.peak_versions, counted, strict=True))
    if microbatches == 24:
        assert state.peak_activations == tuple(counted)


def test_a_stage_with_twice_the_work_and_two_machines_keeps_up() -> None:
    costs = Costs(forward_s=(2.0, 1.0), backward_s=(4.0, 2.0))
    alone = check(pipedream([1, 1], 40), costs).total_s
    assert check(pipedream([2, 1], 40), costs).total_s == pytest.approx(alone / 2, rel=0.1)


def test_sending_takes_time_too() -> None:
    assert check(gpipe(2, 1), Costs(send_s=0.5)).total_s == 2 * 3.0 + 2 * 0.5


# ---- the checker ----


def changed(table: Table, machine: int, row: list[Action]) -> Table:
    return replace(table, rows=(*table.rows[:machine], tuple(row), *table.rows[machine + 1 :]))


def test_messages_queue_at_the_reader_in_the_order_of_arrival() -> None:
    """Machine 1 is done after 1 s and machine 0 after 3: its message is first, though it is named last."""
    sends = [Send(("a",), ("c",), occupies_s=10.0), Send(("b",), ("d",), occupies_s=10.0)]
    times = play([["a"], ["b"], ["d", "c"]], {"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0}, sends)
    assert (times.start_s["d"], times.start_s["c"]) == (11.0, 21.0)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    row = list(one_f_one_b(2, 2).rows[0])
    row[1], row[2] = row[2], row[1]  # F0 B0 F1 B1: fine; then let stage 1 want F1 first
    other = list(one_f_one_b(2, 2).rows[1])
    other[0], other[2] = other[2], other[0]
    table = changed(changed(one_f_one_b(2, 2), 0, row), 1, other)
    with pytest.raises(
        ValueError, match="one_f_one_b deadlocks: machine 0 at 0B0, machine 1 at 1F1 wait for each other"
    ):
        check(table)


@pytest.mark.parametrize("size", [(3, 4), (2, 6)])
def test_a_table_that_lacks_or_repeats_an_action_is_refused(size: tuple[int, int]) -> None:
    table = gpipe(*size)
    with pytest.raises(ValueError, match="machine 1 lacks 1F0"):
        check(changed(table, 1, list(table.rows[1][1:])))
    with pytest.raises(ValueError, match="machine 0 does 0F0 2 times"):
        check(changed(table, 0, [table.rows[0][0], *table.rows[0]]))
    with pytest.raises(ValueError, match="machine 0 should not do 0F99"):
        check(changed(table, 0, [*table.rows[0], Action(0, "F", 99, 0)]))


def test_a_version_that_is_not_made_yet_cannot_be_used() -> None:
    table = pipedream([1, 1], 3)
    row = [a._replace(version=2) if str(a) == "0F1" else a for a in table.rows[0]]
    with pytest.raises(ValueError, match="0F1 uses version 2, but the newest is 0"):
        check(changed(table, 0, row))


def test_updates_come_in_their_order() -> None:
    table = gpipe(1, 1, batches=2)
    forwards = [a._replace(version=0) for a in table.rows[0] if a.kind != "U"]
    row = [*forwards, Action(0, "U", 1, 1), Action(0, "U", 0, 2)]
    with pytest.raises(ValueError, match="0U1 makes version 1 after version 0"):
        check(changed(table, 0, row))


def test_without_stash_an_overwritten_version_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="which was overwritten by"):
        check(replace(pipedream([1, 1], 4), stash=False))
    assert check(pipedream([1, 1], 4, stash=False)).peak_versions == (1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpipe(0, 4), "at least 1 of each is required"),
        (lambda: interleaved(4, 2, 6), "6 is not a multiple of 4: use --microbatches 8"),
        (lambda: pipedream_2bw(4, 3, 2), "at least as many microbatches as stages, not 3 for 4"),
        (lambda: pipedream([2, 1], 4, vertical_sync=True), "use it without replicas"),
        (lambda: pipedream([0, 1], 4), "a stage requires at least one machine"),
    ],
)
def test_impossible_schedules_are_reported(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_a_timeline_has_a_line_for_each_machine() -> None:
    table = gpipe(2, 2)
    lines = schedule_lines(table, check(table), width=9)
    assert lines[2:4] == ["machine 0   01...aabb", "machine 1   .01aabb.."]
    assert "idle 33.3% of the time" in lines[5]
