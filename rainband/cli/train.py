"""`rainband train`: train a task with a strategy, and say what came of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli import complete
from rainband.cli.report_errors import EXIT_CODES, FAILED, give_up, mistakes_told

if TYPE_CHECKING:
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.processes.launcher import RunResult
    from rainband.views.sinks import Sink

RUNTIMES = {
    "processes": "rainband.runtimes.processes.launcher",
    "sim": "rainband.runtimes.simulation.run",
}  # name -> the module whose `run` drives it


def register(app: typer.Typer) -> None:
    app.command("train", epilog=EXIT_CODES)(train)


def train(
    task: Annotated[
        str | None,
        typer.Argument(metavar="TASK", help="What: a built-in task, or module:name.", autocompletion=complete.tasks),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Argument(
            metavar="STRATEGY",
            help="How: see rainband explain; or module:Class.",
            autocompletion=complete.strategies,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the strategy, such as lr=0.05; those of the task are written task.key=value.",
            autocompletion=complete.settings,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many compute.", show_default="4; 1 without servers"),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="How many share the parameters.", show_default="2, if it needs them"),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Cut the model: so many workers compute one copy together.", show_default="1"
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--placement", metavar="FILE", help="Split it as this file of rainband placement says."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With stages: cut each batch.", show_default="2 for each stage"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With stages: one_f_one_b, gpipe or interleaved.", show_default="one_f_one_b"
        ),
    ] = None,
    stages_per_worker: Annotated[
        int | None,
        typer.Option(
            "--stages-per-worker",
            min=2,
            metavar="N",
            help="Interleaved: so many stages on each worker.",
            show_default="2",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Passes over the data.", show_default="the task's own"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples for one gradient.", show_default="the task's own"),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of everything random.", show_default="0")] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="How parameters travel: auto, tcp or shm.", metavar="NAME", show_default="auto"),
    ] = None,
    eval_every: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="One worker measures the task's metric so often (not in virtual time); 0: only at the end.",
            show_default="10",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of torch, in each worker.", show_default="1")
    ] = None,
    failure_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="A worker not heard of for so long is no longer waited for.",
            show_default="5",
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the run's directory is made.")] = Path("runs"),
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Do an earlier run again: its config.json, or its directory."),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Who runs it: local, processes of this machine; sim, virtual time.",
            metavar="NAME",
            show_default="processes",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="With --runtime sim: lan, 1gbit, wan, datacentre, or a file of rainband calibrate.",
            metavar="NAME",
            show_default="lan",
        ),
    ] = None,
    time_only: Annotated[
        bool, typer.Option("--time-only", help="With --runtime sim: no gradients, only messages and clocks: for scale.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --time-only: of each worker.", show_default="as the data has them"),
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --runtime sim: what goes wrong, such as  0.25 kill worker 1."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Note the order of everything, for rainband replay; over TCP.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Note who did what when, for rainband timeline; sim always does.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write progress.csv, too.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write for TensorBoard, too.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End standard output with one JSON object; the rest goes to stderr."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every event and log record.")] = False,
) -> None:
    """Train TASK with STRATEGY.

    \b
    rainband train digits downpour n_push=4 --workers 4 --servers 2
    rainband train mylab:mine sync --epochs 3
    rainband train digits downpour --stages 2 --workers 4
    rainband train --config runs/NAME/config.json
    """
    import msgspec

    from rainband.cli.configure import configured
    from rainband.cli.sim_options import COMPUTE, in_virtual_time, noted
    from rainband.cli.stage_options import with_stages
    from rainband.runtimes.run_directory import new_directory
    from rainband.runtimes.stage_options import PipelineOptions, read_plan, workers_per_replica
    from rainband.views.warnings import before_run

    typed = [word for word in (task, strategy, *(settings or [])) if word is not None]
    words, compute = ([word for word in typed if word.startswith(COMPUTE) is own] for own in (False, True))
    options = {
        "num_workers": workers,
        "num_servers": servers,
        "epochs": epochs,
        "batch_size": batch_size,
        "seed": seed,
        "transport": transport,
        "eval_every_s": eval_every,
        "threads": threads,
        "failure_timeout_s": failure_timeout,
    }
    with mistakes_told():
        if runtime is not None and runtime not in RUNTIMES:
            raise ValueError(f"no world named '{runtime}': choose from {', '.join(RUNTIMES)}.")
        given = {name: value for name, value in options.items() if value is not None}
        cut = read_plan(plan, stages)
        run_config = noted(
            configured(words, config, given, runtime, workers_per_replica(cut, stages)), record, timeline
        )
        run_config = with_stages(run_config, stages, cut, PipelineOptions(microbatches, schedule, stages_per_worker))
        run_config = in_virtual_time(run_config, network, time_only, steps, compute, faults)
        kinds = _sinks(csv, tensorboard)
        for line in before_run(run_config, runs):
            typer.echo(line, err=True)
        directory = new_directory(runs, run_config.task, run_config.strategy)
        run_config = msgspec.structs.replace(run_config, directory=str(directory))
    sinks = [partial(kind, directory) for kind in kinds]
    raise typer.Exit(_watched(RUNTIMES[run_config.runtime], run_config, sinks, as_json, verbose))


def _sinks(csv: bool, tensorboard: bool) -> list[Callable[[Path], Sink]]:
    """Those that were asked for; one whose library is missing is told before a directory is made."""
    sinks: list[Callable[[Path], Sink]] = []
    if csv:
        from rainband.views.sinks.csv import Csv

        sinks.append(Csv)
    if tensorboard:
        from rainband.views.sinks.tensorboard import TensorBoard, check_installed

        check_installed()
        sinks.append(TensorBoard)
    return sinks


def _watched(runtime: str, config: RunConfig, sinks: list[partial[Sink]], as_json: bool, verbose: bool) -> int:
    """Run it, show it, say what came of it; returns the exit code."""
    import msgspec

    from rainband.errors import Deadlock
    from rainband.views.live_display import RunWatch
    from rainband.views.summary import summary

    run = importlib.import_module(runtime).run
    try:
        with RunWatch(sys.stderr if as_json else sys.stdout, verbose, sinks) as watch:
            result: RunResult = run(config, watch, capture=True)
    except Deadlock as deadlock:
        give_up(f"the run cannot go on: {deadlock}", FAILED)
    for line in summary(watch.so_far, Path(config.directory)):
        typer.echo(line, err=as_json)
    if trace_hash := getattr(result, "trace_hash", ""):
        typer.echo(f"  trace      {trace_hash}: the same seed gives the same (rainband replay)", err=as_json)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    return result.exit_code
