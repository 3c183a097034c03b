"""A model of two branches on two workers with one torch thread each, against one plain process."""

from __future__ import annotations

from statistics import median

from rainband.bench.harness.models import Branches
from rainband.bench.harness.processes import PRELOAD
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.stage_runs import plain_process, two_stage_placement, two_workers
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.runtimes.processes.zygote import Zygote


def run(effort: Effort) -> list[Row]:
    repeats, seconds = (3, 6.0) if effort == "full" else (1, 4.0)
    task = Branches()
    stage_plan = StagePlan(plan=two_stage_placement(task), microbatches=1)
    one, two = [], []
    zygote = Zygote.start(PRELOAD)
    try:
        for _ in range(repeats):  # in turns, so that a slow minute of the machine hits both
            one.append(plain_process(zygote, task, task.batch_size, seconds))
            two.append(two_workers(task, stage_plan, seconds))
    finally:
        zygote.close(1.0)
    name = "two branches on two workers"
    return [
        Row(f"one plain process, batches of {task.batch_size}", median(one), "samples/s"),
        Row(name, median(two), "samples/s"),
        at_least(name, median([a / b for a, b in zip(two, one, strict=True)]), 1.6, "one plain process"),
    ]
