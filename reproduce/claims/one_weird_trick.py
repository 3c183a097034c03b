"""Data parallelism for convolutions, and model parallelism for the large layer, against either for all layers.

Four machines compute one model, the digits' convolutional one, and make the updates of one process. *Data*: each
computes a quarter of a batch. *Model*: each has a tile of the images, and a quarter of the outputs of the large linear
layer. *Hybrid* is what `rainband placement --partitioner hybrid` chooses: two machines share the batches of the
convolutions, the other two the outputs of the linear layer. (In the paper, the same machines do both.) Bytes are those
of all messages, and seconds those of a network of 1 Gbit/s, where operations take the time that their number gives.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

from rainband.model_parallel.graph.split_loss import build_model, cut_task, measure_samples, split_layers
from rainband.model_parallel.placement.hybrid import choose
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.profile import Profile, Resources
from rainband.model_parallel.placement.wide_stages import data_then_model_parallel, wide_stages
from rainband.protocol import events
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.runtimes.stage_plan import PipelineOptions, make_stage_plan
from rainband.tasks.load import load_task
from rainband.tasks.task import Task
from rainband.views.training_time import TrainingTime
from reproduce.claim import Check, Claim, Method, Values

MACHINES, STEP_S = 4, 0.02  # seconds of a batch of 32 samples on one machine
MODEL_PARALLEL = {"0:5": "2x2", "6": str(MACHINES)}
DATA, MODEL, HYBRID = "data", "model", "hybrid"
BATCH_SIZES = (16, 32, 64, 128)


def placement_of(way: str, task: Task, batch_size: int) -> Placement:
    resources = Resources(num_machines=MACHINES)
    whole = _profile(task, batch_size, {})
    if way == MODEL:
        return wide_stages(_profile(task, batch_size, MODEL_PARALLEL), 1, MACHINES, MODEL_PARALLEL, resources)
    splits = {choice.unit.layer: str(choice.ways) for choice in choose(whole, MACHINES // 2) if choice.ways > 1}
    if way == DATA or not splits:  # with large batches, the planner splits no layer
        everything = PlacedStage(tuple(range(MACHINES)), whole.names)
        return Placement(
            model=whole.model, kind="pipeline", partitioner="none", num_machines=MACHINES, stages=(everything,)
        )
    return data_then_model_parallel(_profile(task, batch_size, splits), MACHINES // 2, splits, resources)


def _profile(task: Task, batch_size: int, splits: dict[str, str]) -> Profile:
    """Count the operations of each unit: the same in every run."""
    model, data = build_model(task), task.data()
    split_layers(task, model, data, splits)
    graph, _, _ = cut_task(task, model, data, batch_size)
    return measure_samples(task, graph, data, batch_size, "digits", None)


def point(seed: int, x: float, task: str, way: str, epochs: int) -> Values:
    """Train in virtual time; return the kilobytes and milliseconds of a batch of `x` samples, and the accuracy."""
    size, loaded, training, progress = int(x), load_task(task, {}), TrainingTime(), list[events.Progress]()
    plan = placement_of(way, loaded, size)
    stage_plan = make_stage_plan(
        loaded, task, MACHINES, plan=plan, batch_size=size, flow=PipelineOptions(), seed=seed, threads=None
    )

    def view(event: events.AnyEvent) -> None:
        training.absorb(event)
        if isinstance(event, events.Progress):
            progress.append(event)

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task=task,
            strategy="single",
            strategy_settings={"lr": 0.05},
            num_workers=MACHINES,
            num_servers=0,
            runtime="sim",
            batch_size=size,
            epochs=epochs,
            seed=seed,
            eval_every_s=0.0,
            directory=folder,
            stage_plan=stage_plan,
            sim=SimSettings(model="1gbit", compute={"step_s": STEP_S * size / 32}),
        )
        result = sim.run(config, view)
    last = progress[-1]
    return {
        "kb": sum(last.sent_bytes.values()) / 1000 / last.batches_done,
        "ms": 1000 * training.seconds / last.batches,
        "accuracy": 100 * result.metrics["accuracy"],
    }


def times(measure: str, than: str, x: float = 32) -> Any:
    return lambda r: r(than, measure, x) / r(HYBRID, measure, x)


CLAIM = Claim(
    paper="Krizhevsky 2014",
    text="data parallelism for convolutions and model parallelism for the large layer send less than either for all",
    part="Model parallelism",
    methods=tuple(Method(way, {"way": way}) for way in (DATA, MODEL, HYBRID)),
    tasks={"digits": {"epochs": 1}},
    point=point,
    x=BATCH_SIZES,
    x_label="samples of a batch",
    log_x=True,
    shown={"kb": "kB sent for a batch", "ms": "virtual ms for a batch"},
    checks=(
        Check("batches of 32: data parallel sends", times("kb", DATA), above=1.0, unit="times the bytes of hybrid"),
        Check("batches of 32: model parallel sends", times("kb", MODEL), above=1.0, unit="times the bytes of hybrid"),
        Check("batches of 32: data parallel takes", times("ms", DATA), above=1.0, unit="times the time of hybrid"),
        Check("batches of 32: model parallel takes", times("ms", MODEL), above=1.0, unit="times the time of hybrid"),
        Check(
            "all three make the same model: largest difference of accuracies",
            lambda r: np.ptp([r(way, "accuracy", 32) for way in (DATA, MODEL, HYBRID)], axis=0),
            below=1.0,
            unit="points",
            control=True,
        ),
    ),
)
