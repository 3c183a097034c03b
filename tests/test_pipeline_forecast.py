"""The forecast of a run in stages: seconds, bytes and the order of events, from a profile with round numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Unit
from rainband.model_parallel.schedules.forecast import NEVER_FLUSHED, PARTITION, Forecast, TimeShare, as_batch

FREE = LinkSpeed(bytes_per_s=1e15, latency_s=0.0)
SLOW = LinkSpeed(bytes_per_s=10.0, latency_s=0.5)


def chain(units: int, size: int = 20) -> Profile:
    """Units that take 1 s forward and 2 s backward, with 40 bytes of parameters each; batches of 8."""
    names = [f"u{n}" for n in range(units)]
    values = tuple(CutValue(a, a, (b,), size, size) for a, b in pairwise(names))
    return Profile("chain", 8, tuple(Unit(name, 1.0, 2.0, 40) for name in names), values)


def plan_of(*stages: tuple[tuple[int, ...], tuple[str, ...]], kind: str = "pipeline") -> Placement:
    machines = 1 + max(machine for homes, _ in stages for machine in homes)
    made = tuple(PlacedStage(*stage) for stage in stages)
    return Placement(model="", kind=kind, partitioner="me", num_machines=machines, stages=made)  # type: ignore[arg-type]


TWO = plan_of(((0,), ("u0",)), ((1,), ("u1",)))


def test_a_batch_in_two_microbatches_takes_three_turns_of_half_its_time() -> None:
    """Of 3 s in each stage: (M + S - 1) / M = 3 / 2 of them."""
    forecast = Forecast(TWO, chain(2), "one_f_one_b", 2, FREE)
    assert forecast.batch_s == pytest.approx(4.5)
    assert forecast.alone_s == 6.0
    assert forecast.busy == pytest.approx(6 / (2 * 4.5))


def test_values_and_gradients_take_their_time_on_the_way() -> None:
    """1 s, 20 bytes at 10 a second and 0.5 s, 1 s; 2 s, the same way back, 2 s."""
    assert Forecast(TWO, chain(2), "gpipe", 1, SLOW).batch_s == pytest.approx(1 + 2.5 + 1 + 2 + 2.5 + 2)


def test_half_a_batch_has_half_of_the_bytes() -> None:
    """Forwards of half a second, 10 bytes on the way: the second one's gradient comes back last.

    Stage 0: F to 0.5, F to 1. Stage 1: F 2 - 2.5, F 2.5 - 3, B 3 - 4, B 4 - 5. Stage 0: B 6.5 - 7.5 after 5.5 - 6.5.
    """
    assert Forecast(TWO, chain(2), "gpipe", 2, SLOW).batch_s == pytest.approx(7.5)


def test_each_worker_computes_its_stage_and_sends_what_others_read() -> None:
    forecast = Forecast(plan_of(((0,), ("u0",)), ((1,), ("u1", "u2")), ((2,), ("u3",))), chain(4), "gpipe", 2, FREE)
    assert forecast.shares == [TimeShare(1, 3.0, 20.0), TimeShare(1, 6.0, 40.0), TimeShare(1, 3.0, 20.0)]


def test_a_value_that_two_machines_read_is_sent_twice_and_comes_back_from_both() -> None:
    profile = Profile("", 8, chain(3).units, (CutValue("u0", "u0", ("u1", "u2"), 20, 20),))
    forecast = Forecast(plan_of(((0,), ("u0",)), ((1,), ("u1",)), ((2,), ("u2",))), profile, "gpipe", 1, FREE)
    assert [submodel.sent_bytes for submodel in forecast.shares] == [40.0, 20.0, 20.0]


def test_replicas_share_batches_and_exchange_their_gradients() -> None:
    """Two batches make one update, for which each of two sends all 40 bytes: 40 for each batch, and 20 of values."""
    plan = plan_of(((0, 1), ("u0",)), ((2,), ("u1",)))
    forecast = Forecast(plan, chain(2), "pipedream", 1, FREE)
    assert forecast.shares == [TimeShare(2, 3.0, 60.0), TimeShare(1, 3.0, 20.0)]
    assert forecast.batch_s == pytest.approx(3.0)  # the second stage has every batch


def test_replicas_wait_for_each_others_gradients() -> None:
    """Two batches at once in 3 s, then 40 bytes at 10 a second and two times half a second."""
    plan = plan_of(((0, 1), ("u0",)))
    assert Forecast(plan, chain(1), "pipedream", 1, SLOW).batch_s == pytest.approx((3 + 4 + 1) / 2)


def test_stages_that_are_interleaved_on_a_machine_are_one_share() -> None:
    plan = plan_of(((0,), ("u0",)), ((1,), ("u1",)), ((0,), ("u2",)), ((1,), ("u3",)))
    forecast = Forecast(plan, chain(4), "interleaved", 4, FREE)
    assert forecast.shares == [TimeShare(1, 6.0, 60.0), TimeShare(1, 6.0, 60.0)]
    assert forecast.batch_s == pytest.approx(6 * 9 / 8)


def test_branches_of_a_partition_run_side_by_side() -> None:
    """u0, then u1 and u2 at once, then u3; 2 bytes each way are 0.7 s where they cross."""
    values = (
        CutValue("u0", "u0", ("u1", "u2"), 2, 2),
        CutValue("u1", "u1", ("u3",), 2, 2),
        CutValue("u2", "u2", ("u3",), 2, 2),
    )
    profile = Profile("", 8, chain(4).units, values)
    plan = plan_of(((0,), ("u0", "u1", "u3")), ((1,), ("u2",)), kind="partition")
    forecast = Forecast(plan, profile, PARTITION, 1, SLOW)
    assert forecast.batch_s == pytest.approx((1 + 0.7 + 1 + 0.7 + 1) + (2 + 0.7 + 2 + 0.7 + 2))
    assert forecast.shares == [TimeShare(1, 9.0, 4.0), TimeShare(1, 3.0, 4.0)]
    there, back = [d for d in forecast.spans(1) if d.rank == 1]
    assert (there.label, back.label) == ("F0", "B0")
    assert [there.from_s, there.to_s, back.from_s, back.to_s] == pytest.approx([1.7, 2.7, 7.1, 9.1])


def test_the_first_batch_begins_at_once_and_microbatches_have_numbers() -> None:
    done = Forecast(TWO, chain(2), "one_f_one_b", 2, FREE).spans(1)
    rows = [" ".join(d.label for d in done if d.rank == place) for place in (0, 1)]
    assert rows == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert min(d.from_s for d in done) == 0.0


@pytest.mark.parametrize("name", NEVER_FLUSHED)
def test_a_pipeline_that_is_never_flushed_is_shown_when_it_is_full(name: str) -> None:
    done = Forecast(TWO, chain(2), name, 1, FREE).spans(batches=3, first=40)
    assert [d.label for d in done if d.rank == 0] == ["F40", "B39", "F41", "B40", "F42", "B41"]
    assert sum(d.to_s - d.from_s for d in done) == pytest.approx(3 * 6.0)  # nobody waits


ALL = [
    Forecast(TWO, chain(2), "gpipe", 4, SLOW),
    Forecast(TWO, chain(2), "one_f_one_b", 3, SLOW),
    Forecast(plan_of(((0,), ("u0", "u1")), ((1,), ("u2",)), ((2,), ("u3",))), chain(4), "one_f_one_b", 5, FREE),
    Forecast(plan_of(*(((n % 2,), (f"u{n}",)) for n in range(4))), chain(4), "interleaved", 2, SLOW),
    Forecast(plan_of(((0,), ("u0", "u2")), ((1,), ("u1",)), kind="partition"), chain(3), PARTITION, 2, SLOW),
]


@pytest.mark.parametrize("forecast", ALL, ids=lambda forecast: f"{forecast.schedule}-{forecast.microbatches}")
@pytest.mark.parametrize("batches", [1, 3])
def test_what_is_drawn_is_what_is_predicted(forecast: Forecast, batches: int) -> None:
    done = forecast.spans(batches)
    assert max(d.to_s for d in done) == pytest.approx(batches * forecast.batch_s)
    computed = [sum(d.to_s - d.from_s for d in done if d.rank == p) for p in range(len(forecast.shares))]
    assert computed == pytest.approx([batches * submodel.compute_s for submodel in forecast.shares])
    for place in range(len(forecast.shares)):  # a worker does one thing at a time
        own = sorted((d.from_s, d.to_s) for d in done if d.rank == place)
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(own))


def test_a_batch_of_microbatches_takes_as_often_as_long_as_one() -> None:
    """A microbatch of 8 samples in 3 s, 20 bytes: 32 samples are four of them."""
    batch = as_batch(chain(2), 32)
    assert (batch.batch_size, batch.seconds(("u0",)), batch.values[0].forward_bytes) == (32, 12.0, 80)
    assert batch.parameter_bytes(("u0",)) == 40
