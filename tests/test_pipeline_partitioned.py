"""A model on several machines gives the loss and gradients of the whole one, and sends each value once per machine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rainband.model_parallel.execution.fragment_run import FragmentMessage, FragmentRun
from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.fragment_order import fragment_keys
from rainband.model_parallel.graph.graph import Cut
from tests.pipeline_models import (
    Branches,
    Skips,
    examples,
    floats,
    one_thread,  # noqa: F401 (a fixture for all)
)

NAMES = ["chain", "skips", "branches", "tied", "several", "recurrent", "transformer", "on_shapes"]


def loss_of(answer: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]
    return torch.stack([(leaf * leaf).mean() for leaf in leaves]).sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def random_placement(graph: Cut, machines: int, seed: int) -> dict[str, int]:
    dice = random.Random(seed)
    return {unit: dice.randrange(machines) for unit in graph.units}


@pytest.mark.parametrize("name", NAMES)
def test_any_placement_gives_the_loss_and_gradients_of_the_whole_model(name: str) -> None:
    model, args = examples()[name]
    graph = cut(model, args)
    buffers = {
        key: value.clone() for key, value in model.state_dict().items() if key not in dict(model.named_parameters())
    }
    whole = loss_of(model(*args))
    whole.backward()
    expected = gradients(model)
    for seed in range(6):
        model.load_state_dict({**model.state_dict(), **buffers})
        parts = Partitioned(graph, random_placement(graph, machines=1 + seed % 3, seed=seed))
        loss = parts.loss_and_gradients(loss_of, args)
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-12)


def test_a_chain_is_the_same_to_the_bit() -> None:
    model, args = examples()["chain"]
    graph = cut(model, args)
    loss_of(model(*args)).backward()
    expected = gradients(model)
    for seed in range(12):
        Partitioned(graph, random_placement(graph, 3, seed)).loss_and_gradients(loss_of, args)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model).values(), expected.values(), strict=True))


# ---- messages ----


def crossings(graph: Cut, placement: Mapping[str, int]) -> set[tuple[str, int]]:
    """(value, machine) by the definition: some node on that machine reads a value that is made elsewhere."""
    where = {name: placement[graph.leaders[name]] for name in graph.nodes}
    return {
        (value, where[name])
        for name in graph.nodes
        for value in graph.reads(name)
        if value in where and where[value] != where[name]
    }


@pytest.mark.parametrize("name", ["chain", "skips", "branches", "recurrent", "transformer"])
def test_messages_are_the_distinct_pairs_of_value_and_destination_machine(name: str) -> None:
    model, args = examples()[name]
    graph = cut(model, args)
    for seed in range(8):
        placement = random_placement(graph, 3, seed)
        parts = Partitioned(graph, placement)
        parts.loss_and_gradients(loss_of, args)
        forward = [(m.value, m.destination) for m in parts.messages if m.kind == "value"]
        to_the_loss = {
            (v, parts.layout.answer_machine) for v in graph.outputs if home(parts, v) != parts.layout.answer_machine
        }
        assert len(forward) == len(set(forward))
        assert set(forward) == crossings(graph, placement) | to_the_loss
        backward = [(m.value, m.source) for m in parts.messages if m.kind == "gradient"]
        assert sorted(backward) == sorted(forward)  # every value of these models is learned through


def home(parts: Partitioned, value: str) -> int:
    return parts.layout.fragments[parts.layout.maker[value]].machine


def test_a_value_that_many_read_elsewhere_goes_there_once_and_comes_back_once() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.readers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            y: Tensor = sum(reader(h) for reader in self.readers)
            return y

    model = Fan().double()
    graph = cut(model, (floats(4, 8),))
    parts = Partitioned(graph, {unit: int(unit != "stem") for unit in graph.units})
    parts.loss_and_gradients(loss_of, (floats(4, 8),))
    assert [(m.kind, m.value, m.destination, m.num_bytes) for m in parts.messages] == [
        ("value", "stem", 1, 256),  # 4 x 8 doubles
        ("gradient", "stem", 0, 256),
    ]


def test_integers_cross_forward_only() -> None:
    class Indexing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.table = nn.Linear(8, 8), nn.Embedding(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.table(self.a(x).argmax(1))
            return y

    model = Indexing().double()
    graph = cut(model, (floats(4, 8),))
    parts = Partitioned(graph, {"a": 0, "argmax": 0, "table": 1})
    parts.loss_and_gradients(loss_of, (floats(4, 8),))
    assert Counter(m.kind for m in parts.messages) == {"value": 1}
    assert model.a.weight.grad is None and model.table.weight.grad is not None


def test_a_pytree_of_tuples_crosses_as_one_value() -> None:
    model, args = examples()["recurrent"]
    graph = cut(model, args)
    parts = Partitioned(graph, {unit: int(unit in ("second", "out")) for unit in graph.units})
    parts.loss_and_gradients(loss_of, args)
    sent = [m.value for m in parts.messages if m.kind == "value" and m.destination == 1]
    assert len(sent) == len(set(sent)) and "getitem_1" in sent  # the LSTM's state: two tensors


def test_the_models_inputs_are_not_sent() -> None:
    model, args = examples()["several"]
    graph = cut(model, args)
    parts = Partitioned(graph, {unit: int(unit == "b") for unit in graph.units})
    assert set(parts(*args)) == {"sum", "both"}
    assert [m.value for m in parts.messages] == ["b"]


# ---- parts ----


def test_a_part_sends_a_value_before_it_goes_on_with_what_others_do_not_wait_for() -> None:
    """The stem is sent in a message of its own before the left branch, on the same machine, has begun."""
    graph = cut(Branches().double(), (floats(4, 8),))
    parts = Partitioned(graph, {unit: int(unit in ("right", "sigmoid")) for unit in graph.units})
    fragments = [f.nodes for f in parts.layout.fragments if f.machine == 0]
    assert fragments[0] == ("stem", "tanh") and fragments[1] == ("left", "tanh_1")


def test_parts_take_messages_in_any_order() -> None:
    model, args = examples()["skips"]
    graph = cut(model, args)
    placement = random_placement(graph, 3, seed=5)
    Partitioned(graph, placement).loss_and_gradients(loss_of, args)
    expected = gradients(model)
    for seed in range(10):
        dice = random.Random(seed)
        layout = Partitioned(graph, placement).layout
        parts = {machine: FragmentRun(graph, layout, machine) for machine in layout.machines()}
        for part in parts.values():
            part.give(graph.bind(args))
        carry(parts, [message for part in parts.values() for message in computed(part)], dice)
        end = parts[layout.answer_machine]
        loss_of(graph.answer(end.outputs())).backward()
        carry(parts, end.answered() + computed(end), dice)
        torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-12)


def carry(parts: Mapping[int, FragmentRun], messages: list[FragmentMessage], dice: random.Random) -> None:
    while messages:
        message = messages.pop(dice.randrange(len(messages)))
        parts[message.destination].take(message)
        messages += computed(parts[message.destination])


def computed(part: FragmentRun) -> list[FragmentMessage]:
    """All that can be computed now."""
    messages: list[FragmentMessage] = []
    while (index := part.next_forward()) is not None:
        messages += part.forward(index)
    while (index := part.next_backward()) is not None:
        messages += part.backward(index)
    return messages


def test_gradients_are_added_to_those_that_are_there() -> None:
    model = Skips().double().eval()
    args = (floats(4, 8),)
    graph = cut(model, args)
    parts = Partitioned(graph, random_placement(graph, 2, 1))
    parts.loss_and_gradients(loss_of, args)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    parts.loss_and_gradients(loss_of, args)
    torch.testing.assert_close([p.grad for p in model.parameters()], [2 * gradient for gradient in once])


# ---- levels ----


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[dict[str, list[str]], dict[str, int]]:
    count = draw(st.integers(1, 9))
    reads = {
        f"n{n}": [f"n{m}" for m in sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))] if n else []
        for n in range(count)
    }
    return reads, {name: draw(st.integers(0, 2)) for name in reads}


@settings(max_examples=200)
@given(placed_graphs())
def test_fragments_of_any_placement_have_an_order_and_need_nothing_while_they_run(
    placed: tuple[dict[str, list[str]], dict[str, int]],
) -> None:
    reads, machine = placed
    key = fragment_keys(reads, machine)
    for name, sources in reads.items():
        for source in sources:
            assert key[source] <= key[name] if machine[source] == machine[name] else key[source][0] < key[name][0]
            assert key[source] == key[name] or key[source][0] < key[name][0]
    for name, sources in reads.items():  # what crosses is the end of its fragment
        for source in sources:
            if machine[source] != machine[name]:
                inside = [n for n, s in reads.items() if source in s and key[n] == key[source]]
                assert inside == []


def test_machines_that_depend_on_each_other_back_and_forth_are_no_cycle() -> None:
    reads = {"a": [], "b": ["a"], "c": ["b"], "d": ["c", "a"]}
    key = fragment_keys(reads, {"a": 0, "b": 1, "c": 0, "d": 1})
    assert [key[name][:2] for name in reads] == [(0, 0), (1, 1), (2, 0), (3, 1)]
