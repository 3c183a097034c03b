"""Two stages on two cores, against one plain process and against torch.distributed.pipelining over gloo.

Schedules are GPipe, 1F1B and PipeDream, with one torch thread in each process. The model is a chain of equal layers,
split in the middle; the optimizer runs in the stages. PipeDream updates after every microbatch, so its target is
relative to one process that does so, too; the ratio to one process with large batches is another row. Each throughput
is also compared with the prediction from the measured times of single layers. Stages need large matrix products: with
half the batch size, GPipe misses its target.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from rainband.bench.harness.models import Chain
from rainband.bench.harness.processes import PRELOAD
from rainband.bench.harness.rows import Effort, Row, at_least
from rainband.bench.harness.stage_runs import (
    plain_process,
    profile_of,
    torch_pipelining,
    two_stage_placement,
    two_workers,
)
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.model_parallel.schedules.forecast import Forecast, as_batch
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.stage_forecast import ONE_MACHINE

MICROS = 8
TORCH = "torch.distributed.pipelining"
PREDICTION = "the prediction"


class Flushing(NamedTuple):
    """A schedule that flushes the pipeline: its names here and in torch, and its target against one process."""

    name: str
    torch_name: str
    target: float | None


SCHEDULES = (Flushing("gpipe", "ScheduleGPipe", 1.4), Flushing("one_f_one_b", "Schedule1F1B", None))


def run(effort: Effort) -> list[Row]:
    repeats, seconds = (3, 6.0) if effort == "full" else (1, 4.0)
    task = Chain()
    rates: dict[str, list[float]] = {}
    zygote = Zygote.start(PRELOAD)
    try:
        for _ in range(repeats):  # in turns, so that a slow minute of the machine hits all
            for name, rate in _once(zygote, task, seconds).items():
                rates.setdefault(name, []).append(rate)
    finally:
        zygote.close(1.0)
    return _rows(rates, task)


def predicted(task: Chain) -> dict[str, float]:
    """Predict the samples per second of each schedule from the measured times of single layers."""
    plan, small = two_stage_placement(task), task.batch_size // MICROS
    microbatch = profile_of(task, small)
    batch = as_batch(microbatch, task.batch_size)
    forecasts = {name: Forecast(plan, batch, name, MICROS, ONE_MACHINE) for name, _, _ in SCHEDULES}
    forecasts["pipedream"] = Forecast(plan, microbatch, "pipedream", 1, ONE_MACHINE)
    return {f"{name}, predicted": f.profile.batch_size / f.batch_s for name, f in forecasts.items()}


def _once(zygote: Zygote, task: Chain, seconds: float) -> dict[str, float]:
    plan = two_stage_placement(task)
    small = task.batch_size // MICROS
    rates = predicted(task) | {"plain": plain_process(zygote, task, task.batch_size, seconds)}
    rates["plain, small"] = plain_process(zygote, task, small, seconds)
    rates["pipedream"] = two_workers(task, StagePlan(plan=plan), seconds, "pipedream", small)
    for schedule in SCHEDULES:
        stage_plan = StagePlan(plan=plan, microbatches=MICROS, schedule=schedule.name)  # type: ignore[arg-type]
        rates[schedule.name] = two_workers(task, stage_plan, seconds)
        rates[schedule.torch_name] = torch_pipelining(zygote, schedule.torch_name, MICROS, seconds)
    return rates


def _rows(rates: dict[str, list[float]], task: Chain) -> list[Row]:
    def ratio(name: str, against: str) -> float:
        return median([a / b for a, b in zip(rates[name], rates[against], strict=True)])

    small = task.batch_size // MICROS
    rows = [
        Row(f"one plain process, batches of {small}", median(rates["plain, small"]), "samples/s"),
        Row(f"pipedream, 2 stages, batches of {small}", median(rates["pipedream"]), "samples/s"),
        at_least("pipedream, 2 stages", ratio("pipedream", "plain, small"), 1.6, "one plain process"),
        Row(f"one plain process, batches of {task.batch_size}", median(rates["plain"]), "samples/s"),
        Row(
            "pipedream, 2 stages", ratio("pipedream", "plain"), "x", f"one plain process, batches of {task.batch_size}"
        ),
        Row("pipedream, 2 stages", ratio("pipedream", "pipedream, predicted"), "x", PREDICTION),
    ]
    for schedule in SCHEDULES:
        name = f"{schedule.name}, 2 stages, {MICROS} microbatches"
        rows.append(Row(f"{TORCH}, {schedule.torch_name}", median(rates[schedule.torch_name]), "samples/s"))
        rows.append(Row(name, median(rates[schedule.name]), "samples/s"))
        against_one = ratio(schedule.name, "plain")
        if schedule.target is None:
            rows.append(Row(name, against_one, "x", "one plain process"))
        else:
            rows.append(at_least(name, against_one, schedule.target, "one plain process"))
        rows.append(at_least(name, ratio(schedule.name, schedule.torch_name), 1.1, TORCH))
        rows.append(Row(name, ratio(schedule.name, f"{schedule.name}, predicted"), "x", PREDICTION))
    return rows
