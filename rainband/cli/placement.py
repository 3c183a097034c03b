"""`rainband placement`: measure a task's model, and say which part of it should run on which machine."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.options import completion
from rainband.cli.report_errors import report_errors

if TYPE_CHECKING:
    from rainband.model_parallel.placement.partitioners import Partitioner
    from rainband.model_parallel.placement.placement import Placement
    from rainband.model_parallel.placement.profile import Profile, Resources
    from rainband.model_parallel.schedules.rates import Played

ALL = "all"  # every schedule


def register(app: typer.Typer) -> None:
    app.command("placement")(command)


def command(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Whose model.", autocompletion=completion.tasks)],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the task: task.key=value.")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, metavar="N", help="How many there are.")] = 2,
    partitioner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Algorithm that assigns model units to machines: balanced, interleaved, one_machine_per_stage, "
            "pipedream, split_layers, or module:function.",
            show_default="as the schedule needs it, else pipedream",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER=HOW", help="A layer in pieces: fc1=2, fc1=rows:2, mlp=pair:2, conv=2x2; repeat it."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Samples of a batch.", show_default="the task's own")
    ] = None,
    memory: Annotated[float, typer.Option(min=0, metavar="MB", help="Of each machine; 0: no limit.")] = 0,
    network: Annotated[
        str, typer.Option(metavar="NAME", help="lan, 1gbit, wan, datacentre, or a file of rainband calibrate.")
    ] = "lan",
    group: Annotated[
        int,
        typer.Option(
            "--machines-per-group", min=0, metavar="N", help="Machines that are near each other; 0: all are, or a rack."
        ),
    ] = 0,
    between: Annotated[
        str | None,
        typer.Option(
            "--inter-group-network", metavar="NAME", help="The network between groups.", show_default="as inside"
        ),
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--placement", metavar="FILE", help="Look at this plan, edited by hand, instead.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan as .json or .toml.")] = None,
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan, as .png, .svg or .pdf.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Play it: gpipe, one_f_one_b, interleaved, pipedream or pipedream_2bw; all: compare them.",
            autocompletion=completion.pipeline_schedules,
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, metavar="N", help="Of a batch, for --schedule.")] = 8,
    stages_per_worker: Annotated[
        int, typer.Option("--stages-per-worker", min=1, metavar="N", help="Stages on each machine, if interleaved.")
    ] = 2,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each unit.")] = 5,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Of torch, while measuring.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")] = False,
) -> None:
    """Plan how to run TASK's model on several machines.

    \b
    rainband placement digits --machines 4 --out plan.json
    rainband placement digits --partitioner balanced --memory 1 --machines 3
    rainband placement digits --machines 3 --schedule all
    rainband placement digits --placement plan.json --schedule one_f_one_b --draw plan.png
    """
    import msgspec

    from rainband.model_parallel.placement.partitioners import make_plan
    from rainband.model_parallel.placement.placement import check_file_name, load, save
    from rainband.model_parallel.schedules.rates import check_schedule, every_schedule, played

    with report_errors():  # what can be wrong is looked at before anything is measured
        _import_from_here()
        edited = load(plan_file) if plan_file else None
        if schedule is not None and schedule != ALL:
            check_schedule(schedule, edited)
        planner = _planner(edited, partitioner, schedule, stages_per_worker)
        if out is not None:
            check_file_name(out)
        if draw is not None:
            _check_picture(draw)
        resources = _resources(edited.num_machines if edited else machines, memory, network, group, between)
        model = _Model(task, settings or [], split or [], batch_size)
        profile = _profile(model, repeats, threads)
        plan = make_plan(planner, profile, resources)
        compared = every_schedule(profile, resources, microbatches, stages_per_worker) if schedule == ALL else None
        one = schedule is not None and schedule != ALL
        play = played(schedule or "", plan, profile, resources, microbatches) if one else None
        if out is not None:
            save(plan, out)
        drawn = _draw(plan, profile, play, draw) if draw is not None else []
    if as_json:
        typer.echo(msgspec.json.encode(plan).decode())
        return
    _print(plan, profile, resources, play, compared)
    for path in [*([out] if out else []), *drawn]:
        typer.echo(f"written to {path}")


def _planner(
    edited: Placement | None, partitioner: str | None, schedule: str | None, stages_per_worker: int
) -> Partitioner:
    from functools import partial

    from rainband.model_parallel.placement.partitioners import find_partitioner
    from rainband.model_parallel.placement.pipedream_planner import interleaved
    from rainband.model_parallel.schedules.rates import partitioner_for

    if edited is not None:
        return lambda profile, resources: edited
    planner = find_partitioner(partitioner) if partitioner else partitioner_for(None if schedule == ALL else schedule)
    return partial(interleaved, stages_per_worker=stages_per_worker) if planner is interleaved else planner


def _import_from_here() -> None:
    """A partitioner of the user's own is found from the folder one is in, as a task is."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def _resources(machines: int, memory_mb: float, network: str, group: int, between: str | None) -> Resources:
    from rainband.model_parallel.placement.profile import LinkSpeed, Resources
    from rainband.runtimes.simulation.models.cluster_model import load_model

    near = load_model(network).network
    if between is not None and not group:
        raise ValueError(
            "--inter-group-network requires groups: say how many machines are in one (--machines-per-group)."
        )
    far = load_model(between).network if between else near
    racks = near.rack_size if not group and machines > near.rack_size > 0 else 0
    kinds = LinkSpeed(
        bytes_per_s=near.bytes_per_s,
        latency_s=near.latency_s,
        machines_per_group=group if group < machines else 0,
        between_bytes_per_s=far.bytes_per_s,
        between_latency_s=far.latency_s,
    )
    if racks:
        kinds = LinkSpeed(
            bytes_per_s=near.bytes_per_s,
            latency_s=near.latency_s,
            machines_per_group=racks,
            between_bytes_per_s=near.uplink_bytes_per_s,
            between_latency_s=near.latency_s + near.uplink_latency_s,
        )
    return Resources(num_machines=machines, memory_bytes=int(memory_mb * 1e6), network=kinds)


@dataclass(frozen=True)
class _Model:
    """Which model, as it was typed."""

    task: str
    settings: Sequence[str]
    splits: Sequence[str]
    batch_size: int | None


def _profile(asked: _Model, repeats: int, threads: int) -> Profile:
    import torch

    from rainband.model_parallel.graph.split import read_split
    from rainband.model_parallel.graph.split import split as split_model
    from rainband.model_parallel.graph.split_loss import build_model, cut_task, inputs_of
    from rainband.model_parallel.placement.measure import measure
    from rainband.settings import parse_pairs
    from rainband.tasks.load import load_task

    pairs = {key.removeprefix("task."): value for key, value in parse_pairs(asked.settings).items()}
    splits = dict(map(read_split, asked.splits))
    task = load_task(asked.task, pairs)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, data = build_model(task), task.data()
    size = asked.batch_size or task.batch_size
    with _quiet():
        if splits:
            split_model(model, splits, *inputs_of(task, data.batch(range(min(2, len(data))))))
        cut, args, kwargs = cut_task(task, model, data, size)
    if any(parameter.is_meta for parameter in model.parameters()):
        typer.echo("the model is built without values: its times are those of its multiplications, at 10 G/s", err=True)
    return measure(cut, args, kwargs, model=asked.task, repeats=repeats)


@contextmanager
def _quiet() -> Iterator[None]:
    """Tracing tools log and print pages when they fail; what matters of it is in the error that follows."""
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _check_picture(path: Path) -> None:
    """A picture that cannot be written should be told before minutes of measuring."""
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
    from rainband.model_parallel.drawing.text import (
        compared_lines,
        plan_lines,
        profile_lines,
        rate_lines,
        schedule_lines,
    )

    typer.echo(f"{profile.model}: {len(profile.units)} units, measured with batches of {profile.batch_size}\n")
    for line in [*profile_lines(profile), "", *plan_lines(plan, profile, resources), ""]:
        typer.echo(line)
    if play is not None:
        for line in [*schedule_lines(play.table, play.facts), *rate_lines(play, profile), ""]:
            typer.echo(line)
    if compared is not None:
        for line in [*compared_lines(compared, profile), ""]:
            typer.echo(line)


def _draw(plan: Placement, profile: Profile, play: Played | None, path: Path) -> list[Path]:
    """The files that were drawn: the plan, and beside it the schedule."""
    from rainband.model_parallel.drawing.picture import draw_plan, draw_schedule

    if not draw_plan(plan, profile, path):
        typer.echo("no picture: matplotlib is not installed (pip install 'rainband[plots]').", err=True)
        return []
    if play is None:
        return [path]
    timeline = path.with_name(f"{path.stem}_schedule{path.suffix}")
    draw_schedule(play.table, play.facts, timeline)
    return [path, timeline]
