"""How batches go through the stages of a model, as far as it was asked for; what cannot be is told at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

from rainband.model_parallel.placement.placement import is_interleaved, load
from rainband.model_parallel.placement.stage_plan import Flushing, workers_of
from rainband.model_parallel.schedules.builders import interleaved
from rainband.runtimes.stage_plan import is_pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from rainband.model_parallel.placement.placement import Placement
    from rainband.strategy import Strategy

CHUNKS = 2  # stages of each worker, interleaved


class PipelineOptions(NamedTuple):
    """How batches go through the stages; None: nothing was said."""

    microbatches: int | None = None
    schedule: str | None = None
    stages_per_worker: int | None = None

    @property
    def interleaves(self) -> bool:
        return self.schedule == "interleaved" or bool(self.stages_per_worker)

    @property
    def stages_on_each(self) -> int:
        """Stages of each worker."""
        return (self.stages_per_worker or CHUNKS) if self.interleaves else 1


def read_plan(plan: Path | None, stages: int | None) -> Placement | None:
    """A plan that was made with `rainband placement`; it must have as many stages as are asked for."""
    if plan is None:
        return None
    read = load(plan)
    if stages is not None and stages != (count := len(workers_of(read))):
        raise ValueError(f"{plan} has {count} stages, not {stages}: leave out --stages.")
    return read


def workers_per_replica(plan: Placement | None, stages: int | None) -> int | None:
    """So many workers compute one copy of the model; None: nothing was said."""
    return stages if plan is None else sum(workers_of(plan))


def check_flow(
    strategy: Strategy, name: str, flow: PipelineOptions, workers: int, plan: Placement | None = None
) -> None:
    """Can batches be cut and ordered as was typed? `workers`: of one copy of the model."""
    if flow.schedule == "pipedream_2bw":
        raise ValueError("pipedream_2bw is never flushed: type pipedream pipedream_2bw=yes, and leave out --schedule.")
    if is_pipeline(strategy) and any(flow):
        raise ValueError(
            f"{name} has a schedule of its own: leave out --microbatches, --schedule and --stages-per-worker."
        )
    known = get_args(Flushing)
    if flow.schedule not in (None, *known):
        raise ValueError(f"no schedule named '{flow.schedule}' here: choose from {', '.join(known)}.")
    if flow.stages_per_worker and flow.schedule not in (None, "interleaved"):
        raise ValueError(
            f"--stages-per-worker is for stages that are interleaved, and the schedule is {flow.schedule}: "
            "leave one of them out."
        )
    if flow.stages_per_worker is not None and flow.stages_per_worker < 2:
        raise ValueError(
            f"--stages-per-worker {flow.stages_per_worker}: give each worker two stages or more, or leave it out."
        )
    if plan is not None:
        _check_flow_of_plan(flow, plan)
    if flow.microbatches and (flow.interleaves or (plan is not None and is_interleaved(plan))):
        interleaved(workers, CHUNKS, flow.microbatches)  # says which number could be dealt


def _check_flow_of_plan(flow: PipelineOptions, plan: Placement) -> None:
    if plan.kind == "partition" and (flow.schedule or flow.stages_per_worker):
        raise ValueError("a schedule is for a pipeline, and the plan is a partition: leave out --schedule.")
    if not is_interleaved(plan):
        if flow.interleaves:
            raise ValueError(
                "the plan has one stage on each machine, and interleaved needs several: "
                "leave out --placement, or plan with "
                "--schedule interleaved."
            )
        return
    if flow.schedule not in (None, "interleaved"):
        raise ValueError(
            f"the plan has several stages on a machine, which only interleaved knows, not {flow.schedule}: leave out "
            "--schedule."
        )
    stages_per_worker = len(plan.stages) // len(workers_of(plan))
    if flow.stages_per_worker not in (None, stages_per_worker):
        raise ValueError(
            f"the placement has {stages_per_worker} stages on each machine, not {flow.stages_per_worker}: omit "
            "--stages-per-worker."
        )


def check_plan(strategy: Strategy, name: str, plan: Placement) -> None:
    """Does the plan fit the strategy?"""
    if is_pipeline(strategy):
        if plan.kind != "pipeline":
            raise ValueError(f"{name} is a pipeline, and the plan is a partition: plan with --partitioner pipedream.")
        if is_interleaved(plan):
            raise ValueError(
                f"the plan has several stages on a machine, and {name} has one on each: plan with --partitioner "
                "pipedream, or train with sync."
            )
    elif max(plan.replicas()) > 1:
        raise ValueError(
            f"the plan has stages on several machines {plan.replicas()}, which only pipedream knows: plan with "
            "--partitioner one_machine_per_stage, and type --workers for more copies of the whole model."
        )


def check_versions(strategy: Strategy, replicas: Sequence[int]) -> None:
    """Can a pipeline that is never flushed keep its versions in these stages, each of so many workers?"""
    from rainband.model_parallel.execution.version_counter import check_stashes

    if (stashes := strategy.requires.stages) is not None:
        check_stashes(stashes, replicas)
