"""Layers split by name: the same loss and gradients on several machines, ordinary layers again afterwards, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from rainband.cli.main import build_app
from rainband.model.layers import LocallyConnected2d
from rainband.model_parallel.execution.in_process import Partitioned
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split import Columns, How, LayerPair, Rows, Tiles, joined, read_split, split
from rainband.model_parallel.graph.split_linear import AsPair, ByColumns, ByRows
from rainband.model_parallel.graph.tiles import Tiled
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.partitioners import split_layers
from rainband.model_parallel.placement.placement import load
from rainband.model_parallel.placement.profile import Resources
from rainband.model_parallel.placement.shard_names import shard_of
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)


class Net(nn.Module):
    """A linear layer, a residual pair of them, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x).relu()
        y: Tensor = self.fc2(h + self.mlp(h))
        return y


def local_net() -> nn.Sequential:
    """A locally connected layer between a convolution and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        LocallyConnected2d(2, 3, 3, (8, 8), padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 4),
    )


def whole_numbers(model: nn.Module) -> nn.Module:
    """Parameters from -2 to 2: then sums are exact in any order, and equality can be asked for."""
    torch.manual_seed(0)
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    return model


def inputs(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    shape = (5, 6) if isinstance(model, Net) else (5, 1, 8, 8)
    return torch.randint(-3, 4, shape).double()


def squares(answer: Tensor) -> Tensor:
    return (answer**2).sum()


CASES: dict[str, tuple[type[Net] | object, dict[str, How], int]] = {
    "columns": (Net, {"fc1": Columns(2)}, 2),
    "rows": (Net, {"fc2": Rows(4)}, 4),
    "pair": (Net, {"mlp": LayerPair(3)}, 3),
    "one of the pair": (Net, {"mlp.0": Columns(2), "mlp.2": Rows(2)}, 2),
    "all": (Net, {"fc1": Columns(3), "mlp": LayerPair(3), "fc2": Rows(3)}, 3),
    "tiles": (local_net, {"0:5": Tiles(2, 2)}, 4),
    "tiles and columns": (local_net, {"0:5": Tiles(1, 2), "6": Columns(2)}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_split_model_on_several_machines_has_the_loss_and_gradients_of_the_whole(case: str) -> None:
    make, hows, machines = CASES[case]
    whole, parts = whole_numbers(make()), whole_numbers(make())  # type: ignore[operator]
    x = inputs(whole)
    loss = squares(whole(x))
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in whole.named_parameters()}

    assert split(parts, hows, (x,)) is parts
    in_pieces = [parts.get_submodule(name.partition(":")[0]) for name in hows]
    assert all(isinstance(module, ByColumns | ByRows | AsPair | Tiled) for module in in_pieces)
    graph = cut(parts, (x,))
    plan = split_layers(measure(graph, (x,), repeats=1), Resources(num_machines=machines))
    assert [stage.machines for stage in plan.stages] == [(n,) for n in range(machines)]
    machine = Partitioned(graph, plan.placement())
    assert torch.equal(machine.loss_and_gradients(squares, (x,)), loss.detach())
    with torch.no_grad():
        for p in parts.parameters():
            assert p.grad is not None
            p.copy_(p.grad)  # then the layers made of the pieces are the gradient
    found = dict(joined(parts).named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_no_machine_holds_the_layer_that_was_split(case: str) -> None:
    make, hows, machines = CASES[case]
    model = make()  # type: ignore[operator]
    x = inputs(model).float()
    profile = measure(cut(split(model, hows, (x,)), (x,)), (x,), repeats=1)
    plan = split_layers(profile, Resources(num_machines=machines))
    held = [{shard_of(unit) for unit in stage.units} - {None} for stage in plan.stages]
    assert held == [{n} for n in range(machines)]


@pytest.mark.parametrize("case", CASES)
def test_joined_layers_are_those_that_were_split(case: str) -> None:
    make, hows, _ = CASES[case]
    model = make()  # type: ignore[operator]
    x = inputs(model).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = joined(split(model, hows, (x,))).state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.isfinite(model(x)).all()


def test_names_of_a_sequential_come_back_too() -> None:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 6))
    model.add_module("act", nn.ReLU())
    model.add_module("down", nn.Linear(6, 2))
    model.add_module("end", nn.Linear(2, 2))
    names = list(model.state_dict())
    split(model, {"0:3": LayerPair(2)})
    assert [name for name, _ in model.named_children()] == ["up", "end"]
    assert list(joined(model).state_dict()) == names


def test_what_is_between_a_pair_stays_with_its_piece() -> None:
    """The input goes there, a part of the sum comes back: two values, not four."""
    model = split(nn.Sequential(nn.Tanh(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), {"1:4": LayerPair(2)})
    x = torch.randn(3, 4)
    graph = cut(model, (x,))
    plan = split_layers(measure(graph, (x,), repeats=1), Resources(num_machines=2))
    parts = Partitioned(graph, plan.placement())
    parts(x)
    assert [(m.source, m.destination) for m in parts.messages] == [(0, 1), (1, 0)]


def test_pieces_are_dealt_in_turn_where_machines_are_few() -> None:
    model = split(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), {"0": Columns(4)})
    x = torch.randn(3, 4)
    plan = split_layers(measure(cut(model, (x,)), (x,), repeats=1), Resources(num_machines=2))
    where = plan.placement()
    assert [where[f"_0_layer_shards_{n}"] for n in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("case", CASES)
def test_pieces_made_anew_have_first_values_as_large_as_the_whole_layers(case: str) -> None:
    """nn.Linear and nn.Conv2d draw from -b to b, where b is 1 / sqrt(inputs): so does each of their shards."""
    make, hows, _ = CASES[case]
    model = make()  # type: ignore[operator]
    split(model, hows, (inputs(model).float(),))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(99.0)
    for module in model.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    whole = joined(model)
    for layer in whole.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | LocallyConnected2d):
            number = layer.weight.shape[2] if isinstance(layer, LocallyConnected2d) else layer.weight[0].numel()
            assert all(float(p.detach().abs().max()) <= number**-0.5 for p in layer.parameters())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fc1=2", ("fc1", Columns(2))),
        ("a.b=columns:3", ("a.b", Columns(3))),
        ("fc1=rows:2", ("fc1", Rows(2))),
        ("0:3=pair:4", ("0:3", LayerPair(4))),
        ("conv=2x3", ("conv", Tiles(2, 3))),
        ("conv=tiles:2x3", ("conv", Tiles(2, 3))),
    ],
)
def test_a_split_is_read_as_it_is_typed(words: str, found: tuple[str, How]) -> None:
    assert read_split(words) == found


@pytest.mark.parametrize("words", ["fc1", "fc1=", "=2", "fc1=half", "fc1=diagonal:2"])
def test_what_says_no_split_is_reported(words: str) -> None:
    with pytest.raises(ValueError, match=r"is not a split: type fc1=2 or fc1=columns:2"):
        read_split(words)


@pytest.mark.parametrize(
    ("hows", "message"),
    [
        ({"fc9": Columns(2)}, r"no layer 'fc9' to split: it has fc1 \(Linear\), fc2 \(Linear\), mlp \(Sequential\)"),
        ({"fc1": Columns(9)}, "cannot split 8 outputs 9 ways: choose from 1 to 8"),
        ({"mlp": Rows(2)}, "'mlp' is Linear, ReLU, Linear: only an nn.Linear is split by columns or rows"),
        ({"fc1": LayerPair(2)}, "'fc1' is Linear: a pair is linear, something elementwise, linear"),
        ({"mlp": Tiles(2, 2)}, "tiles of 'mlp' need the size of its images: give input_size, or an example"),
        ({"mlp": Tiles(2, 2, (4, 4))}, r"Linear.* cannot be cut into tiles"),
        ({"mlp.0:9x": Columns(2)}, "A part of an nn.Sequential is named 0:3"),
    ],
)
def test_a_split_that_cannot_be_made_is_reported_and_changes_nothing(hows: dict[str, How], message: str) -> None:
    model = Net()
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        split(model, {"fc2": Rows(2), **hows})
    assert list(model.state_dict()) == names


# ---- the command ----


def rainband_plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["placement", *words, "--repeats", "1"])
    return result.exit_code, result.output


def test_the_command_plans_pieces_on_different_machines(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["digits", "--split", "0:5=2x2", "--split", "6=4", "--machines", "4", "--partitioner", "split_layers"]
    code, text = rainband_plan(*words, "--out", str(file))
    assert code == 0, text
    where = load(file).placement()
    assert (
        [where[f"_0_tile{n}_layer2"] for n in range(4)]
        == [where[f"_6_layer_shards_{n}"] for n in range(4)]
        == [0, 1, 2, 3]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "nothing=2"], "no layer 'nothing' to split: it has 6 (Linear), 8 (Linear)"),
        (["--split", "6"], "'6' is not a split"),
        (["--split", "0:7=2x2"], "Flatten(start_dim=1, end_dim=-1) cannot be cut into tiles"),
        (["--partitioner", "split_layers"], "has no shards to place: split a layer (--split fc1=2)"),
    ],
)
def test_a_mistake_is_reported_with_what_to_type(words: list[str], message: str) -> None:
    code, text = rainband_plan("digits", *words)
    assert code == 2 and message in text and "Traceback" not in text
