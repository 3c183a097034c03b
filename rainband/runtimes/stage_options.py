"""The options of a model over several workers: what they ask for, and whether it fits the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from rainband.errors import did_you_mean
from rainband.model_parallel.placement.placement import PlacedStage, Placement, is_interleaved
from rainband.model_parallel.placement.split_words import most_ways, splits_of
from rainband.model_parallel.placement.stage_plan import Flushing, StagePlan, workers_of
from rainband.options import OptionError, RunOptions, opt
from rainband.stage import StageVersions
from rainband.strategy import Requirements

PIPELINE_OPTIONS = ("microbatches", "schedule", "stages_per_worker")


def _any(options: RunOptions, *names: str) -> bool:
    return any(name in options for name in names)


def replica_size(options: RunOptions, placement: Placement | None, requires: Requirements) -> int:
    """Return the number of workers of one replica of the model.

    A stage has as many as its layers have shards; if there is only one replica, it has all workers.
    """
    if placement is not None:
        return sum(workers_of(placement))
    stages, ways = options.get("stages"), most_ways(typed_splits(options))
    if stages is None and ways == 1:
        return 1
    size = (stages or 1) * ways
    workers = options.get("workers") or 0
    one_replica = requires.max_replicas == 1 and not _interleaves(options)
    return workers if one_replica and workers > size > 1 and workers % size == 0 else size


def typed_splits(options: RunOptions) -> dict[str, str]:
    typed = options.get("split") or []
    try:
        return splits_of(typed)
    except ValueError as error:
        raise OptionError(f"{opt('split')}: {error}") from None


def check_stages(options: RunOptions, name: str, requires: Requirements, placement: Placement | None) -> None:
    """Raise if the model cannot be split, or its batches scheduled, in this way."""
    stages, size = options.get("stages"), replica_size(options, placement, requires)
    if placement is not None and stages is not None and stages != (number := len(workers_of(placement))):
        raise OptionError(
            f"{opt('stages', stages)}: the placement {options.get('placement')} has {number}: omit {opt('stages')}."
        )
    if placement is not None and options.get("split"):
        raise OptionError(f"{opt('placement')} contains the splits of layers: omit {opt('split')}.")
    if size > (stages or 1) and placement is None and _interleaves(options):
        raise OptionError(f"interleaved has one worker for each stage, without shards: omit {opt('split')}.")
    if size == 1:
        if requires.stages is not None and placement is not None:
            raise OptionError(f"{name} is a pipeline of stages, and the placement has one worker: make one for more.")
        if requires.stages is not None:
            raise OptionError(f"{name} is a pipeline of stages: use {opt('stages', 2)}, for example.")
        for given in PIPELINE_OPTIONS:
            if given in options and given != "microbatches":
                raise OptionError(f"{opt(given)} is for a model in several stages: also use {opt('stages', 2)}.")
        if options.get("recompute"):
            raise OptionError(f"{opt('recompute', True)} is for a model in stages: also use {opt('stages', 2)}.")
        if options.get("microbatches") and options.get("time_only"):
            raise OptionError(
                f"{opt('microbatches')}: with {opt('time_only', True)}, no batch is computed, so omit it."
            )
        return
    typed = " and ".join(opt(one) for one in ("stages", "split", "placement") if options.get(one))
    if requires.split_batches:
        raise OptionError(
            f"{name} divides each batch among workers that have the whole model: omit {typed}, or choose sync, "
            "whose workers share each batch within the stages."
        )
    if requires.whole_model:
        raise OptionError(f"{name} requires the whole model on each worker: omit {typed}, or choose downpour.")
    if placement is not None:
        _check_placement(name, requires, placement)
    _check_schedule(options, name, requires)
    if placement is not None:
        _check_schedule_of_placement(options, placement)
    microbatches = options.get("microbatches")
    if microbatches and microbatches % size and (_interleaves(options) or (placement and is_interleaved(placement))):
        raise OptionError(
            f"{opt('microbatches', microbatches)}: with interleaved it must be a multiple of {size}, the number of "
            f"workers of one replica of the model. Use {opt('microbatches', -(-microbatches // size) * size)}."
        )
    if requires.stages is not None and not typed_splits(options):  # with shards it is known when the model is split
        number = stages or 1
        check_versions(requires.stages, placement.replicas() if placement is not None else [size // number] * number)


def check_versions(how: StageVersions, replicas: Sequence[int]) -> None:
    """Raise if the stages of a pipeline that is never flushed cannot keep these versions."""
    from rainband.model_parallel.schedules.version_rule import check_stage_versions

    try:
        check_stage_versions(how, replicas)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _interleaves(options: RunOptions) -> bool:
    return options.get("schedule") == "interleaved" or "stages_per_worker" in options


def _check_placement(name: str, requires: Requirements, placement: Placement) -> None:
    if requires.stages is not None:
        if placement.kind != "pipeline":
            raise OptionError(
                f"{name} is a pipeline, and the placement is a partition: "
                "use rainband placement --partitioner pipedream."
            )
        if is_interleaved(placement):
            raise OptionError(
                f"the placement has several stages on a machine, and {name} has one on each: use "
                "rainband placement --partitioner pipedream, or train with sync batch_per_worker=true."
            )


def _check_schedule(options: RunOptions, name: str, requires: Requirements) -> None:
    schedule = options.get("schedule")
    if schedule == "pipedream_2bw":
        raise OptionError(
            f"pipedream_2bw is never flushed: use pipedream pipedream_2bw=yes, and omit {opt('schedule')}."
        )
    if requires.stages is not None and options.get("recompute"):
        raise OptionError(f"{name} has a setting for it: use recompute=yes, and omit {opt('recompute', True)}.")
    if requires.stages is not None and _any(options, *PIPELINE_OPTIONS):
        raise OptionError(
            f"{name} has its own schedule: omit {opt('microbatches')}, {opt('schedule')} and "
            f"{opt('stages_per_worker')}."
        )
    if schedule not in (None, *(known := get_args(Flushing))):
        raise OptionError(
            f"no schedule named '{schedule}'{did_you_mean(schedule or '', known)}: choose from {', '.join(known)}."
        )
    if "stages_per_worker" in options and schedule not in (None, "interleaved"):
        raise OptionError(
            f"{opt('stages_per_worker')} requires {opt('schedule', 'interleaved')}, and the schedule is {schedule}: "
            "omit one of them."
        )


def _check_schedule_of_placement(options: RunOptions, placement: Placement) -> None:
    schedule, each = options.get("schedule"), options.get("stages_per_worker")
    if placement.kind == "partition" and (schedule or each):
        raise OptionError(f"a schedule is for a pipeline, and the placement is a partition: omit {opt('schedule')}.")
    if not is_interleaved(placement):
        if _interleaves(options):
            raise OptionError(
                f"the placement has one stage on each machine, and interleaved needs several: omit "
                f"{opt('placement')}, or use rainband placement --schedule interleaved."
            )
        return
    if schedule not in (None, "interleaved"):
        raise OptionError(
            f"the placement has several stages on a machine, which only interleaved supports, not {schedule}: omit "
            f"{opt('schedule')}."
        )
    number = len(placement.stages) // len(workers_of(placement))
    if each not in (None, number):
        raise OptionError(
            f"the placement has {number} stages on each machine, not {each}: omit {opt('stages_per_worker')}."
        )


def _shared_by(stage: PlacedStage) -> str:
    """Return what several workers of a stage do, in parentheses."""
    if stage.ways == 1:
        return f" (replicated on {stage.replicas} workers)" if stage.replicas > 1 else ""
    return f" (shards on {stage.ways} workers" + (f", {stage.replicas} times)" if stage.replicas > 1 else ")")


def stage_lines(stage_plan: StagePlan) -> Iterator[str]:
    for number, stage in enumerate(stage_plan.plan.stages):
        units = ", ".join(stage.units[:6]) + (f" and {len(stage.units) - 6} more" if len(stage.units) > 6 else "")
        where = _shared_by(stage)
        if stage_plan.stages_per_worker > 1:
            where = f" (on worker {number % len(stage_plan.workers)})"
        yield f"  stage {number}{where}: {units}"
    if stage_plan.loss_note:
        yield f"  {stage_plan.loss_note}"
