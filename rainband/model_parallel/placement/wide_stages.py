"""Cut a model into stages that have several workers each: they share split layers, or the batch, or both.

A stage whose layers are split `ways` times on W workers has W / ways replicas, which take microbatches in turn. Shards
of a layer stay in one stage. The cut minimizes the time of the slowest stage, whose shards run at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.predict import predicted
from rainband.model_parallel.placement.profile import Profile, Resources
from rainband.model_parallel.placement.shard_names import shard_of

MAX_BLOCKS = 60  # neighbors are merged until at most this many are left
SHARD = re.compile(r"(?:_?(?:first|second))?_?(?:layer_shards_\d+|tile\d+_(?:input|layer))")


def wide_stages(
    profile: Profile, num_stages: int, width: int, splits: Mapping[str, str], resources: Resources | None = None
) -> Placement:
    """Return a pipeline of stages with `width` workers each."""
    blocks = _blocks(profile)
    if len(blocks) < num_stages:
        raise ValueError(
            f"{profile.model or 'the model'} has {len(blocks)} parts that can be stages, too few for {num_stages}: use "
            "fewer stages, or split fewer layers."
        )
    cuts = _best_cuts(profile, _merged(profile, blocks, max(MAX_BLOCKS, num_stages)), num_stages, width)
    return _in_stages(profile, cuts, width, splits, resources or Resources(num_machines=num_stages * width))


def data_then_model_parallel(
    profile: Profile, width: int, splits: Mapping[str, str], resources: Resources
) -> Placement:
    """Return a pipeline of two stages: what comes before the first split layer, and the rest."""
    blocks = _blocks(profile)
    at = next(number for number, block in enumerate(blocks) if any(shard_of(unit) is not None for unit in block))
    cuts = [tuple(unit for block in part for unit in block) for part in (blocks[:at], blocks[at:])]
    return _in_stages(profile, cuts, width, splits, resources, "hybrid")


def _in_stages(
    profile: Profile,
    cuts: Sequence[tuple[str, ...]],
    width: int,
    splits: Mapping[str, str],
    resources: Resources,
    partitioner: str = "wide_stages",
) -> Placement:
    plan = Placement(
        model=profile.model,
        kind="pipeline",
        partitioner=partitioner,
        num_machines=resources.num_machines,
        stages=tuple(_placed(profile, units, tuple(range(n * width, (n + 1) * width))) for n, units in enumerate(cuts)),
        splits=dict(splits),
    )
    return predicted(plan, profile, resources)


def shares(profile: Profile, units: Sequence[str]) -> dict[str, int]:
    """Return which machine of a stage has each unit: shards are dealt; others are where their only input is."""
    where: dict[str, int] = {}
    read: dict[str, set[int]] = {unit: set() for unit in units}
    for unit in units:
        shard = shard_of(unit)
        where[unit] = shard if shard is not None else min(read[unit]) if len(read[unit]) == 1 else 0
        for value in profile.made_by(unit):
            for reader in value.readers:
                if reader in read:
                    read[reader].add(where[unit])
    return where


def _placed(profile: Profile, units: tuple[str, ...], machines: tuple[int, ...]) -> PlacedStage:
    return PlacedStage(machines, units, {unit: way for unit, way in shares(profile, units).items() if way})


def _blocks(profile: Profile) -> list[tuple[str, ...]]:
    """Return units that must be in one stage, in order: the shards of a layer, and all between them."""
    last: dict[str, int] = {}
    for number, unit in enumerate(profile.names):
        if shard_of(unit) is not None:
            last[SHARD.split(unit)[0]] = number
    blocks: list[tuple[str, ...]] = []
    begin = end = 0
    for number, unit in enumerate(profile.names):
        if shard_of(unit) is not None:
            end = max(end, last[SHARD.split(unit)[0]])
        if number >= end:
            blocks.append(profile.names[begin : number + 1])
            begin = end = number + 1
    return blocks


def _merged(profile: Profile, blocks: list[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    while len(blocks) > most:
        sums = [profile.seconds(one) + profile.seconds(other) for one, other in pairwise(blocks)]
        at = sums.index(min(sums))
        blocks = [*blocks[:at], blocks[at] + blocks[at + 1], *blocks[at + 2 :]]
    return blocks


def _best_cuts(
    profile: Profile, blocks: Sequence[tuple[str, ...]], num_stages: int, width: int
) -> list[tuple[str, ...]]:
    def units(begin: int, end: int) -> tuple[str, ...]:
        return tuple(unit for block in blocks[begin:end] for unit in block)

    @cache
    def stage_s(begin: int, end: int) -> float:
        stage = _placed(profile, units(begin, end), ())
        if width % stage.ways:
            return float("inf")
        slowest = max(profile.seconds(stage.units_of(way)) for way in range(stage.ways))
        return slowest * stage.ways / width

    @cache
    def best(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the slowest stage's time, and where the stages end, of the first blocks in `stages` stages."""
        if stages == 1:
            return stage_s(0, end), (end,)
        found: tuple[float, tuple[int, ...]] = (float("inf"), (end,))
        for middle in range(stages - 1, end):
            before, cuts = best(middle, stages - 1)
            seconds = max(before, stage_s(middle, end))
            if seconds < found[0]:
                found = seconds, (*cuts, end)
        return found

    seconds, cuts = best(len(blocks), num_stages)
    if seconds == float("inf"):
        ways = sorted({_placed(profile, block, ()).ways for block in blocks} - {1})
        raise ValueError(
            f"layers are split {' and '.join(map(str, ways))} ways, and a stage has {width} workers, which must be a "
            "multiple of each: split the layers alike, or use more stages, so that they are in different ones."
        )
    return [units(begin, end) for begin, end in pairwise((0, *cuts))]
