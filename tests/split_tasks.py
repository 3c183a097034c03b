"""Tasks whose layers are in shards, with whole numbers only, and plans that give each worker one of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rainband.model.layers import LocallyConnected2d
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.split_linear import AsPair, ByColumns, ByRows
from rainband.model_parallel.graph.tiles import Tiled
from rainband.model_parallel.placement.shard_names import tile_of
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.tasks.task import TensorData
from tests.stage_tasks import Shaped, planned


def columns() -> nn.Module:
    return nn.Sequential(ByColumns(nn.Linear(4, 6), 2), nn.ReLU(), nn.Linear(6, 2))


def rows() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), ByRows(nn.Linear(6, 2), 2))


def pair() -> nn.Module:
    return nn.Sequential(AsPair(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), 2), nn.Linear(4, 2))


def convolutions() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2))
    return nn.Sequential(Tiled(layers, (4, 8), 1, 2), nn.Flatten(), nn.Linear(16, 2))


def local() -> nn.Module:
    layers = nn.Sequential(LocallyConnected2d(1, 2, 3, input_size=(4, 8), padding=1), nn.ReLU())
    return nn.Sequential(Tiled(layers, (4, 8), 2, 1), nn.Flatten(), nn.Linear(64, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in (columns, rows, pair, convolutions, local)}
IMAGES = ("convolutions", "local")


@dataclass(frozen=True)
class InPieces(Shaped):
    """Everything is a whole number: sums are exact in any order, so equality can be asked for."""

    name: str = "columns"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[self.name]().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))
        return model

    def data(self) -> TensorData:
        torch.manual_seed(1)
        shape = (1, 4, 8) if self.name in IMAGES else (4,)
        return TensorData(torch.randint(-2, 3, (self.samples, *shape)).double())

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        answer: Tensor = model(*batch)
        return (answer * answer).sum() / (1024 * len(answer))  # batches of four: that is exact, too


def plan_of(name: str) -> StagePlan:
    """The first shard of every layer on one worker, the second on the other; what is whole on the first."""
    task = InPieces(name)

    def piece(unit: str) -> int:
        tile = tile_of(unit)
        return tile if tile is not None else int("layer_shards_1" in unit or unit.endswith("between_1"))

    units = cut(task.model(), task.data().batch(range(2))).units
    return planned(task, {unit: piece(unit) for unit in units}, kind="partition")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def net() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 2))


WHOLE: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "net": net, "dropping": dropping}


@dataclass(frozen=True)
class Unsplit(InPieces):
    """A model that is split by name."""

    name: str = "mlp"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = WHOLE[self.name]().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))
        return model

    def data(self) -> TensorData:
        torch.manual_seed(1)
        shape = (1, 4, 8) if self.name == "net" else (4,)
        return TensorData(torch.randint(-2, 3, (self.samples, *shape)).double())
