"""What `rainband train` says of models that several workers compute together: --stages, --placement and how."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec
import typer

if TYPE_CHECKING:
    from rainband.model_parallel.placement.placement import Placement
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.stage_options import PipelineOptions


def with_stages(config: RunConfig, stages: int | None, plan: Placement | None, flow: PipelineOptions) -> RunConfig:
    """The run, with the plan by which its workers compute one model together."""
    from rainband.plugins import load_strategy
    from rainband.runtimes.stage_options import check_flow, check_plan, check_versions, workers_per_replica

    size = workers_per_replica(plan, stages) or 1
    strategy = load_strategy(config.strategy, config.strategy_settings)
    if size == 1:
        if any(flow) and config.stage_plan is None:
            raise ValueError(
                "--microbatches, --schedule and --stages-per-worker are for a model in several stages: "
                "type --stages 2, too."
            )
        return config
    from rainband.runtimes.stage_plan import make_stage_plan
    from rainband.tasks.load import load_task

    if plan is not None:
        check_plan(strategy, config.strategy, plan)
    check_flow(strategy, config.strategy, flow, size, plan)
    check_versions(strategy, plan.replicas() if plan is not None else [1] * size)
    if config.record:
        raise ValueError("--record is for workers with the whole model: leave it out, or --stages.")

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    typer.echo(f"measuring {config.task} to cut it for {size} workers ...", err=True)
    stage_plan = make_stage_plan(
        load_task(config.task, config.task_settings),
        config.task,
        size,
        plan=plan,
        batch_size=config.batch_size,
        flow=flow,
        seed=config.seed,
        threads=config.threads,
    )
    for line in _stage_lines(stage_plan):
        typer.echo(line, err=True)
    return msgspec.structs.replace(config, stage_plan=stage_plan)


def _stage_lines(stage_plan: StagePlan) -> list[str]:
    lines = []
    for number, stage in enumerate(stage_plan.plan.stages):
        units = ", ".join(stage.units[:6]) + (f" and {len(stage.units) - 6} more" if len(stage.units) > 6 else "")
        where = f" (on {len(stage.machines)} workers in turn)" if len(stage.machines) > 1 else ""
        if stage_plan.stages_per_worker > 1:
            where = f" (on worker {number % len(stage_plan.workers)})"
        lines.append(f"  stage {number}{where}: {units}")
    return lines
