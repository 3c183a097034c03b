"""`rainband train`: train a task with a strategy, and report the result."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.options import GroupedCommand, Json, Verbose, completion, with_run_options
from rainband.cli.report_errors import EXIT_CODES, FAILED, USAGE, give_up, report_errors
from rainband.options import OptionError, RunOptions, on_command_line

if TYPE_CHECKING:
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.processes.launcher import RunResult
    from rainband.views.forecast import RateForecast
    from rainband.views.sinks import Sink

RUNTIMES = {
    "processes": "rainband.runtimes.processes.launcher",
    "ray": "rainband.runtimes.ray.launcher",
    "sim": "rainband.runtimes.simulation.run",
}  # name -> the module whose `run` drives it


def register(app: typer.Typer) -> None:
    app.command("train", cls=GroupedCommand, epilog=EXIT_CODES)(with_run_options(train))


def train(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK", help="Model and data: a built-in task, or module:name.", autocompletion=completion.tasks
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Argument(
            metavar="STRATEGY",
            help="Algorithm: one that rainband explain lists, or module:Class; auto: analyze the task, and choose.",
            show_default="sync",
            autocompletion=completion.strategies,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of the strategy, such as lr=0.05; settings of the task are written task.key=value.",
            autocompletion=completion.settings,
        ),
    ] = None,
    *,
    options: RunOptions,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train TASK with STRATEGY, by default sync: workers share each batch, as one process computes it.

    \b
    rainband train mylab:mine --epochs 3
    rainband train digits downpour n_push=4 --workers 4 --servers 2
    rainband train digits downpour --stages 2 --workers 4
    rainband train digits downpour --runtime ray --address auto
    rainband train --config runs/NAME/config.json
    """
    import msgspec

    from rainband.cli.options.words import configured
    from rainband.runtimes.run_directory import new_directory
    from rainband.views.sinks import chosen_sinks
    from rainband.views.warnings import before_run

    words = [word for word in (task, strategy, *(settings or [])) if word is not None]
    forecast = None
    with report_errors():
        if words[1:2] == ["auto"]:
            words, options, forecast = chosen_words(words, options, partial(typer.echo, err=True))
        config = configured(words, options, partial(typer.echo, err=True))
        sinks = chosen_sinks(options)
        runs = Path(options.get("runs") or "runs")
        for line in before_run(config, runs):
            typer.echo(line, err=True)
        directory = new_directory(runs, config.task, config.strategy)
        if forecast is not None:
            forecast.save(directory)
    config = msgspec.structs.replace(config, directory=str(directory))
    raise typer.Exit(watch(config, [partial(sink, directory) for sink in sinks], as_json, verbose))


def chosen_words(
    words: Sequence[str], options: RunOptions, say: Callable[[str], None]
) -> tuple[list[str], RunOptions, RateForecast]:
    """Replace `auto` by the strategy that an analysis recommends; return its prediction, too."""
    from rainband.analysis.auto import analyze_for, forecast_of, options_for
    from rainband.cli.options.words import TASK, with_compute
    from rainband.plugins import search_current_folder
    from rainband.settings import parse_pairs
    from rainband.tasks.load import load_task

    task, _, *pairs = words
    settings = parse_pairs(pairs)
    for name in settings:
        if not name.startswith((TASK, "compute.")):
            raise ValueError(f"{name}={settings[name]}: auto has no settings; name the strategy to set them.")
    search_current_folder()
    own = {name.removeprefix(TASK): value for name, value in settings.items() if name.startswith(TASK)}
    say(f"analyzing {task} ...")
    made = load_task(task, own)
    analysis = analyze_for(made, task, with_compute(options, settings), Path(options.get("runs") or "runs"), say)
    forecast = forecast_of(analysis)
    for line in forecast.reasons:
        say(f"auto: {line}")
    return [task, *forecast.chosen.split(), *pairs], options_for(forecast.chosen, options), forecast


def watch(config: RunConfig, sinks: Sequence[partial[Sink]], as_json: bool, verbose: bool) -> int:
    """Run it, show its progress and its result; return the exit code."""
    import msgspec

    from rainband.errors import Deadlock
    from rainband.runtimes.run_directory import removed_if_refused
    from rainband.views.event_text import raised_by_rainband
    from rainband.views.live_display import RunWatch
    from rainband.views.summary import summary

    run = importlib.import_module(RUNTIMES[config.runtime]).run
    try:
        out = sys.stderr if as_json else sys.stdout
        with removed_if_refused(Path(config.directory)), RunWatch(out, verbose, sinks) as watch:
            result: RunResult = run(config, watch, capture=True)
    except OptionError as error:  # found by trying, such as a port in use
        give_up(error.written(on_command_line), USAGE)
    except ValueError as error:  # a simulation refuses the model or the data here, where real workers do
        if not raised_by_rainband(f"{type(error).__name__}: {error}", traceback.format_exc()):
            raise
        give_up(str(error), USAGE)
    except Deadlock as deadlock:
        give_up(f"the run cannot go on: {deadlock}", FAILED)
    for line in summary(watch.so_far, Path(config.directory)):
        typer.echo(line, err=as_json)
    if trace_hash := getattr(result, "trace_hash", ""):
        typer.echo(f"  trace      {trace_hash}: the same seed gives the same (rainband replay)", err=as_json)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    return result.exit_code
