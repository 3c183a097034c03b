"""Make the stage plan of a run: the placement of the model, microbatches and schedule, once for all workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from rainband.model_parallel.placement.placement import is_interleaved
from rainband.model_parallel.placement.stage_plan import Flushing, StagePlan, workers_of
from rainband.options import OptionError, opt

if TYPE_CHECKING:
    from torch import nn

    from rainband.model_parallel.graph.graph import Cut
    from rainband.model_parallel.placement.partitioners import Partitioner
    from rainband.model_parallel.placement.placement import Placement
    from rainband.model_parallel.placement.profile import Profile
    from rainband.runtimes.stage_memory import MemoryNeeds
    from rainband.tasks.task import Data, Task

MICROS_PER_STAGE = 2  # default: less than a third of the time is idle
TIED = (
    "a parameter is used in stages {stages}, which update it at different times: put its units into one stage of the "
    "placement, or choose sync batch_per_worker=true, or single."
)
STAGES_PER_WORKER = 2  # default of the schedule interleaved


class WideStages(NamedTuple):
    """Stages of which each has several workers, and the layers that are split among them."""

    stages: int
    splits: dict[str, str]


class PipelineOptions(NamedTuple):
    """The options of batches in stages; None: not given."""

    microbatches: int | None = None
    schedule: str | None = None
    stages_per_worker: int | None = None
    wide: WideStages | None = None  # several workers have each stage
    flushes: bool = True  # False: each stage steps by itself

    @property
    def interleaves(self) -> bool:
        return self.schedule == "interleaved" or bool(self.stages_per_worker)

    @property
    def stages_on_each(self) -> int:
        """Stages of each worker."""
        return (self.stages_per_worker or STAGES_PER_WORKER) if self.interleaves else 1


def make_stage_plan(
    task: Task,
    name: str,
    stages: int,
    *,
    plan: Placement | None = None,
    batch_size: int | None = None,
    flow: PipelineOptions,
    seed: int = 0,
    threads: int | None = 1,
) -> StagePlan:
    """Measure the task's model and cut it into stages of about equal time, or check a given placement.

    `stages`: workers of a replica; interleaved, each has several stages. `threads`: of torch, in each worker; None:
    nothing is measured, so that a seeded simulation splits the model in the same way every time.
    """
    import torch

    from rainband.model.loss_parts import LossParts, try_parts
    from rainband.model_parallel.graph.split_loss import build_model, cut_task, measure_samples, split_layers
    from rainband.model_parallel.placement.partitioners import make_plan
    from rainband.model_parallel.placement.placement import check
    from rainband.model_parallel.placement.profile import Resources
    from rainband.model_parallel.placement.wide_stages import wide_stages

    wide = flow.wide
    torch.manual_seed(seed)
    size = batch_size or task.batch_size
    model = build_model(task)
    data = task.data()
    split_layers(task, model, data, plan.splits if plan is not None else wide.splits if wide is not None else {})
    graph, _, _ = cut_task(task, model, data, size)
    _check_repeatable(task, model, data)
    known = not any(parameter.is_meta for parameter in model.parameters())
    profile = measure_samples(task, graph, data, size, name, threads)
    if plan is None and wide is not None:
        plan = wide_stages(profile, wide.stages, stages // wide.stages, wide.splits)
    elif plan is None:
        plan = make_plan(_planner(profile, stages, flow), profile, Resources(num_machines=stages))
    else:
        check(plan, profile)
    if not flow.flushes:
        check_ties(graph, plan)
    microbatches = flow.microbatches or usual_microbatches(plan, size)
    losses = try_parts(task, model, data, size) if known and microbatches > 1 else LossParts()
    part, cuts = max(2, -(-profile.batch_size // microbatches)), microbatches > 1 and not profile.counted
    return StagePlan(
        plan=plan,
        microbatches=microbatches,
        schedule="interleaved" if is_interleaved(plan) else cast(Flushing, flow.schedule or "one_f_one_b"),
        example_size=min(size, profile.batch_size),
        seed=seed,
        profile=profile,
        microbatch_profile=measure_samples(task, graph, data, part, name, threads) if cuts else None,
        loss_is_sum=losses.is_sum,
        loss_note=losses.message,
    )


def tried_plan(
    task: Task, plan: Placement, profile: Profile, batch_size: int, flow: PipelineOptions, recompute: bool = False
) -> tuple[StagePlan, list[MemoryNeeds]]:
    """Compute a batch with a placement, in this process; raise ValueError with the reason if it cannot be trained.

    Return its stage plan, and the memory of each worker; nothing is computed if the model is built without values.
    """
    import torch

    from rainband.model_parallel.graph.split_loss import build_model
    from rainband.runtimes.stage_memory import memory_of_workers

    torch.manual_seed(0)
    data = task.data()
    _check_repeatable(task, model := build_model(task), data)
    size = min(batch_size, len(data))
    stage_plan = StagePlan(
        plan=plan,
        microbatches=flow.microbatches or usual_microbatches(plan, size),
        schedule="interleaved" if is_interleaved(plan) else cast(Flushing, flow.schedule or "one_f_one_b"),
        example_size=min(size, profile.batch_size),
        recompute=recompute,
    )
    if any(parameter.is_meta for parameter in model.parameters()):
        return stage_plan, []
    return stage_plan, memory_of_workers(task, data, stage_plan, profile, size)


def check_ties(graph: Cut, plan: Placement) -> None:
    """Refuse a parameter that several stages use, which update it at different times."""
    stages: dict[int, set[int]] = {}
    for number, stage in enumerate(plan.stages):
        nodes = [node for unit in stage.units for node in graph.members(unit)]
        for parameter in graph.parameters_of(nodes).values():
            stages.setdefault(id(parameter), set()).add(number)
    if tied := [sorted(users) for users in stages.values() if len(users) > 1]:
        raise ValueError(TIED.format(stages=", ".join(map(str, tied[0]))))


def _check_repeatable(task: Task, model: nn.Module, data: Data) -> None:
    """Refuse a loss and data that would differ between the workers of a replica."""
    from rainband.model_parallel.graph.split_loss import check_calls, check_loss
    from rainband.tasks.task import is_repeatable

    if not is_repeatable(data):
        raise ValueError(
            "the same samples differ when they are read twice with the same random numbers, so the workers of a "
            "replica would train on different ones: draw from torch's, numpy's or Python's global generator in the "
            "dataset, not from one of its own."
        )
    batch = data.batch(range(min(2, len(data))))
    if any(parameter.is_meta for parameter in model.parameters()):
        check_calls(task, batch)
    else:
        check_loss(task, model, batch)


def _planner(profile: Profile, workers: int, flow: PipelineOptions) -> Partitioner:
    from rainband.model_parallel.placement import pipedream_planner as pipedream

    if not flow.interleaves:
        return pipedream.in_stages
    stages_per_worker = flow.stages_on_each
    if len(profile.units) < workers * stages_per_worker:
        raise OptionError(
            f"{profile.model or 'the model'} has {pipedream.num_units(profile)}, and {stages_per_worker} stages on "
            f"each of {workers} workers are {workers * stages_per_worker}: use fewer {opt('stages')} or "
            f"{opt('stages_per_worker')}, or split its modules into smaller ones."
        )
    return partial(pipedream.interleaved, stages_per_worker=stages_per_worker)


def usual_microbatches(plan: Placement, batch_size: int) -> int:
    if plan.kind == "partition":
        return 1
    if is_interleaved(plan):  # dealt in rounds of one per worker
        workers = len(workers_of(plan))
        return max(1, min(batch_size, MICROS_PER_STAGE * workers) // workers) * workers
    stages, replicas = len(plan.stages), max(plan.replicas())
    return max(1, min(batch_size, replicas * (MICROS_PER_STAGE * stages if stages > 1 else 1)))
