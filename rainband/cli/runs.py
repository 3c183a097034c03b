"""`rainband runs`: list runs, show one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import CommandGroup, ExampleCommand, PrintJson, Run, RunsDirectory, print_lines
from rainband.cli.report_errors import report_errors


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        cls=CommandGroup,
        help="List runs, show one.",
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    group.callback(invoke_without_command=True)(list_them)
    group.command("show", cls=ExampleCommand)(show)
    app.add_typer(group, name="runs")


def list_them(
    ctx: typer.Context,
    runs: RunsDirectory = Path("runs"),
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Number of runs.")] = 20,
    as_json: PrintJson = False,
) -> None:
    """List the runs, newest first."""
    if ctx.invoked_subcommand:
        return
    from rainband.views.history import list_runs, read_run
    from rainband.views.runs_text import as_record, listed, to_json

    directories = list_runs(runs)
    found = [read_run(directory) for directory in directories[:limit]]
    if as_json:
        typer.echo(to_json([as_record(run) for run in found]))
        return
    if not found:
        typer.echo(f"There are no runs in {runs}. Train something: rainband train digits downpour")
        return
    print_lines(listed(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
    if len(directories) > limit:
        typer.echo(f"... and {len(directories) - limit} older: rainband runs -n {len(directories)}")


def show(
    run: Run,
    runs: RunsDirectory = Path("runs"),
    as_json: PrintJson = False,
) -> None:
    """Show a run: its batches, its staleness, its loss curve.

    \b
    rainband runs show last
    """
    from rainband.views.history import find_run, read_run
    from rainband.views.runs_text import as_record, shown, to_json

    with report_errors():
        found = read_run(find_run(runs, run))
    if as_json:
        typer.echo(to_json({**as_record(found), "progress": found.so_far.progress}))
        return
    print_lines(shown(found))
