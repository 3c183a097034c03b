"""A model that does not fit into one worker trains when it is split, and the bytes are those that were predicted."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rainband
from rainband.errors import RainbandError
from rainband.model_parallel.graph.split_loss import build_model, cut_task
from rainband.model_parallel.placement.measure import measure
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.runtimes.stage_memory import CountedMemory, memory_of_workers
from rainband.strategies.downpour import Downpour
from rainband.strategies.sandblaster import Sandblaster
from tests.stage_tasks import Shaped, planned

WIDTH, LAYERS = 4096, 8  # a layer has 67 MB
# Bytes of address space beyond those of torch. Without a limit, a worker with the whole model takes 2,700 MB, and one
# with half of it 1,800 MB.
ALLOWED = 2_200_000_000


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@dataclass(frozen=True)
class Limited:
    """Wide layers, in workers whose address space is limited."""

    deferred: bool = False
    batch_size: int = 2
    epochs: int = 1

    def model(self) -> nn.Module:
        if "rainband worker" in Path("/proc/self/cmdline").read_text():
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + ALLOWED, resource.RLIM_INFINITY))
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def data(self) -> Any:
        return rainband.ModuleTask(nn.Identity, TensorDataset(torch.ones(4, WIDTH)), nn.MSELoss()).data()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).square().mean()  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", [Downpour(lr=0.01), Sandblaster(iterations=1, history=1)])
def test_a_model_larger_than_a_workers_memory_trains_in_two_stages(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(RainbandError, match="memory"):
        rainband.fit(Limited(), strategy, workers=1, servers=2, eval_every_s=0, runs=tmp_path)
    result = rainband.fit(
        Limited(deferred=True), strategy, workers=2, servers=2, stages=2, eval_every_s=0, runs=tmp_path
    )
    assert result.accounting.lost == 0 and result.accounting.applied == result.accounting.batches


# ---- bytes ----


def test_tensors_count_until_they_are_freed() -> None:
    counted = CountedMemory(owners=2)
    with counted:
        kept = torch.ones(10)
        counted.owner = 1
        for _ in range(3):
            torch.ones(100)
        kept.view(5, 2)
    assert counted.peaks == [40, 400]
    assert counted.now == [40, 0]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule, kept", [("gpipe", [4, 4]), ("one_f_one_b", [2, 1])])
def test_the_measured_bytes_of_a_worker_are_near_the_predicted_ones(
    schedule: str, kept: list[int], recompute: bool
) -> None:
    """GPipe keeps all microbatches, 1F1B as many as there are stages from here on; recomputing keeps inputs only."""
    task = Shaped("chain", batch_size=64, samples=64)
    plan = planned(task, 2, microbatches=4, schedule=schedule, recompute=recompute)
    graph, args, kwargs = cut_task(task, build_model(task), task.data(), 64)
    profile = measure(graph, args, kwargs, repeats=1)
    workers = memory_of_workers(task, task.data(), plan, profile, 64)
    found = [
        worker.predicted - 2 * profile.parameter_bytes(stage.units)
        for worker, stage in zip(workers, plan.plan.stages, strict=True)
    ]
    activations = [profile.activation_bytes(stage.units) / 4 for stage in plan.plan.stages]
    if not recompute:
        assert found == [int(count * each) for count, each in zip(kept, activations, strict=True)]
    for worker in workers:
        assert worker.parameters < worker.measured
        assert (
            0.5 * worker.predicted < worker.measured < 3 * worker.predicted + 3 * task.samples * 8 * 8
        )  # and its data


def test_more_microbatches_and_recomputing_need_less() -> None:
    task = Shaped("chain", batch_size=64, samples=64)
    graph, args, kwargs = cut_task(task, build_model(task), task.data(), 64)
    profile = measure(graph, args, kwargs, repeats=1)

    def peak(**settings: Any) -> int:
        plan: StagePlan = planned(task, 2, **settings)
        return max(worker.measured for worker in memory_of_workers(task, task.data(), plan, profile, 64))

    assert peak(microbatches=8) < peak(microbatches=1)
    assert peak(microbatches=4, schedule="gpipe", recompute=True) < peak(microbatches=4, schedule="gpipe")
