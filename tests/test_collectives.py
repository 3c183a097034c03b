"""Tables of collective operations: what they cost, that they are right, and that the checker notices what is not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rainband.collectives.algorithm import algorithm_names, load_algorithm
from rainband.collectives.check import TableError, check, check_messages, check_programs, check_table
from rainband.collectives.cost import LinkCosts, Timings, choose, crossover_bytes, fitted, predict_s
from rainband.collectives.messages import MessageProgram, compile_messages
from rainband.collectives.operations import all_gather, broadcast, reduce, reduce_scatter
from rainband.collectives.program import Mode, Program, compile_table
from rainband.collectives.table import Move, MoveTable, all_reduce

every_algorithm = pytest.mark.parametrize("name", algorithm_names())
MAX_RANKS = 33


def table(name: str, num_ranks: int) -> MoveTable:
    return load_algorithm(name).table(num_ranks)


# ---- tables ----


def test_the_ring_of_three_ranks() -> None:
    assert list(map(str, table("ring", 3).moves[:3])) == [
        "step 0: rank 1 adds parts 0 to 0 of rank 0",
        "step 0: rank 2 adds parts 1 to 1 of rank 1",
        "step 0: rank 0 adds parts 2 to 2 of rank 2",
    ]
    assert check(table("ring", 3)) == (4, 1, 4 / 3, 4)


def test_three_ranks_fold_to_two_and_back() -> None:
    moves = table("recursive_doubling", 3).moves
    assert [(m.step, m.source, m.target, m.add) for m in moves] == [
        (0, 0, 1, True),
        (1, 1, 2, True),
        (1, 2, 1, True),
        (2, 1, 0, False),
    ]


def test_twelve_ranks_send_more_by_halving_and_doubling_than_in_a_ring() -> None:
    assert check_table(table("halving_doubling", 12)).max_sent == 2.75
    assert check_table(table("ring", 12)).max_sent == 22 / 12


def test_two_machines_of_two_ranks_send_a_quarter_of_the_traffic_of_a_ring_between_them() -> None:
    between = [m for m in table("two_level", 4).moves if m.source // 2 != m.target // 2]
    assert sum(m.last - m.first for m in between) == 8  # of 4 parts: 2 N
    assert [m.step for m in between] == [1] * 4 + [2] * 4


@every_algorithm
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
def test_a_table_is_right_and_costs_what_the_textbook_says(name: str, num_ranks: int) -> None:
    algorithm = load_algorithm(name)
    chunks = 2 if num_ranks <= 9 else 1
    found, textbook = check(algorithm.table(num_ranks), chunks), algorithm.textbook(num_ranks)
    for number, formula, value in zip(found, algorithm.formulas, textbook, strict=True):
        if formula.startswith("≤"):
            assert number <= value
        else:
            assert number == pytest.approx(value)


@pytest.mark.parametrize("name", ["single_master", "direct", "ring", "halving_doubling"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32])
def test_the_total_is_twice_the_vector_for_each_further_rank(name: str, num_ranks: int) -> None:
    assert check_table(table(name, num_ranks)).total_sent == 2 * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
def test_no_rank_of_a_double_tree_has_more_than_two_children(num_ranks: int) -> None:
    moves = [m for m in table("double_tree", num_ranks).moves if m.add]
    children = [[m.source for m in moves if m.target == rank] for rank in range(num_ranks)]
    assert max(map(len, children), default=0) <= 3
    inner = [{m.first for m in moves if m.target == rank} for rank in range(num_ranks)]
    assert [rank for rank, trees in enumerate(inner) if len(trees) == 2] in ([], [0])


@pytest.mark.parametrize(("rows", "steps"), [(1, 22), (2, 12), (3, 10), (4, 10), (12, 22)])
def test_a_grid_of_twelve_ranks(rows: int, steps: int) -> None:
    grid = load_algorithm("ring_2d", {"rows": rows})
    assert check(grid.table(12), 1) == grid.textbook(12) == (steps, 1, pytest.approx(22 / 12), 22)


@pytest.mark.parametrize("machines", [1, 2, 3, 4, 7])
def test_machines_may_have_unequal_numbers_of_ranks(machines: int) -> None:
    levels = load_algorithm("two_level", {"machines": machines})
    assert check(levels.table(7)) == pytest.approx(levels.textbook(7))


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("ring_2d", {"rows": 5}, "rows=5: 12 ranks are not a multiple of it"),
        ("two_level", {"machines": 0}, "machines=0: it must be at least 1"),
        ("rnig", {}, r"no all-reduce algorithm named 'rnig' \(did you mean ring\?\)"),
        ("ring", {"rows": 3}, "rows"),
    ],
)
def test_a_wrong_setting_is_refused(name: str, settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_algorithm(name, settings).table(12)


# ---- other operations ----


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 13])
def test_a_broadcast_and_a_reduce_have_logarithmic_steps(num_ranks: int) -> None:
    steps = (num_ranks - 1).bit_length()
    for root in {0, num_ranks // 2, num_ranks - 1}:
        for tree in (broadcast(num_ranks, root), reduce(num_ranks, root)):
            found = check(tree)
            assert (found.steps, found.total_sent) == (steps, num_ranks - 1)


@pytest.mark.parametrize("name", sorted(set(algorithm_names()) - {"recursive_doubling"}))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 9])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name: str, num_ranks: int) -> None:
    algorithm = load_algorithm(name)
    first, second = reduce_scatter(algorithm, num_ranks), all_gather(algorithm, num_ranks)
    halves = [check(first), check(second)]
    assert sum(half.total_sent for half in halves) == pytest.approx(2 * (num_ranks - 1))
    assert first.owners == second.owners


def test_recursive_doubling_has_no_reduce_scatter() -> None:
    with pytest.raises(ValueError, match="no reduce-scatter for 4 ranks.*Use direct or ring"):
        reduce_scatter(load_algorithm("recursive_doubling"), 4)


# ---- the checker ----


def test_a_vector_that_counts_twice_is_noticed() -> None:
    twice = all_reduce(2, 1, [Move(0, 0, 1, 0, 1, True), Move(1, 0, 1, 0, 1, True)])
    with pytest.raises(TableError, match="step 1: rank 1 adds parts 0 to 0 of rank 0: a vector counts twice"):
        check_table(twice)


def test_a_missing_vector_is_noticed() -> None:
    with pytest.raises(TableError, match=r"part 0 of rank 0 lacks the vectors of ranks \[1\]"):
        check_table(all_reduce(2, 1, [Move(0, 0, 1, 0, 1, True)]))


def test_reading_what_is_not_there_yet_is_noticed() -> None:
    early = MoveTable("broadcast", 3, 1, (Move(0, 1, 2, 0, 1, False), Move(1, 0, 1, 0, 1, False)), (0,))
    with pytest.raises(TableError, match="holds nothing yet"):
        check_table(early)


def damaged_tables(original: MoveTable) -> Iterator[MoveTable]:
    """Swap two slices, remove a move, turn an addition around, or do it one step too early or late."""
    moves = original.moves

    def having(*changed: Move, without: set[int]) -> MoveTable:
        rest = [move for number, move in enumerate(moves) if number not in without]
        return all_reduce(original.num_ranks, original.num_parts, [*rest, *changed])

    for number, move in enumerate(moves):
        yield having(without={number})
        yield having(move._replace(add=not move.add), without={number})
        yield having(move._replace(source=move.target, target=move.source), without={number})
        for other in range(number):
            a, b = move, moves[other]
            if (a.first, a.last) != (b.first, b.last) and a.step == b.step and a.target != b.target:
                swapped = a._replace(first=b.first, last=b.last), b._replace(first=a.first, last=a.last)
                yield having(*swapped, without={number, other})


@every_algorithm
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_damaged_table_is_noticed(name: str, num_ranks: int) -> None:
    for damaged in damaged_tables(table(name, num_ranks)):
        with pytest.raises(TableError):
            check_table(damaged)


def without_a_wait(programs: tuple[Program, ...]) -> Iterator[tuple[Program, ...]]:
    for rank, program in enumerate(programs):
        for number, op in enumerate(program):
            for left_out in op.waits:
                changed = op._replace(waits=tuple(wait for wait in op.waits if wait != left_out))
                yield _with(programs, rank, _with(program, number, changed))


def _with(items: tuple[object, ...], at: int, item: object) -> tuple:  # type: ignore[type-arg]
    return items[:at] + (item,) + items[at + 1 :]


@every_algorithm
@pytest.mark.parametrize("mode", ["segment", "staged"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_every_wait_of_a_program_is_necessary(name: str, mode: Mode, num_ranks: int) -> None:
    moves = table(name, num_ranks)
    programs = compile_table(moves, 2, mode)
    count = 0
    for changed in without_a_wait(programs):
        with pytest.raises(TableError):
            check_programs(moves, changed, 2, mode)
        count += 1
    assert count >= num_ranks


def messages_without_a_wait(programs: tuple[MessageProgram, ...]) -> Iterator[tuple[MessageProgram, ...]]:
    for rank, program in enumerate(programs):
        for kind, links in (("sends", program.sends), ("receives", program.receives)):
            for other, messages in links.items():
                for number, message in enumerate(messages):
                    for field in ("after_received", "after_sent"):
                        for left_out in getattr(message, field):
                            kept = tuple(wait for wait in getattr(message, field) if wait != left_out)
                            changed = _with(messages, number, message._replace(**{field: kept}))
                            yield _with(programs, rank, program._replace(**{kind: {**links, other: changed}}))


@every_algorithm
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_every_wait_between_messages_is_necessary(name: str, num_ranks: int) -> None:
    moves = table(name, num_ranks)
    programs = compile_messages(moves, 2)
    for changed in messages_without_a_wait(programs):
        with pytest.raises(TableError):
            check_messages(moves, changed, 2)


def test_a_wait_too_many_is_a_deadlock() -> None:
    moves = table("direct", 2)
    programs = compile_table(moves, 1, "staged")
    first = programs[0][0]
    late = first._replace(waits=(*first.waits, programs[0][-1].waits[0]._replace(number=len(programs[1]))))
    with pytest.raises(TableError, match="deadlock: rank 0 at operation 0, rank 1 at operation"):
        check_programs(moves, _with(programs, 0, _with(programs[0], 0, late)), 1, "staged")


def test_adding_in_place_what_the_partner_still_reads_is_noticed() -> None:
    moves = table("recursive_doubling", 2)
    programs = compile_table(moves, 1, "segment")
    number = next(number for number, op in enumerate(programs[0]) if op.theirs is not None)
    in_place = programs[0][number]._replace(out=programs[0][number].own)
    with pytest.raises(TableError):
        check_programs(moves, _with(programs, 0, _with(programs[0], number, in_place)), 1, "segment")


# ---- the cost model ----

LAN = LinkCosts(alpha_s=1e-5, beta_s=1e-9, gamma_s=1e-10, cores=64)


def test_two_ranks_that_exchange_a_vector() -> None:
    costs = LinkCosts(alpha_s=1.0, beta_s=0.5, gamma_s=0.25, cores=2)
    assert predict_s(table("recursive_doubling", 2), 8, costs) == 1 + 8 * 0.75
    assert predict_s(table("direct", 2), 8, costs) == (1 + 4 * 0.75) + (1 + 4 * 0.5)
    # One core does the work of both.
    assert predict_s(table("recursive_doubling", 2), 8, costs._replace(cores=1)) == 2 * (1 + 8 * 0.75)


def test_the_latency_of_a_ring_is_linear_and_that_of_a_tree_logarithmic() -> None:
    latency = LAN._replace(beta_s=0.0, gamma_s=0.0)
    assert [round(predict_s(table("ring", n), 0, latency) / latency.alpha_s) for n in (4, 8, 16, 32)] == [6, 14, 30, 62]
    steps = [predict_s(table("recursive_doubling", n), 0, latency) / latency.alpha_s for n in (4, 8, 16, 32)]
    assert steps == pytest.approx([2, 3, 4, 5])


def test_small_vectors_take_few_messages_and_large_ones_few_bytes() -> None:
    assert choose(8, 1 << 10, LAN) == "recursive_doubling"
    assert choose(8, 64 << 20, LAN) in ("direct", "halving_doubling", "ring")


def test_where_two_algorithms_cross() -> None:
    costs = LinkCosts(alpha_s=1.0, beta_s=0.001, gamma_s=0.001, cores=2)
    # 1 + 0.002 n = (1 + 0.001 n) + (1 + 0.0005 n) at n = 2000
    assert crossover_bytes(2, costs, "recursive_doubling", "direct") == 2001
    assert crossover_bytes(2, costs._replace(gamma_s=-0.001), "recursive_doubling", "direct") is None


def test_a_large_message_waits_for_the_link_once() -> None:
    """Chunks that follow the first one pay for their bytes only."""
    latency, size = LinkCosts(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, cores=8), 64 << 20
    assert predict_s(table("direct", 4), size, latency) == 2 * 3
    assert predict_s(table("direct", 4), size, LinkCosts(0.0, 1.0, 0.0, 8)) == pytest.approx(2 * 0.75 * size)


def test_disturbed_measurements_leave_half_of_the_time_to_the_bytes() -> None:
    """Messages that take longer than all of it are not believed."""
    costs = fitted(2, Timings(small_s=1.0, direct_s=0.5, doubling_s=0.5), large_bytes=4 << 20)
    bytes_s = predict_s(table("direct", 2), 4 << 20, costs._replace(alpha_s=0.0))
    assert bytes_s == pytest.approx(0.25) and costs.gamma_s == pytest.approx(0.0, abs=1e-15)


@given(
    st.integers(2, 9),
    st.floats(1e-7, 1e-5),
    st.floats(1e-12, 1e-8),
    st.floats(0, 10),
)
def test_costs_are_found_from_the_times_that_they_predict(
    num_ranks: int, alpha_s: float, beta_s: float, gamma_of_beta: float
) -> None:
    cores, size = os.cpu_count() or 1, 4 << 20
    costs = LinkCosts(alpha_s, beta_s, gamma_of_beta * beta_s, cores)

    def seconds(costs: LinkCosts) -> Timings:
        doubling = table("recursive_doubling", num_ranks)
        direct_s, doubling_s = (predict_s(each, size, costs) for each in (table("direct", num_ranks), doubling))
        return Timings(predict_s(doubling, 0, costs), direct_s, doubling_s)

    messages, bytes_alone = seconds(costs._replace(beta_s=0.0, gamma_s=0.0)), seconds(costs._replace(alpha_s=0.0))
    assume(all(few < 0.4 * much for few, much in zip(messages[1:], bytes_alone[1:], strict=True)))
    found = seconds(fitted(num_ranks, seconds(costs), size))
    # Where slots are long or short by different ranks, times of messages and bytes do not simply add up.
    assert found == pytest.approx(seconds(costs), rel=1e-6 if num_ranks in (2, 4, 8) else 0.5)


# Medians in microseconds that `rainband bench allreduce` measured in one run on two busy cores, staged in shared
# memory: of 4 KB by recursive doubling, from which alpha follows; then of each size by each algorithm.
ORDER = ("direct", "double_tree", "halving_doubling", "recursive_doubling", "ring")
MEASURED: dict[int, tuple[int, dict[int, tuple[int, ...]]]] = {
    2: (
        28,
        {
            1 << 20: (159, 173, 141, 190, 170),
            4 << 20: (731, 701, 714, 860, 676),
            16 << 20: (3593, 3463, 3523, 4521, 3500),
            64 << 20: (13705, 13768, 14021, 17082, 13876),
        },
    ),
    4: (
        111,
        {
            1 << 16: (144, 169, 179, 128, 234),
            1 << 20: (233, 229, 155, 248, 237),
            4 << 20: (968, 1077, 887, 1808, 1083),
            16 << 20: (4917, 5486, 5345, 7371, 5742),
            64 << 20: (26749, 25020, 25722, 29303, 24251),
        },
    ),
}


@pytest.mark.parametrize("num_ranks", MEASURED)
def test_the_model_chooses_an_algorithm_that_was_measured_to_be_fast(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    small, medians = MEASURED[num_ranks]
    sizes = {size: dict(zip(ORDER, times, strict=True)) for size, times in medians.items()}
    large = sizes[4 << 20]
    timings = Timings(small * 1e-6, large["direct"] * 1e-6, large["recursive_doubling"] * 1e-6)
    costs = fitted(num_ranks, timings, 4 << 20)
    for size, measured in sizes.items():
        assert measured[choose(num_ranks, size, costs)] <= 1.15 * min(measured.values()), (size, costs)
