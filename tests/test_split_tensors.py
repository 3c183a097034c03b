"""The model that a run with split layers saves: the tensors of the whole model, under their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rainband.model.layers import LocallyConnected2d
from rainband.model.save import join_parts, save_part
from rainband.model.whole_tensors import joined_tensors
from rainband.model_parallel.graph.split import joined, read_split, split
from rainband.model_parallel.graph.split_tensors import whole_tensors


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        LocallyConnected2d(2, 2, 3, input_size=(4, 4)),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
        nn.Linear(4, 3),
    )


CASES = [["0=2x2"], ["1=1x2"], ["3=2"], ["6=rows:2"], ["3:6=pair:3"], ["0=2x1", "3=3", "5=rows:2", "6=3"]]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_shards_that_are_saved_in_parts_are_the_whole_model(words: list[str], tmp_path: Path) -> None:
    whole = network().state_dict()
    model = split(network(), dict(map(read_split, words)), [torch.zeros(2, 1, 8, 8)])
    described = whole_tensors(model)
    tensors = dict(model.named_parameters())
    assert set(tensors) != set(whole)
    names = sorted(tensors)
    parts = [Path(save_part({n: tensors[n].detach() for n in names[k::2]}, str(tmp_path / "m"), k)) for k in range(2)]
    join_parts(parts, str(tmp_path / "m"), described)
    in_memory = joined_tensors({name: p.detach() for name, p in tensors.items()}, described)
    for found in (load_file(tmp_path / "m"), in_memory):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert not list(tmp_path.glob("*.part"))
    network().load_state_dict(load_file(tmp_path / "m"))


def test_a_single_layer_in_tiles_is_joined_under_its_own_name() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    names = list(model.state_dict())
    assert list(joined(split(model, {"0": read_split("0=2x2")[1]}, [torch.zeros(2, 1, 8, 8)])).state_dict()) == names


class Other(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "model, told",
    [
        (tied(), "shares a parameter"),
        (frozen(), "frozen"),
        (hooked(), "hooks"),
        (nn.Sequential(Other(4, 4)), "is a Other"),
    ],
)
def test_a_layer_whose_shards_would_train_differently_is_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split(model, {"0": read_split("0=2")[1]})
