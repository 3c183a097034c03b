"""Throughput of runs in which two workers compute one model together."""

from __future__ import annotations

from typing import Any

from rainband.bench.baselines.stages import PipeliningOrder, PlainProcessOrder
from rainband.bench.harness.models import Branches, Chain
from rainband.bench.harness.processes import BenchProcess, free_port
from rainband.bench.harness.runs import run_to_measure
from rainband.model_parallel.graph.split_loss import cut_task, measure_samples
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.profile import Profile
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes.zygote import Zygote
from rainband.views.training_time import TrainingTime

MODELS = "rainband.bench.harness.models:"
BASELINES = "rainband.bench.baselines.stages:"
SAMPLES_PER_S = 2500  # roughly, to choose the length of a run


def plain_process(zygote: Zygote, task: Chain, batch_size: int, seconds: float) -> float:
    """Return the samples per second of one plain PyTorch process."""
    order = PlainProcessOrder(name_of(task), seconds, batch_size)
    return float(BenchProcess(zygote, f"{BASELINES}plain_main", order, "plain").result()[0])


def torch_pipelining(zygote: Zygote, schedule: str, microbatches: int, seconds: float) -> float:
    """Return the samples per second of torch.distributed.pipelining over gloo, with the same two stages."""
    port = free_port()
    orders = [PipeliningOrder(rank, port, schedule, microbatches, seconds) for rank in range(2)]
    ranks = [BenchProcess(zygote, f"{BASELINES}pipelining_main", order, f"rank {order.rank}") for order in orders]
    return min(float(rank.result()[0]) for rank in ranks)


def two_stage_placement(task: Chain) -> Placement:
    """Place half of a chain's layers, or one of two branches, on each of two machines."""
    cut, _, _ = cut_task(task, task.model(), task.data(), 2)
    if isinstance(task, Branches):
        right = {unit for unit in cut.units if unit.startswith("right")}
        parts = [unit for unit in cut.units if unit not in right], sorted(right, key=cut.units.index)
    else:
        parts = list(cut.units[: task.layers]), list(cut.units[task.layers :])
    return Placement(
        model=name_of(task),
        kind="partition" if isinstance(task, Branches) else "pipeline",
        partitioner="two_stages",
        num_machines=2,
        stages=tuple(PlacedStage((machine,), tuple(units)) for machine, units in enumerate(parts)),
    )


def profile_of(task: Chain, samples: int) -> Profile:
    """Measure the cost of this number of samples on one core, layer by layer."""
    data = task.data()
    cut, _, _ = cut_task(task, task.model(), data, samples)
    return measure_samples(task, cut, data, samples, name_of(task))


def two_workers(
    task: Chain, stage_plan: StagePlan, seconds: float, strategy: str = "single", batch_size: int | None = None
) -> float:
    """Return the samples per second of two workers with a stage each, without the first step, which warms up."""
    training, first_s, first_samples = TrainingTime(), [], batch_size or task.batch_size

    def view(event: events.AnyEvent) -> None:
        training.absorb(event)
        if isinstance(event, events.FirstStep):
            first_s.append(event.at_s)

    settings: dict[str, Any] = {
        "task": name_of(task),
        "strategy": strategy,
        "strategy_settings": {"lr": 1e-3},
        "num_workers": 2,
        "num_servers": 0,
        "epochs": max(1, round(seconds * SAMPLES_PER_S / task.samples)),
        "eval_every_s": 0.0,
        "batch_size": batch_size,
        "stage_plan": stage_plan,
    }
    result = run_to_measure(RunConfig(**settings), view)
    assert training.ended_s is not None, "a run that finished has ended its training"
    return (result.samples - first_samples) / (training.ended_s - first_s[0])


def name_of(task: Chain) -> str:
    """Return the name by which a run loads a task."""
    return MODELS + type(task).__name__
