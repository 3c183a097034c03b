"""Two workers with one torch thread each share every sample: two branches of a model, and layers that are split.

Each is compared with one plain process. The split layers are those of a chain: of two layers in a row, each worker has
half of the columns of the first and half of the rows of the second, so that they exchange values once.
"""

from __future__ import annotations

from statistics import median

from rainband.bench.harness.models import Branches, Chain
from rainband.bench.harness.processes import PRELOAD
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.stage_runs import name_of, plain_process, two_stage_placement, two_workers
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.stage_plan import PipelineOptions, WideStages, make_stage_plan

BRANCHES, SPLIT = "two branches on two workers", "split layers on two workers"
TARGETS = {BRANCHES: 1.7, SPLIT: 1.5}


def run(effort: Effort) -> list[Row]:
    repeats, seconds = (3, 6.0) if effort == "full" else (1, 4.0)
    branches, chain = Branches(), Chain()
    ways = {
        BRANCHES: (branches, StagePlan(plan=two_stage_placement(branches), microbatches=1)),
        SPLIT: (chain, split_plan(chain)),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    zygote = Zygote.start(PRELOAD)
    try:
        for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
            for name, (task, stage_plan) in ways.items():
                one = plain_process(zygote, task, task.batch_size, seconds)
                rates[name].append((one, two_workers(task, stage_plan, seconds)))
    finally:
        zygote.close(1.0)
    return [row for name, (task, _) in ways.items() for row in _rows(name, task, rates[name])]


def _rows(name: str, task: Chain, rates: list[tuple[float, float]]) -> list[Row]:
    plain = f"one plain process, batches of {task.batch_size}"
    return [
        Row(f"{type(task).__name__}: {plain}", median(one for one, _ in rates), "samples/s"),
        Row(name, median(two for _, two in rates), "samples/s"),
        at_least(name, median(two / one for one, two in rates), TARGETS[name], "one plain process"),
    ]


def split_plan(task: Chain) -> StagePlan:
    """Return one stage of two workers, with all layers of a chain split but the last."""
    splits = {f"{first}:{first + 3}": "pair:2" for first in range(0, 2 * task.layers, 4)}  # two layers, one ReLU
    flow = PipelineOptions(microbatches=1, wide=WideStages(1, splits))
    return make_stage_plan(task, name_of(task), 2, flow=flow)
