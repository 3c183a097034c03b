"""`rainband placement`: measure a task's model, and assign its parts to machines."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rainband.cli.options import GroupedCommand, completion, print_lines, with_options
from rainband.cli.report_errors import report_errors
from rainband.options import PLACEMENT_HINT, Option, OptionError, declared, opt, reading

if TYPE_CHECKING:
    from rainband.model_parallel.placement.hybrid import LayerChoice
    from rainband.model_parallel.placement.partitioners import Partitioner
    from rainband.model_parallel.placement.placement import Placement
    from rainband.model_parallel.placement.profile import Profile, Resources
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.model_parallel.schedules.forecast import Played
    from rainband.runtimes.stage_memory import MemoryNeeds
    from rainband.tasks.task import Task

ALL = "all"  # every schedule


class Tried(NamedTuple):
    """A placement with which a batch was computed."""

    plan: StagePlan
    memory: list[MemoryNeeds]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    batch_size: Annotated[int | None, Option("Samples per batch.", "N", "the task's own", min=2)] = None
    split: Annotated[
        list[str] | None,
        Option("Split a layer into shards: fc1=2, fc1=rows:2, mlp=pair:2 or conv=2x2; may be repeated.", "LAYER=HOW"),
    ] = None
    repeats: Annotated[int, Option("Measurements of each unit.", "N", "5", min=1)] = 5
    threads: Annotated[int, Option("Torch threads while measuring.", "N", "1", min=1)] = 1


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Machines"""

    machines: Annotated[int, Option("Number of machines.", "N", "2", min=1)] = 2
    memory: Annotated[float, Option("Memory of each machine in MB; 0: no limit.", "MB", "0", min=0)] = 0
    network: Annotated[
        str, Option("Network: lan, 1gbit, wan, datacenter, or a file of rainband calibrate.", "NAME", "lan")
    ] = "lan"
    machines_per_group: Annotated[
        int, Option("Machines on one switch; 0: all of them, or those of a rack of the network.", "N", "0", min=0)
    ] = 0
    inter_group_network: Annotated[
        str | None, Option("With --machines-per-group: the network between groups.", "NAME", "the same network")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Placement"""

    partitioner: Annotated[
        str | None,
        Option(
            "Algorithm that assigns model units to machines: balanced, hybrid (data parallel where values are large, "
            "model parallel where weights are), interleaved, one_machine_per_stage, pipedream, split_layers, or "
            "module:function.",
            "NAME",
            "that of the schedule, pipedream, or with --split split_layers",
        ),
    ] = None
    placement: Annotated[Path | None, Option("Evaluate this placement, edited by hand, instead.", "FILE")] = None
    schedule: Annotated[
        str | None,
        Option(
            "Simulate this schedule: gpipe, one_f_one_b, interleaved, pipedream or pipedream_2bw; all: compare them.",
            "NAME",
        ),
    ] = None
    microbatches: Annotated[int, Option("With --schedule: microbatches per batch.", "N", "8", min=1)] = 8
    stages_per_worker: Annotated[int, Option("With --schedule interleaved: stages per machine.", "N", "2", min=1)] = 2
    recompute: Annotated[
        bool, Option("Give the memory of workers that compute activations again before the backward pass.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Output"""

    out: Annotated[Path | None, Option("Save the placement as .json or .toml.", "FILE")] = None
    draw: Annotated[Path | None, Option("Draw the placement, as .png, .svg or .pdf.", "FILE")] = None
    as_json: Annotated[bool, Option("Print the placement as JSON, and nothing else.", flag="--json")] = False


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(ModelOptions, MachineOptions, PlanOptions, FileOptions):
    """All options of `rainband placement`."""


def register(app: typer.Typer) -> None:
    options = declared(ModelOptions, MachineOptions, PlanOptions, FileOptions).values()
    completions = {"schedule": completion.pipeline_schedules}
    app.command("placement", cls=GroupedCommand)(with_options(command, PlacementOptions, options, completions))


def command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="Task whose model is placed.", autocompletion=completion.tasks)
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the task: task.key=value.")
    ] = None,
    *,
    options: PlacementOptions,
) -> None:
    """Measure TASK's model, and assign its parts to machines.

    \b
    rainband placement digits --machines 4 --out plan.json
    rainband placement digits --partitioner balanced --memory 1 --machines 3
    rainband placement digits --machines 3 --schedule all
    rainband placement digits --placement plan.json --schedule one_f_one_b --draw plan.png
    """
    import msgspec

    from rainband.model_parallel.placement.hybrid import explained
    from rainband.model_parallel.placement.partitioners import HYBRID, make_plan
    from rainband.model_parallel.placement.placement import check_file_name, load, save
    from rainband.model_parallel.placement.split_words import splits_of
    from rainband.model_parallel.schedules.forecast import check_schedule, every_schedule, played
    from rainband.plugins import search_current_folder

    out, schedule = options.out, options.schedule
    with report_errors():  # mistakes are reported before anything is measured
        search_current_folder()
        edited = None
        if options.placement is not None:
            with reading("placement", options.placement, PLACEMENT_HINT):
                edited = load(options.placement)
        if schedule is not None and schedule != ALL:
            check_schedule(schedule, edited)
        planner = _planner(edited, options)
        if out is not None:
            check_file_name(out)
        if options.draw is not None:
            _check_picture(options.draw)
        resources = _resources(options, edited.num_machines if edited else options.machines)
        splits = edited.splits if edited is not None else splits_of(options.split or ())
        profile = _profile(task, settings or [], options, splits)
        choices: list[LayerChoice] = []
        if options.partitioner == HYBRID and edited is None:
            choices, profile, plan = _hybrid(task, settings or [], options, profile, resources)
        else:
            plan = msgspec.structs.replace(make_plan(planner, profile, resources), splits=splits)
        play, compared = None, None
        if schedule == ALL:
            compared = every_schedule(profile, resources, options.microbatches, options.stages_per_worker)
        elif schedule is not None:
            play = played(schedule, plan, profile, resources, options.microbatches)
        tried = None
        if out is not None or not options.as_json:
            tried = _tried(task, settings or [], options, plan, profile)
        if out is not None:
            if isinstance(tried, ValueError):
                raise ValueError(f"this placement cannot be trained, so {out} is not written: {tried}")
            save(plan, out)
        drawn = _draw(plan, profile, play, options.draw) if options.draw is not None else []
    if options.as_json:
        typer.echo(msgspec.json.encode(plan).decode())
        return
    _print(plan, profile, resources, play, compared)
    print_lines([*_memory_lines(tried), ""])
    print_lines([*explained(choices), ""] if choices else [])
    for path in [*([out] if out else []), *drawn]:
        typer.echo(f"written to {path}")


def _tried(
    name: str, settings: Sequence[str], options: PlacementOptions, plan: Placement, profile: Profile
) -> Tried | ValueError:
    """Compute a batch with the placement; return its workers' memory, or the reason why it cannot be trained."""
    from rainband.errors import RainbandError
    from rainband.runtimes.stage_plan import PipelineOptions, tried_plan

    task, schedule = _task(name, settings), options.schedule
    flushes = schedule in ("gpipe", "one_f_one_b", "interleaved")
    flow = PipelineOptions(options.microbatches, schedule) if flushes else PipelineOptions()
    size = options.batch_size or task.batch_size
    try:
        with _quiet():
            return Tried(*tried_plan(task, plan, profile, size, flow, options.recompute))
    except (ValueError, RainbandError) as error:
        return ValueError(str(error))
    except Exception as error:  # in the user's model or loss
        return ValueError(f"{type(error).__name__}: {error}")


def _memory_lines(tried: Tried | ValueError | None) -> list[str]:
    from rainband.model_parallel.drawing import text

    if tried is None:
        return []
    if isinstance(tried, ValueError):
        return [f"this placement cannot be trained: {tried}"]
    return text.memory_lines(tried.plan, tried.memory)


def _planner(edited: Placement | None, options: PlacementOptions) -> Partitioner:
    from functools import partial

    from rainband.model_parallel.placement.partitioners import HYBRID, find_partitioner
    from rainband.model_parallel.placement.pipedream_planner import interleaved
    from rainband.model_parallel.placement.split_words import most_ways, splits_of
    from rainband.model_parallel.placement.wide_stages import wide_stages
    from rainband.model_parallel.schedules.forecast import partitioner_for

    if edited is not None:
        return lambda profile, resources: edited
    if options.partitioner == HYBRID:
        return lambda profile, resources: wide_stages(profile, 1, resources.num_machines, {}, resources)
    if options.split and options.partitioner is None and options.schedule is None:
        if options.machines % most_ways(splits := splits_of(options.split)):
            return find_partitioner("split_layers")
        return lambda profile, resources: wide_stages(profile, 1, resources.num_machines, splits, resources)
    if options.partitioner:
        planner = find_partitioner(options.partitioner)
    else:
        planner = partitioner_for(None if options.schedule == ALL else options.schedule)
    return partial(interleaved, stages_per_worker=options.stages_per_worker) if planner is interleaved else planner


def _resources(options: PlacementOptions, machines: int) -> Resources:
    from rainband.model_parallel.placement.profile import LinkSpeed, Resources
    from rainband.runtimes.simulation.models.cluster_model import load_model

    group, between = options.machines_per_group, options.inter_group_network
    near = load_model(options.network).network
    if between is not None and not group:
        raise OptionError(f"{opt('inter_group_network')} requires {opt('machines_per_group')}.")
    far = load_model(between).network if between else near
    racks = near.rack_size if not group and machines > near.rack_size > 0 else 0
    network = LinkSpeed(
        bytes_per_s=near.bytes_per_s,
        latency_s=near.latency_s,
        machines_per_group=racks or (group if group < machines else 0),
        between_bytes_per_s=near.uplink_bytes_per_s if racks else far.bytes_per_s,
        between_latency_s=near.latency_s + near.uplink_latency_s if racks else far.latency_s,
    )
    return Resources(num_machines=machines, memory_bytes=int(options.memory * 1e6), network=network)


def _hybrid(
    name: str, settings: Sequence[str], options: PlacementOptions, profile: Profile, resources: Resources
) -> tuple[list[LayerChoice], Profile, Placement]:
    """Choose data or model parallelism for each layer, and measure the model again with its layers split."""
    from rainband.model_parallel.placement.hybrid import has_data_parallel_stage
    from rainband.model_parallel.placement.placement import check
    from rainband.model_parallel.placement.wide_stages import data_then_model_parallel, wide_stages

    if options.split:
        raise OptionError(f"the partitioner hybrid chooses which layers to split: omit {opt('split')}.")
    machines = resources.num_machines
    choices = _choices(name, settings, profile, max(2, machines // 2))
    two = has_data_parallel_stage(choices)
    if two and (machines < 4 or machines % 2):
        raise OptionError(
            f"{opt('machines', machines)}: {name} makes two stages of two or more machines each: use "
            f"{opt('machines', max(4, machines + 1))}, for example."
        )
    width = machines // 2 if two else machines
    choices = _choices(name, settings, profile, width)
    splits = {choice.unit.layer: str(choice.ways) for choice in choices if choice.ways > 1}
    profile = _profile(name, settings, options, splits)
    if two and splits:
        plan = data_then_model_parallel(profile, width, splits, resources)
    else:
        plan = wide_stages(profile, 1, machines, splits, resources)
    check(plan, profile, resources)
    return choices, profile, plan


def _choices(name: str, settings: Sequence[str], profile: Profile, machines: int) -> list[LayerChoice]:
    """Return the choice for each layer; one that shares a parameter, for example, cannot be split."""
    from rainband.model_parallel.graph.split_loss import build_model, split_layers
    from rainband.model_parallel.placement.hybrid import choose, refused

    task = _task(name, settings)
    data = task.data()
    choices = choose(profile, machines)
    for number, choice in enumerate(choices):
        if choice.ways > 1:
            try:
                split_layers(task, build_model(task), data, {choice.unit.layer: str(choice.ways)})
            except ValueError as error:
                choices[number] = refused(choice, str(error))
    return choices


def _task(name: str, settings: Sequence[str]) -> Task:
    from rainband.settings import parse_pairs
    from rainband.tasks.load import load_task

    pairs = {key.removeprefix("task."): value for key, value in parse_pairs(settings).items()}
    return load_task(name, pairs)


def _profile(name: str, settings: Sequence[str], options: PlacementOptions, splits: dict[str, str]) -> Profile:
    import torch

    from rainband.model_parallel.graph.split_loss import build_model, cut_task, split_layers
    from rainband.model_parallel.placement.measure import measure

    task = _task(name, settings)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, data = build_model(task), task.data()
    size = options.batch_size or task.batch_size
    with _quiet():
        split_layers(task, model, data, splits)
        cut, args, kwargs = cut_task(task, model, data, size)
    if any(parameter.is_meta for parameter in model.parameters()):
        typer.echo("the model is built without values: its times are those of its multiplications, at 10 G/s", err=True)
    return measure(cut, args, kwargs, model=name, repeats=options.repeats)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the output of tracing tools, which print pages when they fail; the error that follows has the reason."""
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_picture(path: Path) -> None:
    """Raise if the picture cannot be written, before minutes of measuring."""
    kinds = (".png", ".svg", ".pdf")
    if path.suffix not in kinds:
        raise ValueError(f"a picture is a file that ends in {', '.join(kinds)}, not {path.name}.")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the picture: make it first (mkdir -p {path.parent}).")


def _print(
    plan: Placement,
    profile: Profile,
    resources: Resources,
    play: Played | None,
    compared: Mapping[str, Played | ValueError] | None,
) -> None:
    from rainband.model_parallel.drawing import text

    typer.echo(f"{profile.model}: {len(profile.units)} units, measured with batches of {profile.batch_size}\n")
    planned = text.plan_lines(plan, profile, resources, played=play is not None)
    print_lines([*text.profile_lines(profile), "", *planned, ""])
    if play is not None:
        print_lines([*text.schedule_lines(play.table, play.facts), *text.rate_lines(play, profile), ""])
    if compared is not None:
        print_lines([*text.compared_lines(compared, profile), ""])


def _draw(plan: Placement, profile: Profile, play: Played | None, path: Path) -> list[Path]:
    """Draw the placement and, in a second file, the schedule; return the files."""
    from rainband.model_parallel.drawing.picture import draw_plan, draw_schedule

    if not draw_plan(plan, profile, path):
        typer.echo("no picture: matplotlib is not installed (pip install 'rainband[plots]').", err=True)
        return []
    if play is None:
        return [path]
    timeline = path.with_name(f"{path.stem}_schedule{path.suffix}")
    draw_schedule(play.table, play.facts, timeline)
    return [path, timeline]
