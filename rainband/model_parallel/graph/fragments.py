"""Fragments: the parts of a cut model that machines of a placement run, and the values between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from rainband.model_parallel.graph.fragment_order import Key, fragment_keys
from rainband.model_parallel.graph.graph import Cut


@dataclass(frozen=True)
class Fragment:
    """Some nodes of one machine that run together; see fragment_order.py."""

    machine: int
    level: int
    nodes: tuple[str, ...]
    reads: tuple[str, ...]  # values made elsewhere: inputs of the model, or of other fragments
    makes: tuple[str, ...]  # values that other fragments, or the caller, read


@dataclass(frozen=True)
class FragmentLayout:
    """All fragments of a placement, in an order in which they can run, with the readers of each value."""

    fragments: tuple[Fragment, ...]
    maker: Mapping[str, int]  # value -> the index of the fragment that makes it
    readers: Mapping[str, tuple[int, ...]]  # value -> indices of fragments that read it
    answer_machine: int  # where the model's outputs are collected
    outputs: tuple[str, ...]

    @property
    def answer_fragment(self) -> int:
        """The fragment that makes the last output, after which the loss can be computed."""
        return max((self.maker[v] for v in self.outputs if v in self.maker), default=len(self.fragments) - 1)

    def machines(self) -> list[int]:
        return sorted({fragment.machine for fragment in self.fragments})

    def destinations(self, value: str) -> tuple[int, ...]:
        """Return the other machines that need a value, each once."""
        own = self.fragments[self.maker[value]].machine
        needing = {self.fragments[index].machine for index in self.readers.get(value, ())}
        if value in self.outputs:
            needing.add(self.answer_machine)
        return tuple(sorted(needing - {own}))

    def crossings(self) -> list[tuple[str, int]]:
        """Return (value, destination machine), each once: the messages of one forward pass."""
        return [(value, machine) for value in self.maker for machine in self.destinations(value)]


def by_level(cut: Cut, placement: Mapping[str, int]) -> FragmentLayout:
    """Return the fragments of any placement of the cut's units on machines."""
    machine = {name: placement[cut.leaders[name]] for name in cut.nodes}
    reads = {name: [value for value in cut.reads(name) if value in cut.nodes] for name in cut.nodes}
    return _layout(cut, fragment_keys(reads, machine))


def by_stage(cut: Cut, stages: Mapping[str, int]) -> FragmentLayout:
    """Return one fragment per pipeline stage; the machine of a fragment is its stage."""
    keys = {name: (stages[cut.leaders[name]], stages[cut.leaders[name]], 0) for name in cut.nodes}
    back = [(v, n) for n in cut.nodes for v in cut.reads(n) if v in keys and keys[v] > keys[n]]
    if back:
        value, name = back[0]
        raise ValueError(
            f"this is no pipeline: {name} in stage {keys[name][0]} reads {value} of stage {keys[value][0]}. "
            "Let values go to later stages only."
        )
    return _layout(cut, keys)


LEVELS = 1 << 20  # of a stage, at most: levels of stage s are counted from s * LEVELS


def by_stage_and_level(cut: Cut, stages: Mapping[str, int], machines: Mapping[str, int]) -> FragmentLayout:
    """Return the fragments of stages on several machines each, from units -> stages and units -> machines."""
    keys: dict[str, Key] = {}
    for stage in sorted(set(stages.values())):
        inside = [name for name in cut.nodes if stages[cut.leaders[name]] == stage]
        reads = {name: [value for value in cut.reads(name) if value in inside] for name in inside}
        found = fragment_keys(reads, {name: machines[cut.leaders[name]] for name in inside})
        keys |= {
            name: (stage * LEVELS + level, machine, component) for name, (level, machine, component) in found.items()
        }
    return _layout(cut, {name: keys[name] for name in cut.nodes})


def dealt(layout: FragmentLayout, machines: int) -> FragmentLayout:
    """Return the same stages dealt to `machines`: stage s is on machine s mod their number."""
    fragments = tuple(replace(fragment, machine=fragment.machine % machines) for fragment in layout.fragments)
    return replace(layout, fragments=fragments, answer_machine=layout.answer_machine % machines)


def _layout(cut: Cut, keys: Mapping[str, Key]) -> FragmentLayout:
    order = sorted(set(keys.values()))
    members = {key: tuple(name for name in cut.nodes if keys[name] == key) for key in order}
    wanted = set(cut.outputs)
    fragments = []
    for key in order:
        inside = set(members[key])
        read_outside = {v for n in cut.nodes if keys[n] != key for v in cut.reads(n)}
        fragments.append(
            Fragment(
                machine=key[1],
                level=key[0],
                nodes=members[key],
                reads=_in_order(v for n in members[key] for v in cut.reads(n) if v not in inside),
                makes=tuple(name for name in members[key] if name in read_outside or name in wanted),
            )
        )
    maker = {value: number for number, fragment in enumerate(fragments) for value in fragment.makes}
    readers = {
        value: tuple(number for number, fragment in enumerate(fragments) if value in fragment.reads)
        for value in [*maker, *cut.inputs]
    }
    return FragmentLayout(tuple(fragments), maker, readers, _where_the_answer_is(cut, fragments, maker), cut.outputs)


def _where_the_answer_is(cut: Cut, fragments: list[Fragment], maker: Mapping[str, int]) -> int:
    """Return the machine of the output that is made last."""
    made = [maker[value] for value in cut.outputs if value in maker]
    return fragments[max(made)].machine if made else fragments[-1].machine


def _in_order(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def as_module(cut: Cut, fragment: Fragment) -> fx.GraphModule:
    """Return the fragment as a module that takes the values it reads and returns the tuple of those it makes.

    Submodules and parameters are the cut's own objects, under their own names. A node that writes into its input
    gets a copy of it where that memory is not its own alone.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources = {node.name: node for node in cut.module.graph.nodes}
    for value in fragment.reads:
        copies[sources[value]] = graph.placeholder(value)
    for name in fragment.nodes:
        node = cut.nodes[name]
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        changes = copies
        if name in cut.writers:
            written = sources[cut.writers[name].value]
            if not _is_alone(cut, fragment, node, written):
                changes = copies | {written: graph.call_function(torch.clone, (copies[written],))}
        copies[node] = graph.node_copy(node, changes.__getitem__)
    graph.output(tuple(copies[cut.nodes[name]] for name in fragment.makes))
    return fx.GraphModule(cut.module, graph)


def _is_alone(cut: Cut, fragment: Fragment, writer: fx.Node, source: fx.Node) -> bool:
    """Return True if only the writer reads the memory that it overwrites."""
    made_here = source.name in fragment.nodes
    return made_here and list(source.users) == [writer] and not cut.writers[writer.name].has_other_names
