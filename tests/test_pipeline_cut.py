"""Cutting a module: which tool does it, what stays together, what is refused, what no tool may get wrong silently."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.cut import CutError, cut
from rainband.model_parallel.graph.fragments import as_module, by_level
from rainband.model_parallel.graph.split_marks import whole
from tests.pipeline_models import (
    OnData,
    OnShapes,
    Recurrent,
    Skips,
    Tied,
    Transformer,
    chain,
    examples,
    floats,
    one_thread,  # noqa: F401 (a fixture for all)
    words,
)


@pytest.mark.parametrize(
    ("name", "how"),
    [("chain", "sequential"), ("skips", "fx"), ("transformer", "fx"), ("recurrent", "fx"), ("on_shapes", "export")],
)
def test_the_first_tool_that_can_is_taken(name: str, how: str) -> None:
    model, args = examples()[name]
    assert cut(model, args).how == how


def test_a_transformer_is_opened_into_its_layers() -> None:
    assert cut(Transformer(), (words(3, 5),)).units == ("embed", "encoder_layers_0", "encoder_layers_1", "out")


def test_parameters_are_the_users_own_objects() -> None:
    for model, args in examples().values():
        graph = cut(model, args)
        assert {id(p) for p in graph.parameters_of(tuple(graph.nodes)).values()} == {id(p) for p in model.parameters()}


def test_nothing_about_the_model_is_changed_by_cutting() -> None:
    model = Skips()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    x = torch.ones(4, 8)
    cut(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model.norm.num_batches_tracked) == 0 and torch.equal(model.norm.running_mean, torch.zeros(8))
    assert torch.equal(x, torch.ones(4, 8)) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["chain", "recurrent", "on_shapes", "transformer"])
def test_a_cut_serves_any_batch_size(name: str) -> None:
    """An LSTM whose batch size was frozen by a tracing tool corrupts memory."""
    model, args = examples()[name]
    parts = Partitioned(cut(model, args), dict.fromkeys(cut(model, args).units, 0))
    model.eval() if name == "recurrent" else None
    for size in (2, 7):
        larger = tuple(arg[:1].expand(size, *arg.shape[1:]).clone() for arg in args)
        torch.testing.assert_close(parts(*larger), model(*larger))


def test_inputs_of_a_shape_that_export_did_not_see_are_refused() -> None:
    graph = cut(OnShapes().double(), (floats(4, 8),))
    with pytest.raises((AssertionError, ValueError)):
        graph.bind((floats(4, 6),))


def test_missing_and_superfluous_inputs_are_reported() -> None:
    model, args = examples()["several"]
    graph = cut(model, args)
    assert graph.bind(args)["scale"] == 2.0
    assert graph.bind((args[0],), {"y": args[1], "scale": 3.0})["scale"] == 3.0
    with pytest.raises(ValueError, match=r"the model takes 3 inputs \(x, y, scale\) and was given 1"):
        graph.bind(args[:1])


# ---- what stays together ----


def test_the_parts_of_a_tuple_stay_with_the_node_that_made_it() -> None:
    graph = cut(Recurrent(), (words(3, 5),))
    assert {graph.leaders[name] for name in graph.nodes if name.startswith("getitem")} == {"first", "second"}
    assert not any(unit.startswith("getitem") for unit in graph.units)


def test_numbers_stay_with_the_tensor_they_describe() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z: Tensor = self.b(y.view(y.size(0) * 2, 4)).view(y.size(0), 8)
            return z

    graph = cut(Sizes(), (torch.randn(4, 8),))
    assert graph.units == ("a", "view", "b", "view_1")
    assert graph.leaders["size"] == "a"


# ---- marks ----


def test_a_submodule_marked_whole_is_one_unit() -> None:
    model = nn.Sequential(whole(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8))
    assert cut(model, (torch.randn(4, 8),)).units == ("_0", "_1")


class Pieces(nn.Module):
    """Decides by numbers, but says where it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OnData(), nn.Linear(8, 2)

    def pieces(self) -> Sequence[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) if x.sum() > -1e9 else x
        return y


def test_the_users_pieces_come_before_all_tools_and_keep_their_names() -> None:
    graph = cut(Pieces(), (torch.randn(4, 8),))
    assert (graph.how, graph.units) == ("pieces", ("first", "second"))
    assert "first.a.weight" in graph.parameters_of(("first",))


def test_pieces_that_leave_out_parameters_or_compute_something_else_are_refused() -> None:
    class Short(Pieces):
        def pieces(self) -> Sequence[nn.Module]:
            return [self.first]

    class Swapped(Pieces):
        def pieces(self) -> Sequence[nn.Module]:
            return [self.first, nn.Sequential(self.second, nn.Tanh())]

    with pytest.raises(CutError, match=r"leaves out the parameters second.weight, second.bias: return modules"):
        cut(Short(), (torch.randn(4, 8),))
    with pytest.raises(CutError, match="gives other numbers than the module"):
        cut(Swapped(), (torch.randn(4, 8),))


# ---- traps ----


def test_a_model_that_no_tool_can_follow_is_refused_with_the_reasons_of_both(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CutError) as refused:
        cut(OnData(), (torch.randn(4, 8),))
    message = str(refused.value)
    assert "fx: symbolically traced variables cannot be used as inputs to control flow" in message
    assert "export: Could not guard on data-dependent expression" in message
    assert "Give it a method pieces()" in message


def test_inside_a_sequential_such_a_model_is_one_unit() -> None:
    graph = cut(nn.Sequential(OnData(), nn.Linear(8, 2)), (torch.randn(4, 8),))
    assert graph.units == ("_0", "_1")


def test_random_numbers_are_not_frozen_into_constants() -> None:
    """torch.fx would draw the noise once and add the same for ever; that is noticed, and torch.export does it right."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) + torch.randn(8)
            return y

    graph = cut(Noisy(), (torch.randn(4, 8),))
    assert graph.how == "export" and "randn" in graph.units


class OverwrittenSkip(nn.Module):
    """`h` is read before and after it is overwritten, and by a node that may be elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before = self.b(h)
        h.add_(10)
        y: Tensor = self.c(h) + before
        return y


@pytest.mark.parametrize("elsewhere", ["b", "c", "add_", "add"])
def test_who_read_before_an_overwrite_sees_the_old_value_and_who_read_after_it_the_new(elsewhere: str) -> None:
    """With b on another machine, a naive cut sends h after or while it is overwritten."""
    model = OverwrittenSkip().double().requires_grad_(False)
    x = floats(4, 8)
    graph = cut(model, (x,))
    assert graph.writers["add_"].value == "a"
    parts = Partitioned(graph, {unit: int(unit == elsewhere) for unit in graph.units})
    assert torch.equal(parts(x), model(x))


def test_a_node_that_overwrites_what_only_it_reads_still_does_so() -> None:
    model = chain()
    graph = cut(model, (torch.randn(4, 8),))
    together = by_level(graph, dict.fromkeys(graph.units, 0))
    apart = by_level(graph, {unit: int(unit != "_0") for unit in graph.units})
    clones = [
        [
            node
            for fragment in layout.fragments
            for node in as_module(graph, fragment).graph.nodes
            if "clone" in node.name
        ]
        for layout in (together, apart)
    ]
    assert [len(found) for found in clones] == [0, 1]


def test_a_write_into_memory_that_is_read_under_another_name_is_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.view(-1).mul_(2)
            y: Tensor = self.b(h)
            return y

    with pytest.raises(
        CutError, match=r"fx: node mul_ writes into memory that is read later under another name \(a, view\)"
    ):
        cut(Views(), (torch.randn(4, 8),))


def test_a_module_called_twice_is_two_units_with_one_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(self.a(x).tanh())
            return y

    graph = cut(Twice(), (torch.randn(4, 8),))
    assert graph.units == ("a", "tanh", "a_1")


def test_tied_weights_are_one_parameter_under_two_names() -> None:
    graph = cut(Tied(), (words(4, 5),))
    found = graph.parameters_of(tuple(graph.nodes))
    assert found["embed.weight"] is found["out.weight"]


def test_functional_dropout_follows_the_mode_in_which_the_model_was_cut() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.a(x), 0.5, self.training)

    model = Dropping().eval()
    x = torch.randn(4, 8)
    graph = cut(model, (x,))
    assert torch.equal(Partitioned(graph, dict.fromkeys(graph.units, 0))(x), model.a(x))
