"""Before a run whose workers compute one model together: who of them gets what. Made once, and told to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from rainband.stages.plan import Flushing, TeamPlan

if TYPE_CHECKING:
    from rainband.pipeline.plan import Plan
    from rainband.tasks.task import Task
    from rainband.types import Strategy

MICROS_PER_STAGE = 2  # where none are asked for: then a third to a half of the time of the first stages is not idle


def make_team_plan(
    task: Task,
    name: str,
    stages: int,
    *,
    plan: Plan | None = None,
    batch_size: int | None = None,
    micros: int | None = None,
    schedule: str | None = None,
    seed: int = 0,
) -> TeamPlan:
    """Measure the task's model and cut it into stages of about equal time; or check a plan that is given."""
    import torch

    from rainband.pipeline.measure import measure
    from rainband.pipeline.of_task import build_model, cut_task
    from rainband.pipeline.partitioners import make_plan
    from rainband.pipeline.pipedream import in_stages
    from rainband.pipeline.plan import check
    from rainband.pipeline.profile import Resources

    torch.manual_seed(seed)
    size = batch_size or task.batch_size
    model = build_model(task)
    graph, args, kwargs = cut_task(task, model, task.data(), size)
    profile = measure(graph, args, kwargs, model=name, repeats=3)
    if plan is None:
        plan = make_plan(in_stages, profile, Resources(num_machines=stages))
    else:
        check(plan, profile)
    return TeamPlan(
        plan=plan,
        micros=micros or _usual_micros(plan, size),
        schedule=_schedule(plan, schedule),
        example_size=min(size, profile.batch_size),
        seed=seed,
        forward_s={unit.name: unit.forward_s for unit in profile.units},
        backward_s={unit.name: unit.backward_s for unit in profile.units},
    )


def _usual_micros(plan: Plan, batch_size: int) -> int:
    return 1 if plan.kind == "partition" else max(1, min(batch_size, MICROS_PER_STAGE * len(plan.stages)))


def _schedule(plan: Plan, name: str | None) -> Flushing:
    if name is not None and plan.kind == "partition":
        raise ValueError("a schedule is for a pipeline, and the plan is a partition: leave out --schedule.")
    return name or "one_f_one_b"  # type: ignore[return-value]


def check_schedule(strategy: Strategy, name: str, micros: int | None, schedule: str | None) -> None:
    """Can batches be cut and ordered as was typed?"""
    if is_pipeline(strategy) and (micros or schedule):
        raise ValueError(f"{name} has a schedule of its own: leave out --microbatches and --schedule.")
    known = get_args(Flushing)
    if schedule not in (None, *known):
        raise ValueError(f"no schedule named '{schedule}' here: choose from {', '.join(known)}.")


def check_plan(strategy: Strategy, name: str, plan: Plan) -> None:
    """Does the plan fit the strategy?"""
    if is_pipeline(strategy):
        if plan.kind != "pipeline":
            raise ValueError(f"{name} is a pipeline, and the plan is a partition: plan with --partitioner pipedream.")
    elif max(plan.replicas()) > 1:
        raise ValueError(
            f"the plan has stages on several machines {plan.replicas()}, which only pipedream knows: plan with "
            "--partitioner straight, and type --workers for more copies of the whole model."
        )


def is_pipeline(strategy: Strategy) -> bool:
    """Is it made of stages that are never flushed?"""
    return bool(getattr(strategy, "stages", False))


def check_team(strategy: Strategy, name: str, workers: int, size: int) -> None:
    """Can this strategy train so many workers in teams of this size?"""
    from rainband.worlds.config import is_one_memory, lead_of

    if size == 1:
        if is_pipeline(strategy):
            raise ValueError(f"{name} is a pipeline of stages: say how many, for example --stages 2.")
        return

    if workers % size:
        right = max(1, workers // size) * size
        raise ValueError(
            f"--workers {workers} are no whole number of models of {size} stages each: type --workers {right} or "
            f"{right + size}."
        )
    if is_one_memory(strategy) or lead_of(strategy) is not None:
        raise ValueError(
            f"{name} needs the whole model in each worker: leave out --stages, or choose downpour or sync."
        )
