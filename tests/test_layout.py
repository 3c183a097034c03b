"""The layout of the model as data, and its cutting into blocks."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.protocol.layout import BlockSegment, BlockSpec, Layout, LayoutEntry, Settings, arrange, cut, deal

MIB = 1 << 20


def one_parameter(numel: int, dtype: str = "float32") -> Layout:
    return arrange([LayoutEntry("weight", (numel,), dtype)])


def block_of_bytes(index: int, num_bytes: int) -> BlockSpec:
    return BlockSpec(index, 0, "float32", 0, num_bytes // 4, ())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16"])
    kinds = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8))
    return arrange([LayoutEntry(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)])


block_sizes = st.sampled_from([1, 64, 100, 256, 4096, MIB])


def test_a_parameter_starts_on_a_64_byte_boundary_and_the_vector_ends_on_one() -> None:
    layout = arrange([LayoutEntry("a", (3,)), LayoutEntry("b", (4, 5)), LayoutEntry("c", ())])

    assert [p.start for p in layout.parameters] == [0, 16, 48]
    assert [p.numel for p in layout.parameters] == [3, 20, 1]
    assert [v.numel for v in layout.vectors] == [64]


def test_64_bytes_are_32_elements_of_two_bytes() -> None:
    layout = arrange([LayoutEntry("a", (3,), "bfloat16"), LayoutEntry("b", (3,), "bfloat16")])
    assert [p.start for p in layout.parameters] == [0, 32]


def test_a_start_is_a_multiple_of_16_elements_even_where_8_would_be_64_bytes() -> None:
    layout = arrange([LayoutEntry("a", (3,), "float64"), LayoutEntry("b", (3,), "float64")])
    assert [p.start for p in layout.parameters] == [0, 16]


def test_each_dtype_on_each_device_has_a_vector_of_its_own() -> None:
    entries = [
        LayoutEntry("a", (1,)),
        LayoutEntry("b", (1,), "float64"),
        LayoutEntry("c", (1,), device="cuda:0"),
        LayoutEntry("d", (1,)),
    ]
    layout = arrange(entries)

    assert [p.vector for p in layout.parameters] == [0, 1, 2, 0]
    assert [(v.dtype, v.device) for v in layout.vectors] == [
        ("float32", "cpu"),
        ("float64", "cpu"),
        ("float32", "cuda:0"),
    ]


def test_an_empty_parameter_has_an_offset_but_no_segment() -> None:
    layout = arrange([LayoutEntry("a", (2,)), LayoutEntry("empty", (0, 7)), LayoutEntry("b", (2,))])

    assert [p.start for p in layout.parameters] == [0, 16, 16]
    assert [s.parameter for s in cut(layout)[0].segments] == [0, 2]


def test_a_model_without_elements_has_no_blocks() -> None:
    assert cut(one_parameter(0), num_servers=3) == ()
    assert deal((), 3) == ((), (), ())


def test_blocks_hold_segments_of_parameters_and_leave_the_gaps_out() -> None:
    layout = arrange([LayoutEntry("a", (20,)), LayoutEntry("b", (30,), group=1)], groups=[{"lr": 0.1}, {"lr": 0.2}])
    first, second = cut(layout, block_bytes=48 * 4)  # 64 elements in blocks of 48 at most: two of 32

    assert (first.start, first.stop, first.num_bytes) == (0, 32, 128)
    assert first.segments == (BlockSegment(parameter=0, offset=0, start=0, stop=20, group=0),)
    assert (second.start, second.stop) == (32, 64)
    assert second.segments == (BlockSegment(parameter=1, offset=0, start=0, stop=30, group=1),)


def test_a_parameter_goes_on_in_the_next_block_where_it_stopped() -> None:
    blocks = cut(one_parameter(40), block_bytes=64)  # 16 elements each

    assert [b.segments[0].offset for b in blocks] == [0, 16, 32]
    assert [b.segments[0].numel for b in blocks] == [16, 16, 8]
    assert [b.numel for b in blocks] == [16, 16, 16]


def test_a_block_is_about_a_mebibyte() -> None:
    assert [b.num_bytes for b in cut(one_parameter(MIB))] == [MIB] * 4
    assert [b.num_bytes for b in cut(one_parameter(MIB, "float64"))] == [MIB] * 8


def test_two_servers_share_three_mebibytes_equally() -> None:
    layout = one_parameter(3 * MIB // 4)
    assert [b.num_bytes for b in cut(layout, num_servers=2)] == [3 * MIB // 4] * 4


def test_a_small_model_is_cut_so_that_every_server_has_a_block() -> None:
    assert [b.numel for b in cut(one_parameter(64), num_servers=4)] == [16, 16, 16, 16]
    assert [b.numel for b in cut(one_parameter(40), num_servers=4)] == [16, 16, 16]  # no smaller than 16


def test_blocks_are_dealt_in_turn_so_that_all_servers_work_at_once() -> None:
    blocks = cut(one_parameter(6 * MIB // 4), num_servers=2)
    assert deal(blocks, 2) == ((0, 2, 4), (1, 3, 5))


def test_in_a_round_the_server_with_least_gets_the_largest_block() -> None:
    blocks = [block_of_bytes(i, size) for i, size in enumerate([800, 400, 800, 400])]
    assert deal(blocks, 2) == ((0, 3), (1, 2))  # 1200 bytes each; taking turns would give 1600 and 800


def test_servers_beyond_the_number_of_blocks_hold_nothing() -> None:
    assert deal(cut(one_parameter(5)), 3) == ((0,), (), ())


@pytest.mark.parametrize("settings", [{"num_servers": 0}, {"block_bytes": 0}])
def test_nothing_can_be_cut_for_no_server_or_into_empty_blocks(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is 0: it must be 1 or more"):
        cut(one_parameter(5), **settings)
    with pytest.raises(ValueError, match="num_servers is 0"):
        deal((), 0)


@given(layouts(), st.integers(1, 5), block_sizes)
def test_blocks_partition_every_vector_at_multiples_of_16(layout: Layout, num_servers: int, block_bytes: int) -> None:
    blocks = cut(layout, num_servers, block_bytes)

    assert [b.index for b in blocks] == list(range(len(blocks)))
    for number, vector in enumerate(layout.vectors):
        mine = [b for b in blocks if b.vector == number]
        edges = [0, *(b.stop for b in mine)]
        assert edges[-1] == vector.numel
        assert [(b.start, b.stop) for b in mine] == list(pairwise(edges))
        assert all(start % 16 == 0 and start < stop for start, stop in pairwise(edges))
        assert all(b.dtype == vector.dtype and (b.num_bytes <= block_bytes or b.numel == 16) for b in mine)


@given(layouts(), st.integers(1, 5), block_sizes)
def test_segments_partition_every_parameter_at_multiples_of_16(
    layout: Layout, num_servers: int, block_bytes: int
) -> None:
    blocks = cut(layout, num_servers, block_bytes)

    for index, parameter in enumerate(layout.parameters):
        pieces = [(b, s) for b in blocks for s in b.segments if s.parameter == index]
        edges = [0, *(s.offset + s.numel for _, s in pieces)]
        assert edges[-1] == parameter.numel
        assert [s.offset for _, s in pieces] == edges[:-1]
        for block, segment in pieces:
            assert segment.numel > 0 and segment.offset % 16 == 0
            assert block.vector == parameter.vector
            assert block.start + segment.start == parameter.start + segment.offset
            assert segment.stop <= block.numel
            assert segment.group == parameter.group


@given(layouts(), st.integers(1, 40), block_sizes)
def test_every_server_has_a_block_while_there_are_units(layout: Layout, num_servers: int, block_bytes: int) -> None:
    shards = deal(cut(layout, num_servers, block_bytes), num_servers)
    num_units = sum(vector.numel // 16 for vector in layout.vectors)
    assert sum(1 for shard in shards if shard) == min(num_servers, num_units)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_every_block_is_dealt_once_and_servers_differ_by_one_block_at_most(sizes: list[int], num_servers: int) -> None:
    blocks = [block_of_bytes(i, 4 * size) for i, size in enumerate(sizes)]
    shards = deal(blocks, num_servers)

    assert sorted(index for shard in shards for index in shard) == list(range(len(blocks)))
    counts = [len(shard) for shard in shards]
    assert max(counts) - min(counts) <= 1
    loads = [sum(sizes[index] for index in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_layout_and_its_blocks_come_back_the_same_over_the_wire() -> None:
    groups: list[Settings] = [{"lr": 0.1, "betas": [0.9, 0.999], "nesterov": False, "name": "all", "n": 3, "x": None}]
    layout = arrange([LayoutEntry("conv", (2, 3, 4), order=(0, 2, 1)), LayoutEntry("bias", (2,), "float64")], groups)
    blocks = cut(layout, block_bytes=64)

    sent = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(sent, type=Layout) == layout
    assert msgspec.msgpack.decode(sent, type=Layout).digest() == layout.digest()
    sent = msgspec.msgpack.encode(blocks)
    assert msgspec.msgpack.decode(sent, type=tuple[BlockSpec, ...]) == blocks


def test_the_digest_is_the_same_in_every_process() -> None:
    assert one_parameter(5).digest() == "ae2800dccc940ea4"


def test_the_digest_is_of_the_model_not_of_the_device_or_the_settings_of_the_moment() -> None:
    here = arrange([LayoutEntry("w", (2, 3))], [{"lr": 0.1}])
    there = arrange([LayoutEntry("w", (2, 3), device="cuda:0")], [{"lr": 0.05}])
    assert here.digest() == there.digest()


@pytest.mark.parametrize(
    "other",
    [
        LayoutEntry("v", (2, 3)),
        LayoutEntry("w", (3, 2)),
        LayoutEntry("w", (2, 3), "float16"),
        LayoutEntry("w", (2, 3), group=1),
        LayoutEntry("w", (2, 3), order=(1, 0)),
    ],
    ids=["name", "shape", "dtype", "group", "order in memory"],
)
def test_another_model_has_another_digest(other: LayoutEntry) -> None:
    groups: list[Settings] = [{"lr": 0.1}, {"lr": 0.2}]
    assert arrange([other], groups).digest() != arrange([LayoutEntry("w", (2, 3))], groups).digest()


def test_the_layout_can_be_read_without_torch() -> None:
    program = "import sys, rainband.protocol.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
