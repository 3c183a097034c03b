"""Merge units of a profile so that a search has fewer of them to place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rainband.model_parallel.placement.profile import CutValue, Profile, Unit


@dataclass(frozen=True)
class Coarse:
    profile: Profile
    members: Mapping[str, tuple[str, ...]]  # merged unit -> the units it stands for, in order


def along_order(profile: Profile, at_most: int) -> Coarse:
    """Merge neighbors in the order of computing, of which pipeline stages are stretches."""
    return _merged(profile, at_most, lambda small: [(i, i + 1) for i in range(len(small.units) - 1)])


def along_chains(profile: Profile, at_most: int) -> Coarse:
    """Merge units with their only reader, if it reads nothing else, so branches stay apart."""
    return _merged(profile, at_most, _links_of_chains)


def _links_of_chains(profile: Profile) -> list[tuple[int, int]]:
    readers: dict[int, set[int]] = {}
    makers: dict[int, set[int]] = {}
    for value in profile.values:
        for reader in value.readers:
            readers.setdefault(profile.position[value.maker], set()).add(profile.position[reader])
            makers.setdefault(profile.position[reader], set()).add(profile.position[value.maker])
    pairs = [(maker, min(found)) for maker, found in sorted(readers.items()) if len(found) == 1]
    return [(maker, reader) for maker, reader in pairs if len(makers[reader]) == 1]


def _merged(profile: Profile, at_most: int, pairs_of: Callable[[Profile], list[tuple[int, int]]]) -> Coarse:
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in profile.names}
    total_s = sum(unit.seconds for unit in profile.units) or 1.0
    total_bytes = sum(unit.parameter_bytes for unit in profile.units) or 1

    def weight(unit: Unit) -> float:
        return unit.seconds / total_s + unit.parameter_bytes / total_bytes

    while len(profile.units) > at_most and (pairs := pairs_of(profile)):
        units = profile.units
        first, second = min(pairs, key=lambda pair: (weight(units[pair[0]]) + weight(units[pair[1]]), pair))
        one, other = units[first].name, units[second].name
        profile = _merge(profile, first, second)
        members[one] = members[one] + members.pop(other)
    order = {name: number for number, name in enumerate(members)}
    return Coarse(profile, {name: members[name] for name in sorted(profile.names, key=order.__getitem__)})


def _merge(profile: Profile, first: int, second: int) -> Profile:
    """Merge two units at the position of the second, under the name of the first."""
    a, b = profile.units[first], profile.units[second]
    both = Unit(
        a.name,
        a.forward_s + b.forward_s,
        a.backward_s + b.backward_s,
        a.parameter_bytes + b.parameter_bytes,
        a.activation_bytes + b.activation_bytes,
        a.what,
    )
    units = [both if unit is b else unit for unit in profile.units if unit is not a]

    def renamed(name: str) -> str:
        return a.name if name == b.name else name

    values = []
    for value in profile.values:
        maker = renamed(value.maker)
        readers = tuple(dict.fromkeys(renamed(r) for r in value.readers if renamed(r) != maker))
        if readers:
            values.append(CutValue(value.name, maker, readers, value.forward_bytes, value.backward_bytes))
    return Profile(profile.model, profile.batch_size, tuple(units), tuple(values))
