"""A loss whose model is on several workers gives the numbers of one process, or is refused before anything starts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rainband
from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.model_parallel.execution.worker import WholeModel
from rainband.model_parallel.graph.split_loss import LossCall, check_loss, inputs_of
from rainband.strategies.pipedream import Pipedream
from rainband.strategies.single import Single
from rainband.strategy import Batch
from rainband.tasks.digits import Digits
from rainband.tasks.task import TensorData
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.stage_tasks import Shaped, planned, trained_stages, whole_gradient, worker_of

BATCH = Batch(0, 1, 7)
Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]


def square(values: Tensor) -> Tensor:
    return (values * values).mean()


def noise_in_input_and_target(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    noise = torch.randn_like(batch[0])
    return square(model(batch[0] + noise).sum(1) - noise.sum(1))


def noise_after_the_model(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    answer = model(batch[0])
    return square(answer + torch.randn_like(answer))


def numpy_mask(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    mask = torch.from_numpy(np.random.rand(len(batch[0]), 1)) + random.random()
    return square(model(batch[0] * mask) * mask * np.random.rand() * random.random())


def changes_its_batch(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    batch[0].add_(1)
    return square(model(batch[0]).sum(1) - batch[0].sum(1))


def catches_errors(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    try:
        return square(model(batch[0]))
    except Exception:
        return batch[0].sum()


def by_name(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model.forward(input=batch[0]))


class Augmented(TensorData):
    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        (x,) = super().batch(indices)
        return (x + np.random.rand() + random.random() + torch.rand(()),)


@dataclass(frozen=True)
class Lossy(Shaped):
    """A chain of layers in float64 with a loss of the test's choice."""

    way: Loss = noise_in_input_and_target
    augmented: bool = False

    def data(self) -> TensorData:
        data = super().data()
        return Augmented(*data.tensors) if self.augmented else data

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return self.way(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


EQUAL: list[Loss] = [
    noise_in_input_and_target,
    noise_after_the_model,
    numpy_mask,
    changes_its_batch,
    catches_errors,
    by_name,
]


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("way", EQUAL)
def test_two_stages_have_the_loss_and_gradient_of_one_process(way: Loss, augmented: bool) -> None:
    task = Lossy(way=way, augmented=augmented)
    whole = whole_gradient(task, BATCH)
    network = MemoryNetwork(2)
    workers = [worker_of(task, planned(task, 2), machine, network) for machine in range(2)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    for number, expected in enumerate(whole.tensors):
        assert expected is not None
        (held,) = [g.tensors[number] for g in gradients if g.tensors[number] is not None]
        torch.testing.assert_close(held, expected, rtol=1e-12, atol=1e-14)
    assert [gradient.loss for gradient in gradients] == pytest.approx([whole.loss] * 2, rel=1e-12)


@pytest.mark.parametrize("way", [noise_in_input_and_target, numpy_mask])
def test_a_run_in_two_stages_trains_the_model_of_one_process(way: Loss, tmp_path: Path) -> None:
    """The workers differ in number, so portions do, too; a batch draws the same numbers."""
    task, trained = Lossy(way=way, augmented=True), []
    for stages in (1, 2):
        options: dict[str, Any] = {"stages": 2, "microbatches": 1} if stages == 2 else {}
        result = rainband.fit(task, Single(lr=0.1), stages, runtime="sim", runs=tmp_path, **options)
        trained.append(result.module.state_dict())
    first = task.model().state_dict()
    for name, values in trained[0].items():
        torch.testing.assert_close(trained[1][name], values, rtol=1e-12, atol=1e-14)
        assert not torch.equal(values, first[name])


class Same(Lossy):
    """A model that returns its input: with the same noise in input and target, the loss is 0."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.eye(8) if parameter.dim() == 2 else torch.zeros(8))
        return model


def denoising(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    noise = torch.randn_like(batch[0])
    return square(model(batch[0] + noise) - (batch[0] + noise))


def test_noise_is_the_same_in_input_and_target_without_flushes() -> None:
    task = Same(way=denoising)
    workers = trained_stages(task, planned(task, 2), Pipedream(lr=0.1))
    stats = workers[1].client.stats
    assert (stats.loss_samples, stats.loss_sum) == (12, 0.0)  # the first batch was reported and counted at once


def test_microbatches_have_noise_of_their_own() -> None:
    task = Same(way=denoising)
    plan, network = planned(task, 2, microbatches=2), MemoryNetwork(2)
    workers = [worker_of(task, plan, machine, network) for machine in range(2)]
    assert [g.loss for g in run_together([worker.gradient(BATCH) for worker in workers])] == [0.0, 0.0]


# ---- what is refused ----


def penalty(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    answer: Tensor = model(batch[0])
    return square(answer) + sum(square(parameter) for parameter in model.parameters())


def penalty_before(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    penalty = torch.stack([square(parameter) for _, parameter in model.named_parameters()]).sum()
    return square(model(batch[0])) + penalty


def attribute(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model(batch[0])) * getattr(model, "factor", 1.0)


def layer(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model[0](batch[0]))  # type: ignore[index, operator]


def evaluates(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    model.eval()
    return square(model(batch[0]))


def sets(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    model.temperature = 2.0  # type: ignore[assignment]
    return square(model(batch[0]))


def stateless(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    answer: Tensor = torch.func.functional_call(model, {}, (batch[0],))
    return square(answer)


def never(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return batch[0].sum()


def applied_twice(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model(batch[0]) + model(batch[0]))


def without_gradients(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return square(model(batch[0]))


def in_low_precision(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return square(model(batch[0]))


def derivative(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return square(slope)


GENERATOR = torch.Generator()


def own_generator(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    noise = torch.randn(batch[0].shape, generator=GENERATOR, dtype=batch[0].dtype)
    return square(model(batch[0] + noise).sum(1) - noise.sum(1))


def penalty_or_nothing(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    try:
        penalty = torch.stack([square(parameter) for parameter in model.parameters()]).sum()
    except Exception:
        penalty = torch.zeros(())
    return square(model(batch[0])) + penalty


def penalty_or_nothing_at_all(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    answer: Tensor = model(batch[0])
    try:
        return square(answer) + sum(square(parameter) for parameter in model.parameters())
    except BaseException:
        return square(answer)


def twice_or_once(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    answer: Tensor = model(batch[0])
    try:
        return square(answer + model(batch[0]))
    except Exception:
        return square(answer)


def looks_inside(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model(batch[0])) + sum(square(p) for p in model._parameters.values() if p is not None)


def private_attribute(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(model(batch[0])) * getattr(model, "_factor", 1.0)


STATE, CALLS, SEEN, SUM = {"n": 0}, 0, [0.0], torch.zeros(1)


class Annealing:
    step = 0

    def weight(self) -> float:
        type(self).step += 1
        return min(1.0, self.step / 16)


ANNEALING = Annealing()


def counts_in_a_dict(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    STATE["n"] += 1
    return square(model(batch[0])) * min(1.0, STATE["n"] / 16)


def counts_in_a_global(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    global CALLS
    CALLS += 1
    return square(model(batch[0])) * min(1.0, CALLS / 16)


def counts_in_a_list(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    SEEN.append(float(batch[0].mean()))
    return square(model(batch[0])) * len(SEEN)


def counts_in_a_tensor(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    SUM.data += 1
    return square(model(batch[0])) * SUM.item()


def _count() -> int:
    STATE["n"] += 1
    return STATE["n"]


def counts_in_a_function(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return square(_count() * model(batch[0]))


def counts_in_a_class(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return ANNEALING.weight() * square(model(batch[0]))


def _counting_loss() -> Loss:
    calls = 0

    def counts_in_a_closure(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return square(model(batch[0])) * calls

    return counts_in_a_closure


def counts_on_itself(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    vars(counts_on_itself)["calls"] = vars(counts_on_itself).get("calls", 0) + 1
    return square(model(batch[0])) * vars(counts_on_itself)["calls"]


def counts_in_a_default(model: nn.Module, batch: Sequence[Tensor], calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return square(model(batch[0])) * calls[0]


def draws_a_target_itself(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    target = torch.randn(batch[0].shape, generator=GENERATOR, dtype=batch[0].dtype)
    return square(model(batch[0]).sum(1) - target.sum(1))


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (penalty_or_nothing, r"uses model\.parameters: "),
        (penalty_or_nothing_at_all, r"uses model\.parameters: "),
        (twice_or_once, "calls its model twice"),
        (looks_inside, r"uses model\._parameters: "),
        (private_attribute, r"uses model\._factor: "),
        (counts_in_a_dict, r"sets the global tests.test_split_loss.STATE\['n'\] before it calls the model"),
        (counts_in_a_global, r"sets the global tests.test_split_loss.CALLS before"),
        (counts_in_a_list, r"sets the global tests.test_split_loss.SEEN\[\d+\] before"),
        (counts_in_a_tensor, r"sets the global tests.test_split_loss.SUM \(its values\) before"),
        (counts_in_a_function, r"sets the global tests.test_split_loss.STATE\['n'\] before"),
        (counts_in_a_class, r"sets the global tests.test_split_loss.ANNEALING's class.step before"),
        (_counting_loss(), r"sets the task's 'way''s variable calls before"),
        (counts_on_itself, r"sets the task's 'way'.calls before"),
        (counts_in_a_default, r"sets the task's 'way''s default 0\[0\] before"),
        (draws_a_target_itself, r"sets the global tests.test_split_loss.GENERATOR \(its values\) before"),
        (penalty, r"uses model\.parameters: .* set weight_decay, or compute it in the model's forward"),
        (penalty_before, r"uses model\.named_parameters: "),
        (attribute, r"uses model\.factor: over several machines it may only call its model"),
        (layer, r"uses model\[\.\.\.\]: "),
        (evaluates, r"uses model\.eval: "),
        (sets, r"uses model\.temperature = \.\.\.: "),
        (stateless, r"uses model\."),
        (never, "does not call the model"),
        (applied_twice, "calls its model twice"),
        (without_gradients, "call it outside torch.no_grad"),
        (in_low_precision, "under torch.autocast: enter it in the forward of a submodule"),
        (derivative, "with inputs that require gradients: compute what needs these gradients in the model's forward"),
        (own_generator, "other inputs when it is called again .* not from one of your own"),
    ],
)
def test_a_loss_that_needs_more_than_the_models_answer_is_refused_before_the_start(
    way: Loss, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        rainband.fit(Lossy(way=way), Single(lr=0.1), 2, stages=2, runtime="sim", runs=tmp_path)


class Counting(Shaped):
    """A loss that counts its calls, before it calls the model or after it."""

    def __init__(self, before: bool) -> None:
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "before", before)

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        calls = self.__dict__["calls"] + 1
        if self.__dict__["before"]:
            object.__setattr__(self, "calls", calls)
        answer: Tensor = model(batch[0])
        object.__setattr__(self, "calls", calls)
        return square(answer)


def test_a_loss_that_counts_its_calls_before_the_model_is_refused() -> None:
    task = Counting(before=True)
    with pytest.raises(ValueError, match="sets the task's 'calls' before it calls the model"):
        check_loss(task, task.model(), task.data().batch(range(2)))
    task = Counting(before=False)
    check_loss(task, task.model(), task.data().batch(range(2)))
    assert task.__dict__["calls"] == 1


CACHE: dict[str, Tensor] = {}


def fills_a_cache(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    if "weight" not in CACHE:
        CACHE["weight"] = torch.ones(8).double()
    return square(model(batch[0] * CACHE["weight"]))


def test_a_cache_that_the_first_call_fills_is_allowed() -> None:
    task = Lossy(way=fills_a_cache)
    check_loss(task, task.model(), task.data().batch(range(2)))
    assert CACHE


def catches_even_the_question(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    try:
        return square(model(batch[0]))
    except:  # noqa: E722
        return batch[0].sum()


def test_a_loss_that_catches_everything_still_gives_the_models_inputs() -> None:
    batch = (torch.ones(2, 8).double(),)
    call = LossCall(Lossy(way=catches_even_the_question), batch)
    assert torch.equal(call.args[0], batch[0])
    assert call.loss(torch.full((2, 3), 2.0)).item() == 4.0


class OwnGenerator(TensorData):
    generator = np.random.default_rng(0)

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        return (super().batch(indices)[0] + self.generator.random(),)


def test_data_that_differ_when_they_are_read_again_are_refused(tmp_path: Path) -> None:
    class Drawn(Lossy):
        def data(self) -> TensorData:
            return OwnGenerator(*super().data().tensors)

    with pytest.raises(ValueError, match="the same samples differ when they are read twice .* not from one of its own"):
        rainband.fit(Drawn(), Single(lr=0.1), 2, stages=2, runtime="sim", runs=tmp_path)


def test_the_check_of_a_loss_leaves_no_trace() -> None:
    """BatchNorm's statistics, gradients and random numbers stay as they are."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    check_loss(Lossy(way=numpy_mask), model, (torch.ones(4, 8).double(),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_the_call_of_the_model_is_taken_out_of_a_tasks_loss() -> None:
    task = Digits()
    batch = task.data().batch([0, 1, 2])
    model = task.model()
    args, kwargs = inputs_of(task, batch)
    assert torch.equal(args[0], batch[0]) and kwargs == {}
    assert torch.equal(LossCall(task, batch).loss(model(*args)), task.loss(model, batch))


def test_inputs_that_are_not_finite_are_still_the_same_inputs() -> None:
    """The gradient is then skipped, as in one process."""
    batch = (torch.tensor([[float("nan")] * 8, [float("inf")] * 8]).double(),)
    assert LossCall(Lossy(way=by_name), batch).loss(torch.ones(2, 3)).item() == 1.0


def test_an_evaluation_that_would_see_only_some_parameters_is_refused() -> None:
    task = Shaped("chain")
    model = WholeModel(worker_of(task, planned(task, 2), 0, MemoryNetwork(2)), lambda coroutine: None)
    assert next(model.parameters()).device == torch.device("cpu")
    with pytest.raises(ValueError, match="evaluate uses parameters of its model, .* from the saved model.safetensors"):
        list(model.parameters())
    with pytest.raises(ValueError, match="evaluate uses a state_dict of its model"):
        model.state_dict()
