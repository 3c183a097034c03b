"""Rounds of split batches: members are killed, excluded, restarted, paused and skip at every place of the protocol."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rainband.rounds.member
import rainband.rounds.view
from rainband.rounds.average import Contribution, average, divisor_for, write
from rainband.rounds.board import LocalBoard, SharedMemory
from rainband.rounds.cut import by_member, cut_each, digest_of, part_sizes
from rainband.rounds.exchange import Part, RoundId
from rainband.rounds.joining import Joining
from rainband.rounds.member import RoundMember
from rainband.rounds.membership import RoundMembership
from rainband.rounds.rounds import RoundExchange
from rainband.rounds.view import Header, Member, RoundView, has_other_samples, next_view, up_to_date
from tests.round_runs import Plan, RoundRun, Script, explore

NONE: frozenset[tuple[int, int]] = frozenset()
RANK_1 = frozenset({(1, 0)})
BOTH = frozenset({(0, 0), (1, 0)})


# ---- parts ----


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (64, (1, 1, 1, 1), [16, 16, 16, 16]),
        (7, (1, 1, 1), [3, 2, 2]),
        (5, (1, 1, 1), [3, 2, 0]),  # two samples at least, so the third member has none
        (1, (1, 1), [1, 0]),
        (0, (1, 1), [0, 0]),
        (60, (5, 1), [50, 10]),
        (64, (5, 5, 5, 1), [20, 20, 20, 4]),
        (16, (100, 100, 1), [8, 8, 0]),  # two samples would take the last one longer than the others' parts
        (10, (1, 0, 1), [5, 0, 5]),
    ],
)
def test_a_batch_is_cut_in_proportion_to_the_shares(total: int, shares: tuple[float, ...], sizes: list[int]) -> None:
    assert list(part_sizes(total, shares)) == sizes


@given(st.integers(0, 300), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_every_sample_is_in_one_part_and_no_part_has_a_single_one(total: int, shares: list[float]) -> None:
    sizes = part_sizes(total, tuple(shares))
    assert sum(sizes) == total
    assert total == 1 or 1 not in sizes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.floats(0.01, 9.0), min_size=1, max_size=5))
def test_several_batches_in_a_round_are_each_cut_in_proportion(lengths: list[int], shares: list[float]) -> None:
    sizes = part_sizes(sum(lengths), tuple(shares))
    rows = cut_each(lengths, sizes)
    assert [sum(row) for row in rows] == lengths
    assert [sum(column) for column in zip(*rows, strict=True)] == list(sizes)
    for length, row in zip(lengths, rows, strict=True):
        assert all(
            part >= 0 and abs(part - length * size / sum(lengths)) < 2 for part, size in zip(row, sizes, strict=True)
        )
    numbers = by_member(range(sum(lengths)), rows)
    assert sorted(numbers) == list(range(sum(lengths)))
    if len(lengths) == 2:
        first = [k for k in numbers[: sizes[0]] if k < lengths[0]]
        assert first == list(range(rows[0][0]))  # of the first batch, the first ones are the first member's


# ---- the mean ----


def test_the_mean_is_weighted_by_samples_and_exact_for_whole_numbers() -> None:
    areas = [torch.tensor([3.0, 30.0]), torch.tensor([6.0, 12.0])]
    for mine in (0, 1, 2):  # rank 2 contributes nothing, and receives the mean
        out: list[torch.Tensor | None] = [areas[mine].clone() if mine < 2 else torch.zeros(2)]
        given_ = [Contribution(0, 2.0, 1, [areas[0]]), Contribution(1, 1.0, 1, [areas[1]])]
        assert average(out, mine, given_) == 3.0
        assert torch.equal(out[0], torch.tensor([4.0, 24.0]))  # type: ignore[arg-type]


def test_no_value_counts_as_zero_and_stays_none_if_nobody_has_one() -> None:
    ones = [torch.ones(2), torch.ones(1), torch.ones(1)]
    out: list[torch.Tensor | None] = [None, torch.ones(1), None]
    average(out, 1, [Contribution(0, 4.0, 0b001, ones), Contribution(1, 4.0, 0b010, ones)])
    assert [None if tensor is None else tensor.tolist() for tensor in out] == [[0.5, 0.5], [0.5], None]


@pytest.mark.parametrize("weights", [(8.0, 8.0), (9.0, 7.0), (3.0, 3.0, 3.0), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_members_get_the_same_bits(weights: tuple[float, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    areas = [[torch.randn(1000).to(dtype)] for _ in weights]
    contributions = [Contribution(rank, w, 1, areas[rank]) for rank, w in enumerate(weights)]
    results = []
    for mine in range(len(weights)):
        out: list[torch.Tensor | None] = [areas[mine][0].clone()]
        average(out, mine, contributions)
        results.append(out[0])
    assert all(torch.equal(results[0], result) for result in results)  # type: ignore[arg-type]
    expected = sum(w * a[0].double() for w, a in zip(weights, areas, strict=True)) / sum(weights)
    assert torch.allclose(results[0].double(), expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-6)  # type: ignore


def written(rank: int, weights: Sequence[float], values: torch.Tensor, raw: bool = False) -> Contribution:
    """Return what a member has in its area: multiplied, unless `raw`."""
    weight, divisor = float(weights[rank]), 0.0
    area = torch.zeros_like(values)
    if not raw:
        divisor = divisor_for(weight, float(sum(weights)), len(weights), [values])
    write([area], [values], weight / divisor if divisor else 1.0)
    return Contribution(rank, weight, 1, [area], divisor)


def means_of(given_: list[Contribution], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mean that each member computes."""
    outs: list[list[torch.Tensor | None]] = [[own.clone()] for own in values]
    for mine, out in enumerate(outs):
        assert average(out, mine, given_) == sum(one.weight for one in given_)
    return [out[0] for out in outs if out[0] is not None]


def test_a_contribution_is_multiplied_by_its_weight_so_that_whole_numbers_stay_exact() -> None:
    values = torch.tensor([6.0, 3.0])
    assert (divisor_for(33.0, 64.0, 2, [values]), divisor_for(12.0, 50.0, 2, [values])) == (64.0, 32.0)
    assert written(0, (12, 38), values).tensors[0].tolist() == [2.25, 1.125]
    assert (divisor_for(24.0, 48.0, 2, [values]), divisor_for(5.0, 15.0, 3, [values])) == (48.0, 10.0)
    assert written(0, (5, 5, 5), values).tensors[0].tolist() == [3.0, 1.5]  # alike, so they are divided by 1.5 later
    assert written(0, (48, 0), values).tensors[0].tolist() == [6.0, 3.0]  # no other one counts
    assert divisor_for(0.0, 48.0, 2, [values]) == divisor_for(24.0, 48.0, 2, [None, values.bfloat16()]) == 0.0


@given(st.sampled_from((2, 4)), st.integers(1, 99), st.floats(-(2.0**100), 2.0**100, width=32))
def test_the_mean_of_equal_values_with_equal_weights_is_that_value(number: int, weight: int, value: float) -> None:
    values = [torch.tensor([value]) for _ in range(number)]
    given_ = [written(rank, [weight] * number, own) for rank, own in enumerate(values)]
    if abs(value) > 1e-30:  # smaller ones lose bits
        assert [float(mean) for mean in means_of(given_, values)] == [value] * number


@pytest.mark.parametrize("weights", [(32, 32), (33, 31), (24, 24), (25, 23), (16, 16, 16), (1, 2, 4), (5, 0, 11)])
@pytest.mark.parametrize("lost", [None, 0, 1])
@pytest.mark.parametrize("raw", [None, 0, 1])
def test_multiplied_contributions_have_an_exact_mean_on_all_members(
    weights: tuple[int, ...], lost: int | None, raw: int | None
) -> None:
    """Also if a member was lost, whose weight the others counted with, and if one is not multiplied."""
    chance = torch.Generator().manual_seed(0)
    number = sum(weights) - (0 if lost is None else weights[lost])
    whole = [number * torch.randint(-99, 99, (50,), generator=chance).float() for _ in weights]
    rounded = [torch.randn(1000, generator=chance) for _ in weights]
    for values in (whole, rounded):
        given_ = [written(rank, weights, own, rank == raw) for rank, own in enumerate(values) if rank != lost]
        found = means_of(given_, values)
        assert all(torch.equal(found[0], other) for other in found)
        expected = sum(weights[one.rank] * values[one.rank].double() for one in given_) / number
        assert torch.allclose(found[0].double(), expected, rtol=1e-5, atol=1e-6)
        if values is whole:
            assert torch.equal(found[0].double(), expected)


# ---- one member ----


def test_one_member_has_whole_batches_and_unchanged_gradients() -> None:
    plan = Plan(1)
    script = Script(plan, SharedMemory(1, [torch.zeros(3)]), 0)
    board = LocalBoard(SharedMemory(1, [torch.zeros(3)]), 0)
    exchange = RoundExchange(board, script, lambda: 0.0)
    assert exchange.begin(0) == exchange.begin(0) == RoundId(0, 0)
    assert exchange.cut([5, 6, 7]) == Part([5, 6, 7], 0, 3, 3)
    tensors: list[torch.Tensor | None] = [torch.tensor([0.1, 0.2, 0.3])]
    outcome = exchange.mean(tensors, numbers=[0.5], scalars=[2.0])
    assert (outcome.took_part, outcome.weight, outcome.numbers, outcome.scalars) == (True, 3.0, (0.5,), (2.0,))
    assert torch.equal(tensors[0], torch.tensor([0.1, 0.2, 0.3]))  # type: ignore[arg-type]
    assert exchange.begin(0) == RoundId(0, 1)
    assert exchange.cut(None).is_over
    assert exchange.begin(1) == RoundId(1, 0)
    assert (exchange.members, exchange.is_first, exchange.view.applied) == ((0,), True, 3)


# ---- decisions ----


def header(**fields: object) -> Header:
    return Header(**{"kind": "mean", "count": 4, "view": 1, "since": 0, **fields})  # type: ignore[arg-type]


def decided(headers: dict[int, Header], samples: int = 9, **fields: object) -> RoundView:
    view = RoundView(0, 5, tuple(Member(rank, 1) for rank in range(3)), **fields)  # type: ignore[arg-type]
    return next_view(view, headers, headers, range(samples)).view


def test_the_part_of_a_lost_member_is_carried_over() -> None:
    after = decided({0: header(), 2: header()})
    assert (after.carried, after.applied, [m.rank for m in after.members]) == ((3, 4, 5), 6, [0, 2])


def test_a_member_that_missed_a_step_does_not_count_and_receives_the_state() -> None:
    headers = {0: header(), 1: header(count=3), 2: header()}
    assert up_to_date(headers) == {0, 2}
    view = RoundView(0, 0, tuple(Member(rank, 1) for rank in range(3)))
    decision = next_view(view, headers, headers, range(9))
    assert (decision.leader, decision.receivers, decision.view.carried) == (0, {1}, (3, 4, 5))


def test_a_member_with_another_batch_does_not_count() -> None:
    """A member that has missed a step may have other samples: it does not know what was carried over."""
    headers = {0: header(samples=7), 1: header(samples=8), 2: header(samples=7)}
    assert up_to_date(headers) == {0, 2}
    assert has_other_samples(headers[1], headers[0]) and not has_other_samples(headers[2], headers[0])
    assert not has_other_samples(header(samples=8, count=3), headers[0])
    assert not has_other_samples(header(kind="end"), headers[0])
    assert decided(headers).carried == (3, 4, 5)


def test_a_digest_tells_samples_and_their_order() -> None:
    assert digest_of([1, 2, 3]) == digest_of(range(1, 4)) != digest_of([1, 3, 2])
    assert digest_of(["a", "b"]) != digest_of(["b", "a"]) and digest_of(()) == 0  # type: ignore[list-item]
    assert digest_of([1, 2], 5) != digest_of([1, 2], 6)


def test_skipped_samples_count_with_their_reason() -> None:
    after = decided({0: header(), 1: header(kind="skip", reason="not finite"), 2: header()})
    assert (after.skipped, after.applied, after.carried) == ((("not finite", 3),), 6, ())


def test_deferred_samples_count_when_their_gradient_does_and_are_repeated_when_it_is_lost() -> None:
    after = decided({0: header(kind="defer"), 1: header(kind="defer"), 2: header(kind="defer")})
    assert (after.applied, after.deferred) == (0, ((0, (0, 1, 2)), (1, (3, 4, 5)), (2, (6, 7, 8))))
    members = tuple(Member(rank, 1) for rank in range(3))
    view = RoundView(0, 6, members, deferred=after.deferred)
    headers = {0: header(), 1: header()}
    later = next_view(view, headers, headers, range(10, 19)).view
    assert (later.applied, sorted(later.carried), later.deferred) == (12, [6, 7, 8, 16, 17, 18], ())


def test_parts_follow_the_measured_speeds_after_5_and_15_rounds_and_then_every_50() -> None:
    headers = {rank: header(speed=speed) for rank, speed in enumerate((50.0, 50.0, 10.0))}
    cut = [serial + 1 for serial in range(160) if decided(headers, serial=serial).shares]
    assert cut == [5, 15, 50, 100, 150]
    assert [serial for serial in range(20) if decided(headers, serial=serial, trial=4).shares] == [8, 18]
    after = decided(headers, serial=49)
    assert (after.shares, after.sizes(66)) == ((50.0, 50.0, 10.0), (30, 30, 6))
    alike = {rank: header(speed=speed) for rank, speed in enumerate((50.0, 52.0, 51.0))}
    assert decided(alike, serial=49).shares == ()  # not worth a new cut
    noisy = {rank: header(speed=speed) for rank, speed in enumerate((50.0, 65.0, 60.0))}
    assert [serial + 1 for serial in range(60) if decided(noisy, serial=serial).shares] == [50]  # few rounds are noise


def test_a_member_whose_parameters_differ_receives_the_state() -> None:
    headers = {0: header(fingerprint=7), 1: header(fingerprint=7), 2: header(fingerprint=8)}
    view = RoundView(0, 0, tuple(Member(rank, 1) for rank in range(3)))
    decision = next_view(view, headers, headers, range(9))
    assert (decision.receivers, decision.view.drifted, decision.view.applied) == ({2}, 1, 9)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_short_way_of_a_usual_round_decides_as_the_long_one(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {rank: header(since=2 - rank) for rank in range(number)}
    members = tuple(Member(rank, 1 + rank, 2 - rank) for rank in range(number))
    view = RoundView(1, 5, members, 8, (1.0, 2.0, 3.0)[:number], applied=8, skipped=(("why", 2),), transfers=4)
    short = next_view(view, headers, headers, range(9))
    monkeypatch.setattr(rainband.rounds.view, "_usual", lambda *_: None)
    assert short == next_view(view, headers, headers, range(9))


# ---- whole runs ----

QUICK = {
    "two workers": (Plan(2, (4, 3)), {}),
    "a kill": (Plan(2, (4,)), {"kills": 1}),
    "a skip": (Plan(2, (4, 3), skips=RANK_1), {}),
    "all skip": (Plan(2, (4, 3), skips=BOTH), {}),
    "two backward passes": (Plan(2, (4,), skips=RANK_1, double=True), {}),
    "a break": (Plan(2, (4, 3), epochs=2, breaks=RANK_1), {}),
    "all break": (Plan(2, (4, 3), epochs=2, breaks=BOTH), {}),
    "all pause": (Plan(2, (4, 3), pauses=BOTH), {}),
}
THOROUGH = {
    "three workers": (Plan(3, (7,)), {}),
    "fewer samples than workers": (Plan(3, (1,)), {}),
    "a kill in two rounds": (Plan(2, (4, 3)), {"kills": 1}),
    "a skip and a kill": (Plan(2, (4, 3), skips=RANK_1), {"kills": 1}),
    "a kill and a restart": (Plan(2, (4, 3)), {"kills": 1, "restarts": 1}),
    "a pause beyond the timeout": (Plan(2, (4, 3)), {"fences": 1}),
    "a skip and a pause": (Plan(2, (4, 3), skips=RANK_1), {"fences": 1}),
    "two backward passes, a skip and a kill": (Plan(2, (4, 3), skips=RANK_1, double=True), {"kills": 1}),
    "two epochs and a kill": (Plan(2, (3,), epochs=2), {"kills": 1}),
    "a break and a kill": (Plan(2, (4, 3), epochs=2, breaks=RANK_1), {"kills": 1}),
    "a pause and a kill": (Plan(2, (4, 3), pauses=frozenset({(1, 1)})), {"kills": 1}),
    "a kill of three": (Plan(3, (7,)), {"kills": 1}),
}


@pytest.mark.parametrize("name", QUICK)
def test_every_order_of_events_keeps_the_invariants(name: str) -> None:
    plan, events = QUICK[name]
    explore(plan, **events)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", THOROUGH)
def test_every_order_of_more_events_keeps_the_invariants(name: str) -> None:
    plan, events = THOROUGH[name]
    explore(plan, **events)


def random_run(seed: int) -> RoundRun:
    """Run to the end, with random events in a random order."""
    chance = random.Random(seed)
    num_workers = chance.choice((2, 3, 4))

    def some(number: int) -> frozenset[tuple[int, int]]:
        return frozenset((chance.randrange(num_workers), chance.randrange(6)) for _ in range(chance.randrange(number)))

    batches = tuple(chance.randrange(1, 9) for _ in range(3))
    plan = Plan(num_workers, batches, 2, some(3), chance.random() < 0.3, some(2) if chance.random() < 0.3 else NONE)
    plan = plan._replace(pauses=some(3))
    kills = chance.randrange(num_workers)
    run = RoundRun(plan, kills, chance.randrange(3), chance.randrange(kills + 1))
    rate = chance.choice((0.01, 0.03, 0.1))
    while actions := run.actions():
        events = [action for action in actions if action[0] not in ("step", "exclude")]
        steps = [action for action in actions if action[0] in ("step", "exclude")]
        run.do(chance.choice(events if events and (not steps or chance.random() < rate) else steps))
        run.check()
    run.check()
    return run


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32))
def test_random_events_keep_the_invariants(seed: int) -> None:
    random_run(seed)


def test_a_worker_that_returns_after_all_others_have_left_takes_the_final_state() -> None:
    run = RoundRun(Plan(2, (4, 3), epochs=2), fences=1)
    while not run.scripts[1].log:
        run.do(run.actions()[0])
    run.do(("fence", 1))
    while 0 not in run.over:
        run.do(("step", 0))
    while actions := run.actions():
        run.do(actions[0])
    run.check()
    assert len(run.scripts[1].log) == 1  # it has trained no more
    assert run.scripts[1].counts.tolist() == [2.0] * 7


def test_a_member_makes_room_for_the_state_a_round_before_it_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given_at: list[tuple[int, int]] = []
    true = LocalBoard.put_state

    def put_state(board: LocalBoard, position: int, state: object) -> None:
        given_at.append((board.rank, position))
        true(board, position, state)

    run = RoundRun(Plan(2, (4, 4, 4)), fences=1)
    while not run.scripts[1].log:
        run.do(run.actions()[0])
    monkeypatch.setattr(LocalBoard, "put_state", put_state)
    run.do(("fence", 1))  # it returns at once, with its next life
    while ("step", 1) in run.actions():
        run.do(("step", 1))
    while actions := run.actions():
        run.do(actions[0])
    run.check()
    joined = [position for rank, position in given_at if rank == 0]
    assert joined[0] == 0 < joined[1]


# ---- broken on purpose ----

Mutation = Callable[[pytest.MonkeyPatch], None]


def one_slot(patch: pytest.MonkeyPatch) -> None:
    """A member writes where others may still be reading its last contribution."""
    true = RoundMember._exchange

    def exchange(member: RoundMember, *arguments: object, **named: object) -> object:
        member.membership.slot = 0
        return (yield from true(member, *arguments, **named))  # type: ignore[arg-type]

    patch.setattr(RoundMember, "_exchange", exchange)


def position_of_the_excluded(patch: pytest.MonkeyPatch) -> None:
    """Contributions that an excluded member writes after its exclusion count."""
    patch.setattr(LocalBoard, "final", lambda board, rank, life: board.position(rank))


def exclusion_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Nobody notices that a member was excluded."""
    patch.setattr(
        RoundMembership, "reached", lambda member, rank, life, target: member.board.position(rank) >= target or None
    )


def garbage_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A member does not look whether it was excluded while it read."""
    patch.setattr(RoundMembership, "is_excluded", lambda member: False)


def everybody_counts(patch: pytest.MonkeyPatch) -> None:
    """Contributions of members that missed a step count, and they receive no state."""
    patch.setattr(rainband.rounds.view, "up_to_date", set)
    patch.setattr(rainband.rounds.member, "up_to_date", set)
    patch.setattr(rainband.rounds.current_round, "up_to_date", set)


def nothing_is_carried(patch: pytest.MonkeyPatch) -> None:
    """The samples of a lost member are forgotten."""
    patch.setattr(rainband.rounds.view._Counted, "_carry", lambda counted, samples: None)


def no_admission(patch: pytest.MonkeyPatch) -> None:
    """A joining worker is not told that it is a member."""
    patch.setattr(LocalBoard, "admit", lambda board, admission: None)


def two_go_on_alone(patch: pytest.MonkeyPatch) -> None:
    """A worker that asks goes on alone, although others are there."""
    patch.setattr(Joining, "_is_best", lambda joining: True)


def old_parameters_get_new_gradients(patch: pytest.MonkeyPatch) -> None:
    """A member that missed a step counts what others contributed meanwhile as applied."""
    patch.setattr(rainband.rounds.current_round, "accounted", lambda first, averaged, *others: {**first, **averaged})


MUTATIONS: dict[Mutation, str] = {
    one_slot: "random",
    position_of_the_excluded: "random",
    exclusion_is_not_waited_for: "a kill",
    garbage_is_kept: "random",
    everybody_counts: "a skip",
    nothing_is_carried: "a kill",
    no_admission: "two workers",
    two_go_on_alone: "two workers",
    old_parameters_get_new_gradients: "a skip and a kill",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_some_order_of_events_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    name = MUTATIONS[mutation]
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        if name == "random":
            for seed in range(2000):
                random_run(seed)
        else:
            plan, events = {**QUICK, **THOROUGH}[name]
            explore(plan, limit=100_000, **events)


class OneNumber:
    """The training state of a member: one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def collect(self) -> float:
        return self.value

    def apply(self, state: float) -> None:
        self.value = state

    def fingerprint(self) -> int:
        return 0

    def has_changed(self) -> bool:
        return False


def together(*waits: Generator[Any, None, Any]) -> list[Any]:
    """Let some coroutines go on in turns until all have returned; return their results."""
    results: dict[int, Any] = {}
    blocked: dict[int, Any] = {}
    while len(results) < len(waits):
        for number, one in enumerate(waits):
            if number in results or (blocked.get(number) is not None and not blocked[number]()):
                continue
            try:
                blocked[number] = next(one)
            except StopIteration as ended:
                results[number] = ended.value
    return [results[number] for number in range(len(waits))]


@pytest.mark.parametrize("first", [0, 1])
def test_a_member_that_leaves_first_finds_what_the_other_has_trained_on(first: int) -> None:
    """The other one leaves within the round in which it noticed this, so its view still has both."""
    memory, states = SharedMemory(2, [torch.zeros(1)]), [OneNumber(0.0), OneNumber(0.0)]
    members = [RoundMember(LocalBoard(memory, rank), states[rank], lambda: 0.0, equal_parts=True) for rank in (0, 1)]
    together(*(member.begin(0) for member in members))
    together(members[first].leave())
    other = members[1 - first]
    other.cut(())
    together(other.mean([torch.ones(1)], 1.0, (), ()))
    states[1 - first].value = 7.0
    together(other.leave())
    together(members[first].take_final())
    assert states[first].value == 7.0
