"""Split layers inside the stages of a pipeline: the same loss and gradients as in one process, exactly."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rainband.model_parallel.execution.in_process import MemoryNetwork, run_together
from rainband.model_parallel.graph.cut import cut
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.shard_names import shard_of
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.strategies.pipedream import Pipedream
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)
from tests.processes import RunLauncher
from tests.split_tasks import MODELS, InPieces
from tests.stage_tasks import trained_stages, whole_gradient, worker_of
from tests.test_stages import BATCH
from tests.test_stages_splits import trained_by_one


def in_stages(name: str, microbatches: int, schedule: str) -> StagePlan:
    """The last layer is a stage of its own, all before it a stage on two machines that share each microbatch."""
    task = InPieces(name)
    units = list(cut(task.model(), task.data().batch(range(2))).units)
    if name == "rows":  # here the split layer is the last
        at = next(n for n, unit in enumerate(units) if shard_of(unit) is not None) - 1
        stages = (
            PlacedStage((2,), tuple(units[:at])),
            PlacedStage((0, 1), tuple(units[at:]), {u: shard_of(u) or 0 for u in units[at:]}),
        )
    else:
        stages = (
            PlacedStage((0, 1), tuple(units[:-1]), {u: shard_of(u) or 0 for u in units[:-1]}),
            PlacedStage((2,), (units[-1],)),
        )
    plan = Placement(model=name, kind="pipeline", partitioner="hand", num_machines=3, stages=stages)
    return StagePlan(plan=plan, example_size=2, microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_layer_inside_a_stage_has_the_gradient_of_one_process(
    name: str, microbatches: int, schedule: str
) -> None:
    task, plan, network = InPieces(name), in_stages(name, microbatches, schedule), MemoryNetwork(3)
    workers = [worker_of(task, plan, place, network) for place in range(3)]
    gradients = run_together([worker.gradient(BATCH) for worker in workers])
    whole = whole_gradient(task, BATCH)
    assert [gradient.loss for gradient in gradients] == [whole.loss] * 3
    holders = set()
    for number, expected in enumerate(whole.tensors):
        held = [(w, g.tensors[number]) for w, g in enumerate(gradients) if g.tensors[number] is not None]
        assert expected is not None
        ((place, found),) = held
        holders.add(place)
        assert torch.equal(found, expected)
    assert len(holders) == (2 if name == "convolutions" else 3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{}, {"vertical_sync": True}, {"pipedream_2bw": True}, {"recompute": True}])
def test_a_pipeline_that_is_never_flushed_may_have_split_layers(name: str, how: dict[str, bool]) -> None:
    """The same stages without a split: what a stage computes with is one version, however many machines have it."""
    task = InPieces(name, samples=38)
    split = in_stages(name, 1, "one_f_one_b")
    stages = tuple(PlacedStage((n,), stage.units) for n, stage in enumerate(split.plan.stages))
    one_machine_per_stage = msgspec.structs.replace(split.plan, num_machines=2, stages=stages)
    strategy = Pipedream(lr=0.01, **how)
    found, expected = (
        {
            key: value
            for worker in trained_stages(task, StagePlan(plan=plan, example_size=2), strategy)
            for key, value in worker.submodel.held().items()
        }
        for plan in (split.plan, one_machine_per_stage)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("strategy, transport", [("sync", "shm"), ("pipedream", "tcp")])
def test_split_layers_inside_stages_train_in_processes(
    launcher: RunLauncher, tmp_path: Path, strategy: str, transport: str
) -> None:
    options = {"task": "tests.split_tasks:InPieces", "name": "pair", "optimizer": "sgd", "gated": False}
    stage_plan = in_stages("pair", 2 if strategy == "sync" else 1, "one_f_one_b")
    servers = 2 if strategy == "sync" else 0
    with launcher.run(
        tmp_path, strategy, workers=3, servers=servers, transport=transport, stage_plan=stage_plan, **options
    ) as run:
        result = run.result()
    assert (result.outcome, result.accounting["applied"]) == ("finished", 4), result.reason
    if strategy == "sync":
        found, expected = load_file(tmp_path / "run" / "model.safetensors"), trained_by_one(tmp_path / "one", "pair")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
