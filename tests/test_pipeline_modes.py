"""A model that tracing has frozen in its mode for training is still evaluated as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.model_parallel.execution.in_process import MemoryNetwork, Partitioned, run_together
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.graph.eval_graph import cut_for_evaluation, evaluating, placed_alike
from rainband.model_parallel.graph.fragments import by_stage
from rainband.strategy import Batch
from rainband.tasks.task import TensorData
from tests.pipeline_models import one_thread as one_thread
from tests.stage_tasks import Shaped, planned, worker_of


class Functional(nn.Module):
    """torch.fx freezes what `self.training` was."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.a(x).tanh(), 0.5, self.training)
        y: Tensor = self.c(functional.dropout(self.b(h).tanh(), 0.5, self.training))
        return y


class Noisy(Functional):
    """In training it has nodes that it does not have in evaluation, and the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        h = h + torch.randn_like(h) if self.training else h.clamp(-0.5, 0.5) * 2
        y: Tensor = self.c(self.b(h).tanh())
        return y if self.training else y.softmax(1)


class OnlyExport(Functional):
    """Control flow on a shape, which only torch.export can follow: dropout and statistics are frozen, too."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4:
            x = self.a(x).tanh()
        y: Tensor = self.c(self.drop(self.norm(self.b(x))))
        return y


class Modules(nn.Module):
    """Submodules follow the mode by themselves: nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.norm, self.c = nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.drop(self.norm(self.a(x).tanh())))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "noisy": Noisy,
    "only_export": OnlyExport,
    "modules": Modules,
}
FROZEN = [name for name in MODELS if name != "modules"]


@dataclass(frozen=True)
class Dropping(Shaped):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.name]().double()

    def data(self) -> TensorData:
        torch.manual_seed(1)
        return TensorData(torch.randn(self.samples, 8, dtype=torch.float64))


def example(samples: int = 4) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(samples, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_only_a_frozen_model_gets_a_graph_for_evaluation(name: str) -> None:
    model = Dropping(name).model()
    training = cut(model, (example(),))
    evaluation = cut_for_evaluation(model, training, (example(),))
    assert (evaluation is not None) == (name in FROZEN)
    assert training.how == ("export" if name == "only_export" else "fx")
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("kind", ["pipeline", "partition"])
@pytest.mark.parametrize("stages", [2, 3])
def test_it_answers_as_the_model_does_wherever_its_units_are(name: str, kind: str, stages: int) -> None:
    model = Dropping(name).model()
    training = cut(model, (example(),))
    evaluation = cut_for_evaluation(model, training, (example(),))
    assert evaluation is not None
    there = {unit: number * stages // len(training.units) for number, unit in enumerate(training.units)}
    placed = placed_alike(evaluation, training, there, kind == "pipeline")
    if kind == "pipeline":
        by_stage(evaluation, placed)  # values go to later stages only
    homes = {id(p): there[unit] for unit in training.units for p in training.parameters_of([unit]).values()}
    for unit in evaluation.units:
        assert {homes[id(p)] for p in evaluation.parameters_of([unit]).values()} <= {placed[unit]}
    with evaluating(model):
        expected = model(example(6))
    with torch.no_grad():
        got = Partitioned(evaluation, placed)(example(6))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_team_is_evaluated_without_dropout_and_leaves_statistics_alone(name: str, stages: int) -> None:
    """After a batch of training, which must have had its dropout."""
    task = Dropping(name)
    network = MemoryNetwork(stages)
    workers = [worker_of(task, planned(task, stages), place, network) for place in range(stages)]
    run_together([worker.gradient(Batch(0, 0, 1)) for worker in workers])
    whole = task.model()
    held = {key: value for worker in workers for key, value in worker.submodel.held().items()}
    assert held.keys() == whole.state_dict().keys()
    assert sum(len(worker.submodel.held()) for worker in workers) == len(held)  # each is saved by one of them
    whole.load_state_dict(held)
    before = {key: value.clone() for key, value in held.items()}

    call: Any = [0, False, [example(6)], {}]
    answer = run_together([worker.answer(call) for worker in workers])[0]
    torch.testing.assert_close(answer, whole.eval()(example(6)), rtol=0, atol=1e-15)
    assert all(torch.equal(before[key], value) for key, value in held.items())
    assert all(module.training for worker in workers for module in worker.module.modules())
    call = [1, True, [example(6)], {}]
    noisy = run_together([worker.answer(call) for worker in workers])[0]
    assert not torch.allclose(noisy, answer)


def test_units_whose_parameters_are_apart_are_refused() -> None:
    class Crossed(nn.Module):
        """In evaluation the first layer's weight is used after the second's."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x)) if self.training else self.a(self.b(x))
            return y

    model = Crossed().double()
    training = cut(model, (example(),))
    evaluation = cut_for_evaluation(model, training, (example(),))
    assert evaluation is not None
    placed = placed_alike(evaluation, training, {"a": 0, "b": 1}, is_pipeline=False)
    assert placed == {"b": 1, "a": 0}
    with pytest.raises(ValueError, match=r"in evaluation the model's unit a .* use fewer stages"):
        placed_alike(evaluation, training, {"a": 0, "b": 1}, is_pipeline=True)
