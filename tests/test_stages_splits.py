"""Shards of layers on workers of their own: the same loss and gradients as in one process, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.run import run as simulate
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.processes import LR, RunLauncher
from tests.split_tasks import MODELS, InPieces, plan_of
from tests.stage_tasks import whole_gradient, worker_of
from tests.test_stages import BATCH


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_in_shards_on_two_workers_has_the_gradient_of_one_process(name: str) -> None:
    task, plan, network = InPieces(name), plan_of(name), MemoryNetwork(2)
    workers = [worker_of(task, plan, place, network) for place in range(2)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    whole = whole_gradient(task, BATCH)
    assert [gradient.loss for gradient in gradients] == [whole.loss, whole.loss]
    for number, expected in enumerate(whole.tensors):
        held = [gradient.tensors[number] for gradient in gradients if gradient.tensors[number] is not None]
        assert expected is not None
        assert len(held) == 1 and torch.equal(held[0], expected)


@pytest.mark.parametrize("name, both", [("columns", 2), ("pair", 2), ("local", 2), ("convolutions", 0)])
def test_each_worker_holds_only_its_own_shards(name: str, both: int) -> None:
    """Columns, pairs and places are divided; a convolution's weights are shared by all tiles, so one holds them."""
    task, plan = InPieces(name), plan_of(name)
    held = [set(worker_of(task, plan, place, MemoryNetwork(2)).submodel.held()) for place in range(2)]
    assert not held[0] & held[1]
    assert sum(bool(names) for names in held) == (2 if both else 1)


def test_of_a_pair_only_its_parts_of_the_sum_cross() -> None:
    """The input is every worker's own, so one value crosses, and its gradient comes back."""
    task, plan, network = InPieces("pair"), plan_of("pair"), MemoryNetwork(2)
    workers = [worker_of(task, plan, place, network) for place in range(2)]
    run_together([worker.gradient(BATCH) for worker in workers])
    crossing = [(source, to, tag[-2]) for source, to, tag in network.sent if tag[-2] in ("value", "gradient")]
    assert crossing == [(1, 0, "value"), (0, 1, "gradient")]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, transport", [("convolutions", "shm"), pytest.param("pair", "tcp", marks=pytest.mark.slow)]
)
def test_layers_in_shards_train_in_processes_as_in_one(
    launcher: RunLauncher, tmp_path: Path, name: str, transport: str
) -> None:
    options = {"task": "tests.split_tasks:InPieces", "name": name, "optimizer": "sgd", "gated": False}
    with launcher.run(
        tmp_path, "single", workers=2, servers=0, transport=transport, stage_plan=plan_of(name), **options
    ) as run:
        result = run.result()
    assert (result.outcome, result.accounting["applied"]) == ("finished", 4), result.reason
    expected = trained_by_one(tmp_path / "one", name)
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def trained_by_one(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """One worker that has the whole model."""
    folder.mkdir()
    config = RunConfig(
        task="tests.split_tasks:InPieces",
        task_settings={"name": name},
        strategy="single",
        strategy_settings={"lr": LR, "optimizer": "sgd"},
        num_workers=1,
        num_servers=0,
        runtime="sim",
        directory=str(folder),
    )
    assert simulate(config, lambda event: None).accounting["applied"] == 4
    return load_file(folder / "model.safetensors")
