r"""Predict a placement's time per batch from a profile and a network.

A partition computes one batch at a time: fragments in their order, each when its machine is free and its inputs have
arrived. A value is sent once to each machine that reads it, and its gradient is sent back once; messages queue at the
sender's NIC and at the receiver's.

A pipeline finishes batches at the rate of its slowest stage or link (PipeDream, Narayanan et al. 2019). For a stage
of m machines with parameters w, and the values a that go to later stages,

    stage     ( sum T_l + 2 (m - 1) / m |w| / B ) / m
    between   2 a / B                                   (here: the bytes forward and backward, as measured)

(The paper has the larger of both terms of a stage, not their sum: its replicas compute while they exchange gradients,
and ours wait.) A round of m batches is one update, for which each machine sends 2 (m - 1) / m |w| bytes, as in a ring:
B is the speed of a machine's NIC, in each direction. (The paper's first version has twice that, for lines that send and
receive in turn.) In a stage that is in G groups, a group sends 2 (G - 1) / G |w| to the others, once in a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

import msgspec

from rainband.model_parallel.graph.fragment_order import Key, fragment_keys
from rainband.model_parallel.placement.placement import PlacedStage, Placement, Prediction, memory
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Resources
from rainband.model_parallel.schedules.play import Send, Times, play


class Step(NamedTuple):
    """Forward or backward of a microbatch through a fragment of a partition."""

    fragment: Key
    kind: Literal["F", "B"]
    microbatch: int


def predicted(plan: Placement, profile: Profile, resources: Resources) -> Placement:
    """Return the placement with its prediction."""
    network, is_pipeline = resources.network, plan.kind == "pipeline"
    predict = pipeline_s(plan, profile, network) if is_pipeline else partition_s(profile, plan.placement(), network)
    prediction = Prediction(
        batch_s=predict,
        alone_s=profile.seconds(profile.names),
        crossing_bytes=sum(count for _, _, count in crossings(plan, profile)),
        memory_bytes=memory(plan, profile, resources),
    )
    return msgspec.structs.replace(plan, predicted=prediction)


def crossings(plan: Placement, profile: Profile) -> list[tuple[CutValue, int, int]]:
    """Return (value, reading stage, bytes both ways) for each value and each other stage that reads it."""
    stage = plan.stage_of()
    return [
        (value, reader, value.num_bytes)
        for value in profile.values
        for reader in sorted({stage[r] for r in value.readers} - {stage[value.maker]})
    ]


def pipeline_s(plan: Placement, profile: Profile, network: LinkSpeed) -> float:
    """Return the seconds between two batches in the steady state: those of the slowest machine or link."""
    machines: dict[tuple[int, ...], float] = {}
    links: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for number, stage in enumerate(plan.stages):
        machines[stage.machines] = machines.get(stage.machines, 0.0) + _stage_s(stage, profile, network)
        if number and (before := plan.stages[number - 1]).machines != stage.machines:
            spread = _groups(before, network)
            near = spread == _groups(stage, network)
            size = _crossing_bytes(plan, profile, number - 1)
            link = (before.machines, stage.machines)
            links[link] = links.get(link, 0.0) + size / network.speed(near) / (len(spread) if near else 1)
    return max([*machines.values(), *links.values(), *_between_groups_s(plan, profile, network)])


def _stage_s(stage: PlacedStage, profile: Profile, network: LinkSpeed) -> float:
    """Return the seconds per batch of a stage: replicas compute batches in turn, then sum gradients in each group.

    Of machines that share a batch, the one with most to compute counts; what they send each other is left out.
    """
    return max(_share_s(stage, way, profile, network) for way in range(stage.ways))


def _share_s(stage: PlacedStage, way: int, profile: Profile, network: LinkSpeed) -> float:
    units, count = stage.units_of(way), stage.replicas
    groups = [network.group(machine) for machine in stage.machines[way * count : (way + 1) * count]]
    together = max(map(groups.count, groups))
    sync_s = ring_bytes(together, profile.parameter_bytes(units)) / network.speed(True)
    return (profile.seconds(units) + sync_s) / count


def _between_groups_s(plan: Placement, profile: Profile, network: LinkSpeed) -> list[float]:
    """Return the seconds per batch of each group's link: its stages that span several groups share it."""
    used: dict[int, float] = {}
    for stage in plan.stages:
        spread = _groups(stage, network)
        size = ring_bytes(len(spread), profile.parameter_bytes(stage.units)) / len(stage.machines)
        for group in spread:
            used[group] = used.get(group, 0.0) + size / network.speed(False)
    return list(used.values())


def ring_bytes(machines: int, num_bytes: int) -> float:
    """Return the bytes that each of `machines` sends to sum vectors of this size in a ring."""
    return 2 * (machines - 1) / machines * num_bytes


def _groups(stage: PlacedStage, network: LinkSpeed) -> tuple[int, ...]:
    """Return the groups in which a stage has machines."""
    return tuple(sorted({network.group(machine) for machine in stage.machines}))


def _crossing_bytes(plan: Placement, profile: Profile, stage: int) -> int:
    """Return the bytes between the stages up to this one and all later ones."""
    of = plan.stage_of()
    return sum(v.num_bytes for v in profile.values if of[v.maker] <= stage < max(of[r] for r in v.readers))


def partition_s(profile: Profile, placement: Mapping[str, int], network: LinkSpeed) -> float:
    """Return the seconds of one batch, forward and backward."""
    return PartitionClock(profile, network).batch_s(placement)


class PartitionClock:
    """Plays batches of a partition; made once, because a search plays thousands of placements."""

    def __init__(self, profile: Profile, network: LinkSpeed) -> None:
        self.network = network
        self.forward = {unit.name: unit.forward_s for unit in profile.units}
        self.backward = {unit.name: unit.backward_s for unit in profile.units}
        self.values = profile.values
        self.read: dict[str, list[str]] = {name: [] for name in profile.names}
        for value in profile.values:
            for reader in value.readers:
                self.read[reader].append(value.maker)

    def batch_s(self, placement: Mapping[str, int], microbatches: int = 1) -> float:
        return self.play(placement, microbatches).total_s

    def play(self, placement: Mapping[str, int], microbatches: int = 1) -> Times[Step]:
        """Return when each fragment runs: microbatches one after the other, each forward, then backward."""
        key = fragment_keys(self.read, placement)
        order = sorted(set(key.values()))
        rows: dict[int, list[Step]] = {}
        for microbatch in range(microbatches):
            for step in [*(Step(f, "F", microbatch) for f in order), *(Step(f, "B", microbatch) for f in order[::-1])]:
                rows.setdefault(step.fragment[1], []).append(step)
        work = {"F": _sums(self.forward, key), "B": _sums(self.backward, key)}
        seconds = {step: work[step.kind][step.fragment] for row in rows.values() for step in row}
        sends = [send for microbatch in range(microbatches) for send in self._sends(key, order, microbatch)]
        return play(list(rows.values()), seconds, sends)

    def _sends(self, key: Mapping[str, Key], order: Sequence[Key], microbatch: int) -> Iterator[Send[Step]]:
        """Yield the messages of values and gradients, once per reading machine; the loss reads all unread values."""
        read: set[Key] = set()
        for value in self.values:
            maker, readers = key[value.maker], sorted({key[reader] for reader in value.readers} - {key[value.maker]})
            if readers:
                read.add(maker)
            machines = {reader[1] for reader in readers}  # each starts at the next one, so that not all start at 0
            for machine in sorted(machines, key=lambda other, here=maker[1]: (other < here, other)):  # type: ignore[misc]
                those = [reader for reader in readers if reader[1] == machine]
                there = self.network.sending_s(value.forward_bytes, maker[1], machine)
                yield Send((Step(maker, "F", microbatch),), tuple(Step(f, "F", microbatch) for f in those), *there)
                if value.backward_bytes or not value.forward_bytes:  # integers have no gradient
                    back = self.network.sending_s(value.backward_bytes, machine, maker[1])
                    yield Send(tuple(Step(f, "B", microbatch) for f in those), (Step(maker, "B", microbatch),), *back)
        last = [fragment for fragment in order if fragment not in read]
        for one, other in product(last, last):
            if one != other:
                yield Send((Step(one, "F", microbatch),), (Step(other, "B", microbatch),))


def _sums(seconds: Mapping[str, float], key: Mapping[str, Key]) -> dict[Key, float]:
    totals: dict[Key, float] = {}
    for name, fragment in key.items():
        totals[fragment] = totals.get(fragment, 0.0) + seconds[name]
    return totals
