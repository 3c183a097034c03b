"""Blocks of a model in parts: how many servers each part has, and how much each server holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol.layout import LayoutEntry, PlacedBlocks, align, arrange, cut, deal, place, place_again

KIB = 256  # elements of 4 bytes


def in_parts(sizes: list[int], num_servers: int, block_bytes: int = 1 << 20) -> PlacedBlocks:
    entries = [LayoutEntry(f"p{part}", (size,), part=part) for part, size in enumerate(sizes)]
    return place(arrange(entries), num_servers, block_bytes)


def loads(placed: PlacedBlocks, num_servers: int) -> list[int]:
    return [sum(block.num_bytes for block in placed.of_server(server)) for server in range(num_servers)]


def test_by_hand() -> None:
    assert align([30, 30], 3) == [{0: 20, 1: 10}, {1: 10, 2: 20}]
    assert align([40, 40], 4) == [{0: 20, 1: 20}, {2: 20, 3: 20}]
    assert align([10, 10, 10, 10], 2) == [{0: 10}, {0: 10}, {1: 10}, {1: 10}]
    assert align([101, 99], 2) == [{0: 101}, {1: 99}]  # 100 is nearer than a twentieth of 100 to the border
    assert align([106, 94], 2) == [{0: 100, 1: 6}, {1: 94}]


@given(st.integers(1, 16), st.integers(1, 16), st.integers(100, 4000))
def test_equal_parts_have_as_few_pairs_as_there_can_be(num_parts: int, num_servers: int, kib: int) -> None:
    pairs = in_parts([kib * KIB * num_servers] * num_parts, num_servers).num_pairs()
    assert pairs <= num_servers + num_parts - 1
    if num_parts > 1 and (num_parts % num_servers == 0 or num_servers % num_parts == 0):
        assert pairs == max(num_servers, num_parts)


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=16), st.integers(1, 16), st.sampled_from([1 << 16, 1 << 20]))
def test_servers_hold_the_same_within_a_tenth(kibs: list[int], num_servers: int, block_bytes: int) -> None:
    sizes = [kib * KIB for kib in kibs]
    placed = in_parts(sizes, num_servers, block_bytes)
    assert placed.num_pairs() <= num_servers + len(sizes) - 1
    assert all(block.num_bytes <= block_bytes + 64 for block in placed.blocks)
    mean = sum(sizes) * 4 / num_servers
    if mean >= 64 * 20 * len(sizes):  # a block is a multiple of 64 bytes
        assert all(
            0.9 * mean - 64 * len(sizes) <= load <= 1.1 * mean + 64 * len(sizes) for load in loads(placed, num_servers)
        )
    assert sum(block.numel for block in placed.blocks) == sum(sizes)


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 5))
def test_blocks_of_a_run_that_continues_are_aligned_again(
    kibs: list[int], before: int, num_servers: int, blocks: int
) -> None:
    """With any other number of servers: at most S + K - 1 pairs, and no block has elements of two earlier ones."""
    layout = arrange([LayoutEntry(f"p{part}", (kib * KIB,), part=part) for part, kib in enumerate(kibs)])
    earlier = place(layout, before, (1 << 20) // blocks)
    edges: list[list[int]] = [[0] for _ in layout.vectors]
    for block in earlier.blocks:
        edges[block.vector].append(block.stop)
    placed = place_again(layout, edges, num_servers)
    assert placed.num_pairs() <= num_servers + len(kibs) - 1
    assert {(b.vector, b.stop) for b in earlier.blocks} <= {(b.vector, b.stop) for b in placed.blocks}
    assert sum(block.numel for block in placed.blocks) == sum(kibs) * KIB
    mean = sum(kibs) * KIB * 4 / num_servers
    assert placed.imbalance(num_servers) <= 0.1 + 64 * len(kibs) / mean


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 5, 1000, 3_000_000])
def test_a_model_in_one_part_has_the_blocks_that_it_always_had(numel: int, num_servers: int) -> None:
    layout = arrange([LayoutEntry("a", (numel,)), LayoutEntry("b", (17,), "float64")])
    blocks = cut(layout, num_servers)
    placed = place(layout, num_servers)
    assert placed.blocks == blocks
    assert [tuple(block.index for block in placed.of_server(s)) for s in range(num_servers)] == [
        tuple(sorted(mine)) for mine in deal(blocks, num_servers)
    ]


def test_all_servers_of_a_part_have_one_of_its_first_blocks() -> None:
    """So a push, which goes out block by block, keeps all of them busy."""
    placed = in_parts([4_000 * KIB, 4_000 * KIB], 4)
    first = [owner for block, owner in zip(placed.blocks, placed.owners, strict=True) if block.part == 0]
    assert set(first[:2]) == {0, 1} and set(first) == {0, 1}
