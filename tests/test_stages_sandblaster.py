"""Full-batch methods on replicas of several stages: the iterates of one process, whatever worker is lost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector

from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.strategies.sandblaster import Sandblaster
from tests.full_batch_runs import objective, plain_lbfgs
from tests.processes import Order, RunLauncher
from tests.stage_tasks import Shaped, planned
from tests.test_stages_sim import Seen, simulated

EXACT = {"gradient_tolerance": 0.0, "loss_tolerance": 0.0, "n_push": 1}


def losses(seen: Seen) -> list[float]:
    return [event.loss for event in seen if isinstance(event, events.IterationDone)]


@pytest.mark.parametrize("name", ["chain", "tied", "branches"])
@pytest.mark.parametrize("stages, replicas", [(2, 1), (2, 2), (3, 2)])
def test_lbfgs_in_stages_has_the_iterates_of_one_process(tmp_path: Path, name: str, stages: int, replicas: int) -> None:
    task = Shaped(name, samples=48)
    strategy = Sandblaster(iterations=6, **EXACT)  # type: ignore[arg-type]
    f, start = objective(task)
    expected = plain_lbfgs(strategy, f, start)
    result, seen = simulated(tmp_path, name, "sandblaster", stages, replicas, iterations=6, **EXACT)
    assert result.outcome == "finished", result.reason
    found = losses(seen)
    assert found == pytest.approx([f(w)[0] for w in expected], rel=1e-8)
    assert all(after < before for before, after in pairwise(found))
    saved, model = load_file(tmp_path / "model.safetensors"), task.model()
    model.load_state_dict(saved, strict=False)
    torch.testing.assert_close(parameters_to_vector(model.parameters()).detach(), expected[-1], rtol=1e-8, atol=1e-8)


def test_conjugate_gradient_in_stages_has_the_iterates_of_whole_models(tmp_path: Path) -> None:
    settings = {"iterations": 6, **EXACT}
    _, whole = simulated(tmp_path / "whole", "chain", "conjugate_gradient", 1, 2, **settings)
    _, parts = simulated(tmp_path / "parts", "chain", "conjugate_gradient", 2, 2, **settings)
    assert len(losses(parts)) == 7
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-8)


@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("fault", ["kill worker {}", "pause worker {} for 30"])
@pytest.mark.parametrize("part", [2, *(pytest.param(part, marks=pytest.mark.slow) for part in (0, 1, 3, 4, 5))])
def test_a_worker_that_is_lost_or_slow_changes_no_iterate(tmp_path: Path, worker: int, fault: str, part: int) -> None:
    """Also one that is lost between the pushes of its replica's workers: then only some blocks have the item."""
    settings = {"iterations": 2, **EXACT}
    calm, seen = simulated(tmp_path / "calm", "chain", "sandblaster", 2, 2, **settings)
    script = f"{calm.seconds * (0.05 + 0.13 * part):.9f} {fault.format(worker)}"
    result, disturbed = simulated(tmp_path / "lost", "chain", "sandblaster", 2, 2, script, **settings)
    assert result.outcome == "finished", result.reason
    assert losses(disturbed) == pytest.approx(losses(seen), rel=1e-9)


@pytest.mark.parametrize("worker", range(2))
@pytest.mark.parametrize("part", [1, *(pytest.param(part, marks=pytest.mark.slow) for part in (0, 2, 3, 4, 5))])
def test_the_only_replica_is_started_again_and_changes_no_iterate(tmp_path: Path, worker: int, part: int) -> None:
    settings = {"iterations": 2, **EXACT}
    calm, seen = simulated(tmp_path / "calm", "chain", "sandblaster", 2, 1, **settings)
    script = f"{calm.seconds * (0.05 + 0.13 * part):.9f} kill worker {worker}"
    result, disturbed = simulated(tmp_path / "lost", "chain", "sandblaster", 2, 1, script, **settings)
    assert result.outcome == "finished", result.reason
    assert losses(disturbed) == pytest.approx(losses(seen), rel=1e-9)


@pytest.mark.processes
def test_sandblaster_in_stages(launcher: RunLauncher, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    config = RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": "chain", "samples": 48},
        strategy="sandblaster",
        num_workers=4,
        num_servers=2,
        transport="shm",
        failure_timeout_s=5.0,
        directory=str(directory),
        stage_plan=planned(Shaped("chain", samples=48), 2),
    )
    with launcher._launched(Order(str(tmp_path / "launcher"), config), directory, None) as run:
        result = run.result()
    assert result.outcome == "finished", result.reason
    assert result.metrics["loss"] == pytest.approx(6.7777e-07, rel=1e-4)
