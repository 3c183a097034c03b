"""Group the nodes of a placement into fragments, which need nothing from other machines while they run.

    level(n) = max over what n reads of ( level + 1 if it is read on any other machine, else level )

A fragment is a connected component of the nodes of one (machine, level). A value that crosses machines raises the level
of all its readers. So fragments of any placement have an order, even if two machines depend on each other
back and forth; a value is sent as soon as it is made; and no fragment waits for another's
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Key = tuple[int, int, int]  # level, machine, number of the component


def fragment_keys(reads: Mapping[str, Sequence[str]], machine: Mapping[str, int]) -> dict[str, Key]:
    """Return the fragment of each node. `reads`: nodes in an order in which they can run, with the nodes each reads."""
    crossing = {source for name, sources in reads.items() for source in sources if machine[source] != machine[name]}
    level: dict[str, int] = {}
    for name, sources in reads.items():
        level[name] = max((level[source] + (source in crossing) for source in sources), default=0)
    return {
        name: (level[name], machine[name], component) for name, component in _components(reads, machine, level).items()
    }


def _components(
    reads: Mapping[str, Sequence[str]], machine: Mapping[str, int], level: Mapping[str, int]
) -> dict[str, int]:
    """Return, for each node, the number of the first node it is connected to on its machine and level."""
    parent = {name: number for number, name in enumerate(reads)}
    names = list(reads)

    def root(name: str) -> int:
        while names[parent[name]] != name:
            name = names[parent[name]]
        return parent[name]

    for name, sources in reads.items():
        for source in sources:
            if (machine[source], level[source]) == (machine[name], level[name]):
                one, other = sorted((root(source), root(name)))
                parent[names[other]] = one
    return {name: root(name) for name in reads}
