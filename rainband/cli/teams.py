"""What `rainband train` says of models that several workers compute together: --stages, --plan and how."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

if TYPE_CHECKING:
    from rainband.pipeline.plan import Plan
    from rainband.worlds.config import RunConfig


def read_plan(plan: Path | None, stages: int | None) -> Plan | None:
    """A plan that was made with `rainband plan`; it must have as many stages as are asked for."""
    if plan is None:
        return None
    from rainband.pipeline.plan import load

    read = load(plan)
    if stages is not None and stages != len(read.stages):
        raise ValueError(f"{plan} has {len(read.stages)} stages, not {stages}: leave out --stages.")
    return read


def in_teams(
    config: RunConfig, stages: int | None, plan: Plan | None, micros: int | None, schedule: str | None
) -> RunConfig:
    """The run, with the plan by which its workers compute one model together."""
    from rainband.catalogue import load_strategy

    size = len(plan.stages) if plan is not None else stages or 1
    strategy = load_strategy(config.strategy, config.strategy_settings)
    if size == 1:
        if (micros or schedule) and config.team is None:
            raise ValueError("--microbatches and --schedule are for a model in several stages: type --stages 2, too.")
        return config
    from rainband.tasks.load import load_task
    from rainband.worlds.teaming import check_plan, check_schedule, make_team_plan

    check_schedule(strategy, config.strategy, micros, schedule)
    if plan is not None:
        check_plan(strategy, config.strategy, plan)
    if config.record:
        raise ValueError("--record is for workers with the whole model: leave it out, or --stages.")

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    typer.echo(f"measuring {config.task} to cut it into {size} stages ...", err=True)
    team = make_team_plan(
        load_task(config.task, config.task_settings),
        config.task,
        size,
        plan=plan,
        batch_size=config.batch_size,
        micros=micros,
        schedule=schedule,
        seed=config.seed,
    )
    for number, stage in enumerate(team.plan.stages):
        units = ", ".join(stage.units[:6]) + (f" and {len(stage.units) - 6} more" if len(stage.units) > 6 else "")
        copies = f" (on {len(stage.machines)} workers in turn)" if len(stage.machines) > 1 else ""
        typer.echo(f"  stage {number}{copies}: {units}", err=True)
    return msgspec.structs.replace(config, team=team)
