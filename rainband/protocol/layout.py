"""The layout of a model: the offset of each parameter in flat vectors, and how these are cut into blocks."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

# Results are the same bits however a vector is cut, as long as no SIMD register (16 floats) straddles a cut.
UNIT = 16
CACHE_LINE_BYTES = 64
NEAR = 20  # a server's stretch ends at a border between parts that is nearer than its length divided by this

Scalar = float | int | bool | str | None
Settings = dict[str, float | int | bool | str | list[Scalar] | None]


class BlockSegment(msgspec.Struct, frozen=True, array_like=True):
    """The part of one parameter inside one block."""

    parameter: int  # index into Layout.parameters
    offset: int  # first element of that parameter's memory that lies here
    start: int  # offset inside the block, in elements
    stop: int
    group: int  # index into Layout.groups

    @property
    def numel(self) -> int:
        return self.stop - self.start


class BlockSpec(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous range of one vector. Elements between its segments belong to no parameter."""

    index: int
    vector: int  # index into Layout.vectors
    dtype: str
    start: int  # offset inside the vector, in elements
    stop: int
    segments: tuple[BlockSegment, ...]
    part: int = 0  # of a model that several workers compute together: whose parameters these are

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def numel_without(self, absent: Collection[int]) -> int:
        """Return the length of a gradient that is sent without these parameters; the block's if there are none."""
        if not absent:
            return self.numel
        return sum([segment.numel for segment in self.present(absent)])

    def present(self, absent: Collection[int]) -> list[BlockSegment]:
        """Return the segments of all other parameters."""
        without = frozenset(absent)
        return [segment for segment in self.segments if segment.parameter not in without]


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """One parameter and its offset. The vector holds its elements in their order in memory."""

    name: str
    shape: tuple[int, ...]
    vector: int
    start: int
    numel: int
    group: int
    order: tuple[int, ...]  # its dimensions as they lie in memory, slowest first; (0, 1, 2, …) is contiguous


class VectorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One memory: all parameters of one part of the model, of one dtype, on one device."""

    dtype: str
    device: str
    numel: int
    part: int = 0


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The structure of a model, without its values."""

    vectors: tuple[VectorSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    groups: tuple[Settings, ...]  # the scalar settings of each parameter group

    def digest(self) -> str:
        """Return a short hash, equal on two nodes if "block 7" is the same on both.

        Devices are left out, so that a CPU and a GPU worker can train one model. The groups' settings are
        left out too: schedules change them while training, and a late worker would seem to have another model.
        """
        dtypes = [(vector.dtype, vector.numel) for vector in self.vectors]
        fixed = msgspec.json.encode((dtypes, self.parameters, len(self.groups)))
        return hashlib.blake2b(fixed, digest_size=8).hexdigest()


class LayoutEntry(msgspec.Struct, frozen=True):
    """A parameter that has no offset yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    group: int = 0
    order: tuple[int, ...] | None = None  # None: contiguous
    part: int = 0


def arrange(entries: Iterable[LayoutEntry], groups: Sequence[Settings] = ({},)) -> Layout:
    """Give each parameter its offset: one vector per part, dtype and device, every start on a 64-byte boundary."""
    vectors: dict[tuple[str, str, int], int] = {}
    ends: list[int] = []
    parameters = []
    for entry in entries:
        vector = vectors.setdefault((entry.dtype, entry.device, entry.part), len(vectors))
        if vector == len(ends):
            ends.append(0)
        numel, start = math.prod(entry.shape), ends[vector]
        order = tuple(range(len(entry.shape))) if entry.order is None else entry.order
        parameters.append(ParameterSpec(entry.name, entry.shape, vector, start, numel, entry.group, order))
        ends[vector] = start + _round_up(numel, max(UNIT, CACHE_LINE_BYTES // ITEM_BYTES[entry.dtype]))
    kinds = zip(vectors, ends, strict=True)
    specs = tuple(VectorSpec(dtype, device, numel, part) for (dtype, device, part), numel in kinds)
    return Layout(specs, tuple(parameters), tuple(groups))


def cut(layout: Layout, num_servers: int = 1, block_bytes: int = 1 << 20) -> tuple[BlockSpec, ...]:
    """Cut every vector into blocks of at most `block_bytes` (but at least 16 elements), as equal as can be.

    A vector gets a multiple of `num_servers` blocks, so that servers hold equal shares of small models too,
    as long as there are enough units of 16 elements.
    """
    _at_least_one("num_servers", num_servers)
    _at_least_one("block_bytes", block_bytes)
    return cut_at(layout, [_edges(vector, num_servers, block_bytes) for vector in layout.vectors])


def cut_at(layout: Layout, edges: Sequence[Sequence[int]]) -> tuple[BlockSpec, ...]:
    """Cut every vector at its edges, the first of which is 0 and the last its length."""
    blocks: list[BlockSpec] = []
    for number, (vector, of_vector) in enumerate(zip(layout.vectors, edges, strict=True)):
        present = [(i, p) for i, p in enumerate(layout.parameters) if p.vector == number and p.numel]
        starts = [parameter.start for _, parameter in present]
        for start, stop in pairwise(of_vector):
            inside = present[max(0, bisect_right(starts, start) - 1) : bisect_right(starts, stop - 1)]
            segments = tuple(_segment(i, p, start, stop) for i, p in inside if p.start + p.numel > start)
            blocks.append(BlockSpec(len(blocks), number, vector.dtype, start, stop, segments, vector.part))
    return tuple(blocks)


def cut_again(layout: Layout, edges: Sequence[Sequence[int]], num_servers: int) -> tuple[BlockSpec, ...]:
    """Cut vectors at the edges that they had before; halve the blocks until there are enough for all servers.

    No block has elements of two earlier ones, whose accepted batches may differ.
    """
    edges = [list(of_vector) for of_vector in edges]
    while sum(max(0, len(of_vector) - 1) for of_vector in edges) < num_servers:
        finer = [_halved(of_vector) for of_vector in edges]
        if finer == edges:
            break  # each block is as small as it can be
        edges = finer
    return cut_at(layout, edges)


def _halved(edges: Sequence[int]) -> list[int]:
    finer = list(edges[:1])
    for start, stop in pairwise(edges):
        middle = start + (stop - start) // (2 * UNIT) * UNIT
        finer += [middle, stop] if start < middle < stop else [stop]
    return finer


def deal(blocks: Sequence[BlockSpec], num_servers: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each server, dealt in rounds of one each, so that all servers work on pushes at once.

    In a round the largest block goes to the server that has least, so that servers differ by at most one block.
    """
    _at_least_one("num_servers", num_servers)
    shards: list[list[int]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for first in range(0, len(blocks), num_servers):
        largest_first = sorted(blocks[first : first + num_servers], key=lambda block: -block.num_bytes)
        lightest_first = sorted(range(num_servers), key=loads.__getitem__)
        for block, server in zip(largest_first, lightest_first, strict=False):
            shards[server].append(block.index)
            loads[server] += block.num_bytes
    return tuple(map(tuple, shards))


class PlacedBlocks(NamedTuple):
    """The blocks of a model, and the server that holds each."""

    blocks: tuple[BlockSpec, ...]
    owners: tuple[int, ...]

    def of_server(self, server: int) -> tuple[BlockSpec, ...]:
        return tuple(block for block, owner in zip(self.blocks, self.owners, strict=True) if owner == server)

    def num_pairs(self) -> int:
        """Return the number of pairs of a part and a server that holds some of it."""
        return len({(block.part, owner) for block, owner in zip(self.blocks, self.owners, strict=False)})

    def imbalance(self, num_servers: int) -> float:
        """Return by which fraction of the mean a server has more or less bytes, at most."""
        loads = [0] * num_servers
        for block, owner in zip(self.blocks, self.owners, strict=False):
            loads[owner] += block.num_bytes
        mean = sum(loads) / max(1, num_servers)
        return max(abs(load - mean) for load in loads) / mean if mean else 0.0


def place(layout: Layout, num_servers: int, block_bytes: int = 1 << 20) -> PlacedBlocks:
    """Cut a model into blocks, and give each a server.

    Of a model that several workers compute together, the parts are put on a line, which is cut into equal stretches,
    one for each server; a cut near a border between parts is moved there. So K parts and S servers make at most
    S + K - 1 pairs of a part and a server, and max(S, K) if parts are equal and one number divides the other; a server
    holds at most a tenth more or less than the mean.
    """
    fractions = _fractions(layout, num_servers)
    if len(fractions) < 2:
        return dealt(cut(layout, num_servers, block_bytes), num_servers)
    edges, owners = [], []
    for vector in layout.vectors:
        of_vector, servers = _edges_in_rounds(vector, fractions[vector.part], block_bytes)
        edges.append(of_vector)
        owners += servers
    return PlacedBlocks(cut_at(layout, edges), tuple(owners))


def place_again(layout: Layout, edges: Sequence[Sequence[int]], num_servers: int) -> PlacedBlocks:
    """Place the blocks that a model had before, whose edges these are, or parts of them: see `place`, `cut_again`."""
    fractions = _fractions(layout, num_servers)
    if len(fractions) < 2:
        return dealt(cut_again(layout, edges, num_servers), num_servers)
    finer, owners = [], list[int]()
    for vector, before in zip(layout.vectors, edges, strict=True):
        of_vector, servers = _edges_in_rounds(vector, fractions[vector.part], vector.numel * 16)
        both = sorted({*before, *of_vector})
        finer.append(both)
        owners += [servers[bisect_right(of_vector, start) - 1] for start in both[:-1]]
    return PlacedBlocks(cut_at(layout, finer), tuple(owners))


def _fractions(layout: Layout, num_servers: int) -> dict[int, dict[int, int]]:
    """Return, for each part of a model that has several, its servers and how many bytes each of them holds."""
    sizes: dict[int, int] = {}
    for vector in layout.vectors:
        sizes[vector.part] = sizes.get(vector.part, 0) + _num_bytes(vector)
    return dict(zip(sizes, align(list(sizes.values()), num_servers), strict=True)) if len(sizes) > 1 else {}


def dealt(blocks: Sequence[BlockSpec], num_servers: int) -> PlacedBlocks:
    """Deal the blocks of a model that each worker has as a whole."""
    owners = {block: server for server, mine in enumerate(deal(blocks, num_servers)) for block in mine}
    return PlacedBlocks(tuple(blocks), tuple(owners[block.index] for block in blocks))


def align(sizes: Sequence[int], num_servers: int) -> list[dict[int, int]]:
    """Return, for each part of these sizes, the servers that hold it and how many bytes each of them holds."""
    ends = list(accumulate(sizes))
    total = ends[-1]
    cuts = [0, *(_moved(total * server, num_servers, ends, total) for server in range(1, num_servers)), total]
    found: list[dict[int, int]] = []
    begin = 0
    for end in ends:
        of_part = {
            server: min(end, cuts[server + 1]) - max(begin, cuts[server])
            for server in range(num_servers)
            if min(end, cuts[server + 1]) > max(begin, cuts[server])
        }
        found.append(of_part)
        begin = end
    return found


def _moved(cut_times: int, times: int, borders: Sequence[int], total: int) -> int:
    """Return the cut at cut_times / times, or the border between parts that is near it."""
    nearest = min(borders[:-1], key=lambda border: abs(border * times - cut_times))
    return nearest if abs(nearest * times - cut_times) * NEAR < total else cut_times // times


def _edges_in_rounds(vector: VectorSpec, bytes_of: dict[int, int], block_bytes: int) -> tuple[list[int], list[int]]:
    """Return the edges of a vector's blocks and their servers: rounds of a block for each, as large as its fraction.

    So all servers of a part work on a push at once.
    """
    num_units = -(-vector.numel // UNIT)
    weights, whole = list(bytes_of.items()), sum(bytes_of.values())
    if not num_units or not whole:
        return [], []
    largest = _num_bytes(vector) * max(bytes_of.values()) / whole
    rounds = max(1, min(num_units // len(weights), -(-int(largest) // block_bytes)))
    edges, owners, done = [0], [], 0
    for number in range(rounds):
        so_far = number * whole
        for server, weight in weights:
            so_far += weight
            stop = num_units * so_far // (rounds * whole)
            if stop > done:
                edges.append(min(vector.numel, UNIT * stop))
                owners.append(server)
                done = stop
    return edges, owners


def _num_bytes(vector: VectorSpec) -> int:
    return vector.numel * ITEM_BYTES[vector.dtype]


def _edges(vector: VectorSpec, num_servers: int, block_bytes: int) -> list[int]:
    """Return the edges of the blocks of a vector, from 0 to its length; blocks differ by at most one unit."""
    num_units = -(-vector.numel // UNIT)
    units_per_block = max(1, block_bytes // (UNIT * ITEM_BYTES[vector.dtype]))
    num_blocks = min(num_units, _round_up(-(-num_units // units_per_block), num_servers))
    if num_blocks == 0:
        return []
    return [min(vector.numel, UNIT * (num_units * k // num_blocks)) for k in range(num_blocks + 1)]


def _segment(index: int, parameter: ParameterSpec, start: int, stop: int) -> BlockSegment:
    first = max(parameter.start, start)
    last = min(parameter.start + parameter.numel, stop)
    return BlockSegment(index, first - parameter.start, first - start, last - start, parameter.group)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be 1 or more, for example {name}=1.")
