r"""What a plan should take, from a profile and a network.

A partition does one batch at a time: fragments in their order, each when its machine is free and what it reads is
there.

A pipeline gives a batch as often as its slowest link allows (PipeDream, Narayanan et al. 2019). For a stage
of m machines with parameters w, and the values a that go to later stages,

    stage     max( sum T_l , 2 (m - 1) / m |w| / B ) / m
    between   2 a / B                                   (here: the bytes forward and backward, as measured)

A round of m batches is one update, for which each machine sends 2 (m - 1) / m |w| bytes, as in a ring: B is the speed
of a machine's own card, in each direction. (The paper's first version has twice that, for lines that send and receive
in turn.) In a stage that is in G groups, a group sends 2 (G - 1) / G |w| to the others, once in a round.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rainband.pipeline.levels import Key, fragment_keys
from rainband.pipeline.plan import Plan, Prediction, Stage, memory
from rainband.pipeline.profile import Network, Profile, Resources, Value


def predicted(plan: Plan, profile: Profile, resources: Resources) -> Plan:
    """The plan with what it should take."""
    network = resources.network
    if plan.kind == "pipeline":
        batch_s = pipeline_s(plan, profile, network)
    else:
        batch_s = partition_s(profile, plan.placement(), network)
    prediction = Prediction(
        batch_s=batch_s,
        alone_s=profile.seconds(profile.names),
        crossing_bytes=sum(count for _, _, count in crossings(plan, profile)),
        memory_bytes=memory(plan, profile, resources),
    )
    return msgspec.structs.replace(plan, predicted=prediction)


def crossings(plan: Plan, profile: Profile) -> list[tuple[Value, int, int]]:
    """(value, stage that reads it, bytes both ways), once per value and stage that is not its own."""
    stage = plan.stage_of()
    found = []
    for value in profile.values:
        for reader in sorted({stage[r] for r in value.readers} - {stage[value.maker]}):
            found.append((value, reader, value.num_bytes))
    return found


def pipeline_s(plan: Plan, profile: Profile, network: Network) -> float:
    """Seconds between two batches, in the steady state: the slowest machine or link."""
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


def _stage_s(stage: Stage, profile: Profile, network: Network) -> float:
    """A batch's share of a round: batches are dealt to all machines alike, gradients summed in each group."""
    groups = [network.group(machine) for machine in stage.machines]
    together = max(map(groups.count, groups))
    sync_s = ring_bytes(together, profile.parameter_bytes(stage.units)) / network.speed(True)
    return max(profile.seconds(stage.units), sync_s) / len(stage.machines)


def _between_groups_s(plan: Plan, profile: Profile, network: Network) -> list[float]:
    """Of each group: all its stages that are in other groups, too, share the way there."""
    used: dict[int, float] = {}
    for stage in plan.stages:
        spread = _groups(stage, network)
        size = ring_bytes(len(spread), profile.parameter_bytes(stage.units)) / len(stage.machines)
        for group in spread:
            used[group] = used.get(group, 0.0) + size / network.speed(False)
    return list(used.values())


def ring_bytes(machines: int, num_bytes: int) -> float:
    """What each of so many machines sends to sum vectors of this size."""
    return 2 * (machines - 1) / machines * num_bytes


def _groups(stage: Stage, network: Network) -> tuple[int, ...]:
    """The groups that a stage is spread over."""
    return tuple(sorted({network.group(machine) for machine in stage.machines}))


def _crossing_bytes(plan: Plan, profile: Profile, stage: int) -> int:
    """Between this stage and those before it on one side, and all later ones on the other."""
    of = plan.stage_of()
    return sum(v.num_bytes for v in profile.values if of[v.maker] <= stage < max(of[r] for r in v.readers))


def partition_s(profile: Profile, placement: Mapping[str, int], network: Network) -> float:
    """Seconds of one batch, forward and backward."""
    return PartitionClock(profile, network).batch_s(placement)


class PartitionClock:
    """Plays one batch of a partition; made once, because a search asks it thousands of times."""

    def __init__(self, profile: Profile, network: Network) -> None:
        self.network = network
        self.names = profile.names
        self.forward = {unit.name: unit.forward_s for unit in profile.units}
        self.backward = {unit.name: unit.backward_s for unit in profile.units}
        self.values = [(v.name, v.maker, v.readers, v.forward_bytes, v.backward_bytes) for v in profile.values]
        self.read: dict[str, list[str]] = {name: [] for name in self.names}
        for value in profile.values:
            for reader in value.readers:
                self.read[reader].append(value.maker)

    def batch_s(self, placement: Mapping[str, int]) -> float:
        key = fragment_keys(self.read, placement)
        order = sorted(set(key.values()))
        edges = self._edges(key)
        forward = self._play(order, _sums(self.forward, key), edges)
        back = {(reader, maker): (size_back, size) for (maker, reader), (size, size_back) in edges.items()}
        return forward + self._play(order[::-1], _sums(self.backward, key), back)

    def _edges(self, key: Mapping[str, Key]) -> dict[tuple[Key, Key], tuple[int, int]]:
        """(fragment, fragment) -> bytes forward, bytes backward."""
        edges: dict[tuple[Key, Key], tuple[int, int]] = {}
        for _, maker, readers, size, size_back in self.values:
            for there in {key[reader] for reader in readers} - {key[maker]}:
                pair = (key[maker], there)
                before = edges.get(pair, (0, 0))
                edges[pair] = (before[0] + size, before[1] + size_back)
        return edges

    def _play(
        self,
        order: list[Key],
        work_s: Mapping[Key, float],
        edges: Mapping[tuple[Key, Key], tuple[int, int]],
    ) -> float:
        """When the last fragment is done, if each starts when its machine is free and what it reads is there."""
        free: dict[int, float] = {}
        done: dict[Key, float] = {}
        sources: dict[Key, list[tuple[Key, int]]] = {}
        for (source, there), (size, _) in edges.items():
            sources.setdefault(there, []).append((source, size))
        for fragment in order:
            _, machine, _ = fragment
            start = free.get(machine, 0.0)
            for source, size in sources.get(fragment, ()):
                start = max(start, done[source] + self.network.transfer_s(size, source[1], machine))
            done[fragment] = free[machine] = start + work_s[fragment]
        return max(done.values())


def _sums(seconds: Mapping[str, float], key: Mapping[str, Key]) -> dict[Key, float]:
    totals: dict[Key, float] = {}
    for name, fragment in key.items():
        totals[fragment] = totals.get(fragment, 0.0) + seconds[name]
    return totals
