"""Partitioners against complete searches: the best plans of small models, with memory limits and two-level networks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rainband.model_parallel.placement import balanced as balanced_module
from rainband.model_parallel.placement.balanced import balanced
from rainband.model_parallel.placement.merge_units import along_chains, along_order
from rainband.model_parallel.placement.pipedream_planner import pipedream
from rainband.model_parallel.placement.placement import PlacedStage, Placement, check, from_placement, in_flight, memory
from rainband.model_parallel.placement.predict import partition_s, pipeline_s
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Resources, Unit

FREE = LinkSpeed(bytes_per_s=1e12, latency_s=0.0)


def chain(seconds: list[float], parameters: list[int] | None = None, activations: list[int] | None = None) -> Profile:
    """Units u0, u1, … one after the other; unit i takes a third of its time forward."""
    parameters = parameters or [0] * len(seconds)
    activations = activations or [0] * len(seconds)
    units = [
        Unit(f"u{i}", s / 3, 2 * s / 3, p, a)
        for i, (s, p, a) in enumerate(zip(seconds, parameters, activations, strict=True))
    ]
    values = [CutValue(f"v{i}", f"u{i}", (f"u{i + 1}",), a, a) for i, a in enumerate(activations[:-1])]
    return Profile("chain", 1, tuple(units), tuple(values))


def two_branches(seconds: float = 3.0, crossing: int = 0) -> Profile:
    """stem -> left and right -> join."""
    units = [Unit("stem", 0.0, 0.0), *(Unit(n, seconds / 3, seconds * 2 / 3) for n in ("left", "right")), Unit("join")]
    values = [
        CutValue("stem", "stem", ("left", "right"), crossing, crossing),
        CutValue("left", "left", ("join",), crossing, crossing),
        CutValue("right", "right", ("join",), crossing, crossing),
    ]
    return Profile("branches", 1, tuple(units), tuple(values))


# ---- the clock of partitions ----


def test_branches_on_two_machines_take_the_time_of_one() -> None:
    profile = two_branches(seconds=3.0)
    assert partition_s(profile, {"stem": 0, "left": 0, "right": 1, "join": 0}, FREE) == 3.0
    assert partition_s(profile, dict.fromkeys(profile.names, 0), FREE) == 6.0


def test_a_chain_on_two_machines_takes_as_long_as_on_one_and_its_messages() -> None:
    profile = chain([3.0, 3.0], activations=[5, 0])
    network = LinkSpeed(bytes_per_s=5.0, latency_s=0.5)
    assert partition_s(profile, {"u0": 0, "u1": 1}, network) == 6.0 + 2 * (0.5 + 1.0)


def test_integers_cost_time_on_the_way_there_only() -> None:
    profile = Profile("", 1, (Unit("a", 1.0, 0.0), Unit("b", 1.0, 0.0)), (CutValue("a", "a", ("b",), 10, 0),))
    assert partition_s(profile, {"a": 0, "b": 1}, LinkSpeed(bytes_per_s=10.0, latency_s=0.0)) == 3.0


def test_going_back_and_forth_between_machines_is_played_in_the_order_of_levels() -> None:
    profile = chain([3.0, 3.0, 3.0])
    network = LinkSpeed(bytes_per_s=1.0, latency_s=1.0)
    assert partition_s(profile, {"u0": 0, "u1": 1, "u2": 0}, network) == 9.0 + 4 * 1.0


# ---- balanced ----


def test_branches_go_to_two_machines_when_sending_is_cheap_and_to_one_when_it_is_dear() -> None:
    profile = two_branches(seconds=3.0, crossing=10)
    cheap = balanced(profile, Resources(num_machines=2, network=LinkSpeed(bytes_per_s=1e9, latency_s=0.0)))
    dear = balanced(profile, Resources(num_machines=2, network=LinkSpeed(bytes_per_s=1.0, latency_s=0.0)))
    assert len(cheap.stages) == 2 and cheap.predicted is not None and cheap.predicted.batch_s == pytest.approx(3.0)
    assert len(dear.stages) == 1 and dear.predicted is not None and dear.predicted.batch_s == 6.0


def test_a_chain_stays_on_one_machine_unless_memory_forces_it_apart() -> None:
    profile = chain([3.0, 3.0, 3.0], parameters=[100, 100, 100])
    free = balanced(profile, Resources(num_machines=3, network=FREE))
    tight = balanced(profile, Resources(num_machines=3, memory_bytes=600, network=FREE))  # 100 bytes need 3 * 100
    assert [len(stage.units) for stage in free.stages] == [3]
    assert sorted(len(stage.units) for stage in tight.stages) == [1, 2]


def test_a_model_that_fits_nowhere_is_refused_with_what_to_type() -> None:
    profile = chain([1.0, 1.0], parameters=[100, 100])
    with pytest.raises(ValueError, match=r"does not fit on 2 machines of 299 bytes: use more machines"):
        balanced(profile, Resources(num_machines=2, memory_bytes=299))


@st.composite
def graphs(draw: st.DrawFn) -> Profile:
    """Three to six units; each reads from one or two earlier ones."""
    count = draw(st.integers(3, 6))
    units, readers = [], {number: [] for number in range(count)}
    for number in range(count):
        forward, backward = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        units.append(
            Unit(f"u{number}", float(forward), float(backward), draw(st.integers(0, 50)), draw(st.integers(0, 9)))
        )
        for maker in draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=2)) if number else ():
            readers[maker].append(f"u{number}")
    sizes = [draw(st.integers(0, 4)) for _ in range(count)]
    values = [CutValue(f"v{n}", f"u{n}", tuple(found), sizes[n], sizes[n]) for n, found in readers.items() if found]
    return Profile("graph", 1, tuple(units), tuple(values))


@given(profile=graphs(), machines=st.integers(1, 3), speed=st.sampled_from([0.5, 2.0, 100.0]))
def test_the_search_by_moves_is_near_the_complete_one_and_never_better(
    profile: Profile, machines: int, speed: float
) -> None:
    resources = Resources(num_machines=machines, memory_bytes=600, network=LinkSpeed(bytes_per_s=speed, latency_s=0.1))
    placements = [dict(zip(profile.names, p, strict=True)) for p in product(range(machines), repeat=len(profile.names))]
    plans = [from_placement(profile, placement, "", machines) for placement in placements]
    times = [
        (len(plan.stages), partition_s(profile, plan.placement(), resources.network))
        for plan in plans
        if fits(plan, profile, resources)
    ]
    if not times:
        return
    best = min(seconds for _, seconds in times)
    complete = balanced(profile, resources)
    check(complete, profile, resources)
    assert complete.predicted is not None
    found = (len(complete.stages), complete.predicted.batch_s)
    assert found == min((stages, seconds) for stages, seconds in times if seconds <= 1.05 * best)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced_module, "MAX_COMPLETE", 0)
        try:
            moved = balanced(profile, resources)
        except ValueError:  # no guess fitted
            return
    assert moved.predicted is not None and best <= moved.predicted.batch_s <= 2 * best


def test_a_second_machine_for_a_gain_of_one_percent_is_not_used() -> None:
    profile = two_branches(seconds=3.0)
    units = (Unit("stem", 194.0, 400.0), *profile.units[1:])  # 600 s on one machine, 597 on two
    plan = balanced(Profile("", 1, units, profile.values), Resources(num_machines=2, network=FREE))
    assert len(plan.stages) == 1


def fits(plan: Placement, profile: Profile, resources: Resources) -> bool:
    return not resources.memory_bytes or max(memory(plan, profile, resources)) <= resources.memory_bytes


# ---- pipedream ----


def test_a_last_stage_keeps_one_version_and_may_be_larger_than_the_first() -> None:
    """100 bytes twice and 200 once just fit into 200; the other way round 400 would be needed."""
    profile = chain([1.0, 1.0], parameters=[100, 200])
    plan = pipedream(profile, Resources(num_machines=2, memory_bytes=200, state_copies=0))
    assert plan.predicted is not None and plan.predicted.memory_bytes == (200, 200)
    with pytest.raises(ValueError, match="does not fit"):
        pipedream(chain([1.0, 1.0], parameters=[200, 100]), Resources(num_machines=2, memory_bytes=200, state_copies=0))


def test_equal_units_become_equal_stages() -> None:
    plan = pipedream(chain([1.0] * 4, parameters=[2 * 10**9] * 4), Resources(num_machines=2, network=LinkSpeed()))
    assert [stage.units for stage in plan.stages] == [("u0", "u1"), ("u2", "u3")]
    assert plan.predicted is not None and plan.predicted.batch_s == pytest.approx(2.0)


def test_a_heavy_first_unit_with_few_parameters_is_replicated() -> None:
    """As a convolution before fully connected layers: 3 s and 1 s on 4 machines give 1 s as 3 + 1."""
    plan = pipedream(chain([3.0, 1.0], parameters=[0, 10**10]), Resources(num_machines=4, network=LinkSpeed()))
    assert [(stage.machines, stage.units) for stage in plan.stages] == [((0, 1, 2), ("u0",)), ((3,), ("u1",))]


def test_a_model_with_few_parameters_and_many_activations_is_only_replicated() -> None:
    plan = pipedream(
        chain([1.0, 1.0], parameters=[1, 1], activations=[10**10, 1]), Resources(num_machines=4, network=LinkSpeed())
    )
    assert plan.replicas() == (4,)


def test_machines_that_do_not_help_stay_idle() -> None:
    profile = chain([1.0], parameters=[10**12])
    assert pipedream(profile, Resources(num_machines=4)).replicas() == (1,)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))


def every_pipeline(profile: Profile, machines: int) -> Iterator[Placement]:
    """All stretches and all numbers of replicas, on machines in their order."""
    count = len(profile.names)
    for stages in range(1, min(count, machines) + 1):
        for lengths, used in product(compositions(count, stages), range(stages, machines + 1)):
            for replicas in compositions(used, stages):
                yield pipeline(profile, lengths, replicas, machines)


def pipeline(profile: Profile, lengths: tuple[int, ...], replicas: tuple[int, ...], machines: int) -> Placement:
    stages, unit, machine = [], 0, 0
    for length, count in zip(lengths, replicas, strict=True):
        stages.append(PlacedStage(tuple(range(machine, machine + count)), profile.names[unit : unit + length]))
        unit, machine = unit + length, machine + count
    return Placement(model="", kind="pipeline", partitioner="", num_machines=machines, stages=tuple(stages))


def slowest(plan: Placement, profile: Profile, bytes_per_s: float) -> float:
    """The objective, written down once more for one level: replicas wait while they exchange gradients."""
    times, end = [], 0
    for stage in plan.stages:
        m = len(stage.machines)
        times.append(
            (profile.seconds(stage.units) + 2 * (m - 1) / m * profile.parameter_bytes(stage.units) / bytes_per_s) / m
        )
        end += len(stage.units)
        times.append(profile.crossing_bytes(end) / bytes_per_s)
    return max(times)


@settings(max_examples=150)
@given(
    profile=graphs(),
    machines=st.integers(1, 4),
    speed=st.sampled_from([1.0, 5.0, 20.0, 500.0]),
    limit=st.sampled_from([0, 150, 220, 300]),
)
def test_the_programme_finds_what_a_complete_search_finds(
    profile: Profile, machines: int, speed: float, limit: int
) -> None:
    resources = Resources(
        num_machines=machines, memory_bytes=limit, network=LinkSpeed(bytes_per_s=speed), state_copies=1
    )
    plans = [plan for plan in every_pipeline(profile, machines) if fits(plan, profile, resources)]
    if not plans:
        with pytest.raises(ValueError, match="does not fit"):
            pipedream(profile, resources)
        return
    best = min(slowest(plan, profile, speed) for plan in plans)
    found = pipedream(profile, resources)
    check(found, profile, resources)
    assert found.predicted is not None
    assert found.predicted.batch_s == pytest.approx(best) == pytest.approx(slowest(found, profile, speed))
    assert found.predicted.memory_bytes == memory(found, profile, resources)


def nested_best(profile: Profile, network: LinkSpeed, groups: int) -> float:
    """Complete search of the two-level plans: stretches on groups, and a pipeline inside each group."""
    count, size = len(profile.names), network.machines_per_group
    crossing = [profile.crossing_bytes(end) for end in range(count + 1)]

    def best(begin: int, end: int, machines: int, speed: float, inner: bool) -> float:
        found = []
        for stages in range(1, min(end - begin, machines) + 1):
            for lengths, replicas in product(compositions(end - begin, stages), compositions(machines, stages)):
                at, times = begin, []
                for length, m in zip(lengths, replicas, strict=True):
                    names = profile.names[at : at + length]
                    alone = profile.seconds(names) if inner else best(at, at + length, size, network.bytes_per_s, True)
                    exchange = 2 * (m - 1) / m * profile.parameter_bytes(names) / speed
                    times.append((alone + exchange if inner else max(alone, exchange)) / m)
                    at += length
                    times.append(crossing[at] / speed if at < end else 0.0)
                found.append(max(times))
        return min(found)

    return min(best(0, count, used, network.between_bytes_per_s, False) for used in range(1, groups + 1))


@settings(max_examples=25)
@given(profile=graphs(), shape=st.sampled_from([(2, 2), (3, 2), (2, 3)]), slow=st.sampled_from([1.0, 10.0, 200.0]))
def test_two_levels_find_what_a_complete_search_of_nested_plans_finds_or_better(
    profile: Profile, shape: tuple[int, int], slow: float
) -> None:
    size, groups = shape
    network = LinkSpeed(bytes_per_s=200.0, machines_per_group=size, between_bytes_per_s=slow)
    resources = Resources(num_machines=size * groups, network=network)
    found = pipedream(profile, resources)
    check(found, profile, resources)
    assert found.predicted is not None
    assert found.predicted.batch_s <= nested_best(profile, network, groups) * (1 + 1e-9)
    assert found.predicted.batch_s == pipeline_s(found, profile, network)


def test_with_slow_links_between_groups_a_pipeline_stays_inside_and_groups_are_replicas() -> None:
    """Two groups of two: units of 1 s; parameters are few, activations inside are many."""
    profile = chain([1.0, 1.0], parameters=[1, 1], activations=[100, 0])
    network = LinkSpeed(bytes_per_s=1000.0, machines_per_group=2, between_bytes_per_s=50.0)
    plan = pipedream(profile, Resources(num_machines=4, network=network))
    assert plan.predicted is not None and plan.predicted.batch_s == pytest.approx(0.5)
    assert all(len({network.group(machine) for machine in stage.machines}) == 2 for stage in plan.stages)


def test_replicas_in_groups_are_dealt_so_that_a_batch_stays_in_its_group() -> None:
    """Two groups of three: 2 s on two machines, then 1 s on one, whose many parameters make replicas inside dear."""
    profile = chain([2.0, 1.0], parameters=[1, 1200], activations=[100, 100])
    network = LinkSpeed(bytes_per_s=200.0, machines_per_group=3, between_bytes_per_s=2000.0)
    plan = pipedream(profile, Resources(num_machines=6, network=network))
    assert [stage.machines for stage in plan.stages] == [(0, 3, 1, 4), (2, 5)]
    for microbatch in range(8):
        groups = {network.group(stage.machines[microbatch % len(stage.machines)]) for stage in plan.stages}
        assert len(groups) == 1


def test_batches_on_the_way_are_those_of_the_paper() -> None:
    assert [in_flight((1, 1, 1, 1), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight((2, 1), stage) for stage in range(2)] == [2, 1]
    assert [in_flight((3, 1), stage) for stage in range(2)] == [2, 1]


# ---- fewer units ----


def test_merging_along_chains_keeps_branches_and_sums() -> None:
    profile = two_branches()
    units = (*profile.units[:3], Unit("extra", 1.0, 2.0, 5, 6), profile.units[3])
    values = (
        *profile.values[:2],
        CutValue("right", "right", ("extra",), 1, 1),
        CutValue("extra", "extra", ("join",), 1, 1),
    )
    small = along_chains(Profile("m", 1, units, values), at_most=1)
    assert [small.members[name] for name in small.profile.names] == [
        ("stem",),
        ("left",),
        ("right", "extra"),
        ("join",),
    ]
    assert small.profile.by_name["right"].seconds == 6.0


def test_merging_along_the_order_takes_the_lightest_neighbours_first() -> None:
    small = along_order(chain([9.0, 1.0, 1.0, 9.0]), at_most=3)
    assert list(small.members.values()) == [("u0",), ("u1", "u2"), ("u3",)]


def test_a_long_chain_is_planned_through_a_short_one() -> None:
    plan = pipedream(chain([1.0] * 100, parameters=[10**9] * 100), Resources(num_machines=2))
    assert plan.predicted is not None and plan.predicted.batch_s == pytest.approx(50.0, rel=0.1)
    assert sum(len(stage.units) for stage in plan.stages) == 100


def test_an_update_of_a_replicated_stage_costs_each_machine_the_bytes_of_a_ring() -> None:
    """Four machines, 100 bytes: each sends 2 * 3 / 4 of them, 150, once for four batches."""
    profile = chain([0.0], parameters=[100])
    everywhere = Placement(
        model="", kind="pipeline", partitioner="", num_machines=4, stages=(PlacedStage((0, 1, 2, 3), ("u0",)),)
    )
    assert pipeline_s(everywhere, profile, LinkSpeed(bytes_per_s=10.0)) == 150 / 10 / 4
    groups = LinkSpeed(bytes_per_s=1e9, machines_per_group=2, between_bytes_per_s=10.0)
    assert (
        pipeline_s(everywhere, profile, groups) == 100 / 10 / 4
    )  # two groups: 2 * 1 / 2 of 100, once for four batches


def test_batches_are_dealt_to_all_replicas_alike_also_where_a_group_has_fewer() -> None:
    """Three machines of two groups: each takes every third batch of 6 s."""
    profile = chain([6.0])
    plan = Placement(
        model="", kind="pipeline", partitioner="", num_machines=4, stages=(PlacedStage((0, 1, 2), ("u0",)),)
    )
    assert pipeline_s(plan, profile, LinkSpeed(machines_per_group=2)) == 2.0


def test_messages_wait_for_the_cards_they_leave_by_and_come_to() -> None:
    """Values of 10 bytes at 10 bytes/s: two to different machines leave one after the other, two to one come so."""
    fan_out = Profile("", 1, (Unit("a"), Unit("b"), Unit("c")), (CutValue("a", "a", ("b", "c"), 10, 0),))
    fan_in = Profile(
        "", 1, (Unit("a"), Unit("b"), Unit("c")), (CutValue("a", "a", ("c",), 10, 0), CutValue("b", "b", ("c",), 10, 0))
    )
    network = LinkSpeed(bytes_per_s=10.0, latency_s=0.5)
    assert partition_s(fan_out, {"a": 0, "b": 1, "c": 2}, network) == 0.5 + 2.0
    assert partition_s(fan_out, {"a": 0, "b": 1, "c": 1}, network) == 0.5 + 1.0  # once for both readers
    assert partition_s(fan_in, {"a": 0, "b": 1, "c": 2}, network) == 0.5 + 2.0


def test_all_to_all_takes_as_long_as_one_card_needs_for_the_others() -> None:
    """Four machines, each with a value of 10 bytes for the three others: 3 s at 10 bytes/s, not 12."""
    units = tuple(Unit(f"{layer}{n}") for layer in "ab" for n in range(4))
    values = tuple(CutValue(f"a{n}", f"a{n}", ("b0", "b1", "b2", "b3"), 10, 0) for n in range(4))
    where = {unit.name: int(unit.name[1]) for unit in units}
    profile = Profile("", 1, units, values)
    assert partition_s(profile, where, LinkSpeed(bytes_per_s=10.0, latency_s=0.5)) == 0.5 + 3.0
