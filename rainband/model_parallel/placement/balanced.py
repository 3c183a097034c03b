"""Place units on machines so that one batch takes the least time within a memory limit: branches run in parallel.

Small graphs are searched completely. Larger ones start from several guesses (all on one machine, equal stretches of the
order, each unit where it would finish first) and move one unit at a time while that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from rainband.model_parallel.placement.merge_units import along_chains
from rainband.model_parallel.placement.placement import Placement, from_placement
from rainband.model_parallel.placement.predict import PartitionClock, predicted
from rainband.model_parallel.placement.profile import Profile, Resources

MAX_COMPLETE = 5_000  # placements that are all tried
MAX_UNITS = 32  # more are merged along chains
NEARLY = 1.05  # times within this factor of the best count as equal: fewer machines win
MAX_ROUNDS = 20  # each tries every unit on every machine


def balanced(profile: Profile, resources: Resources) -> Placement:
    """Return the partition with the smallest predicted time found, or one on fewer machines that is nearly as fast."""
    coarse = along_chains(profile, MAX_UNITS)
    search = _Search(coarse.profile, resources)
    if resources.num_machines ** max(0, len(coarse.profile.units) - 1) <= MAX_COMPLETE:
        search.seconds_of_all(filter(search.fits, search.everything()))
    else:
        for start in filter(search.fits, search.guesses()):
            search.improve(start)
    if not search.known:
        raise ValueError(
            f"{profile.model or 'the model'} does not fit on {resources.num_machines} machines of "
            f"{resources.memory_bytes:,} bytes: use more machines, or larger ones."
        )
    placed = zip(coarse.profile.names, search.choice(), strict=True)
    placement = {unit: machine for name, machine in placed for unit in coarse.members[name]}
    plan = from_placement(profile, placement, "balanced", resources.num_machines)
    return predicted(plan, profile, resources)


class _Search:
    def __init__(self, profile: Profile, resources: Resources) -> None:
        self.profile, self.resources = profile, resources
        self.clock = PartitionClock(profile, resources.network)
        self.known: dict[tuple[int, ...], float] = {}  # placements that fit, and their times

    def seconds(self, where: tuple[int, ...]) -> float:
        if where not in self.known:
            self.known[where] = self.clock.batch_s(dict(zip(self.profile.names, where, strict=True)))
        return self.known[where]

    def seconds_of_all(self, placements: Iterable[tuple[int, ...]]) -> None:
        for where in placements:
            self.seconds(where)

    def choice(self) -> tuple[int, ...]:
        """Return the placement on the fewest machines among those nearly as fast as the fastest."""
        enough_s = min(self.known.values()) * NEARLY
        near = [where for where, seconds in self.known.items() if seconds <= enough_s]
        return min(near, key=lambda where: (len(set(where)), self.known[where], where))

    def fits(self, where: tuple[int, ...]) -> bool:
        parameters: dict[int, int] = {}
        activations: dict[int, int] = {}
        for unit, machine in zip(self.profile.units, where, strict=True):
            parameters[machine] = parameters.get(machine, 0) + unit.parameter_bytes
            activations[machine] = activations.get(machine, 0) + unit.activation_bytes
        return all(self.resources.fits(parameters[m], activations[m], in_flight=1) for m in parameters)

    def everything(self) -> Iterator[tuple[int, ...]]:
        """Yield all placements; with equal machines, only those with the first unit on machine 0."""
        machines = range(self.resources.num_machines)
        first = machines if self.resources.network.machines_per_group else range(1)
        yield from product(first, *([machines] * (len(self.profile.units) - 1)))

    def guesses(self) -> Iterator[tuple[int, ...]]:
        for used in range(1, self.resources.num_machines + 1):
            yield self._stretches(used, [unit.seconds for unit in self.profile.units])
            yield self._stretches(used, [unit.parameter_bytes for unit in self.profile.units])
        yield self._earliest_finish()
        yield self._first_fit()

    def _stretches(self, used: int, weights: list[float] | list[int]) -> tuple[int, ...]:
        """Return consecutive units for each machine, of about equal weight."""
        total, so_far, where = sum(weights) or 1, 0.0, []
        for weight in weights:
            where.append(min(used - 1, int((so_far + weight / 2) / total * used)))
            so_far += weight
        return tuple(where)

    def _first_fit(self) -> tuple[int, ...]:
        """Return a placement that fills one machine after the other."""
        where: list[int] = []
        for number in range(len(self.profile.units)):
            at = where[-1] if where else 0
            rest = len(self.profile.units) - number - 1
            alone = range(self.resources.num_machines, self.resources.num_machines + rest)  # placed later
            if not self.fits((*where, at, *alone)) and at + 1 < self.resources.num_machines:
                at += 1
            where.append(at)
        return tuple(where)

    def _earliest_finish(self) -> tuple[int, ...]:
        """Place each unit, in order, where its forward would end first (list scheduling)."""
        position = self.profile.position
        network = self.resources.network
        where: list[int] = []
        free, done = [0.0] * self.resources.num_machines, [0.0] * len(self.profile.units)
        for number, unit in enumerate(self.profile.units):
            read = [(v.num_bytes, position[v.maker]) for v in self.profile.values if unit.name in v.readers]
            ends = []
            for machine in range(self.resources.num_machines):
                arrivals = [done[m] + network.transfer_s(size, where[m], machine) for size, m in read]
                ends.append(max([free[machine], *arrivals]) + unit.seconds)
            best = ends.index(min(ends))
            done[number] = free[best] = ends[best]
            where.append(best)
        return tuple(where)

    def improve(self, where: tuple[int, ...]) -> None:
        """Move one unit at a time to its best machine, until no move helps."""
        for _ in range(MAX_ROUNDS):
            before = where
            for number in range(len(where)):
                others = [where[:number] + (m,) + where[number + 1 :] for m in range(self.resources.num_machines)]
                where = min([where, *filter(self.fits, others)], key=self.seconds)
            if where == before:
                break
