"""`rainband ps`: list the runs that run now on this machine."""

from __future__ import annotations

import shutil
import sys

import typer

from rainband.cli.options import PrintJson, print_lines
from rainband.cli.report_errors import report_errors


def command(as_json: PrintJson = False) -> None:
    """List the runs that run now on this machine, wherever their directories are.

    \b
    rainband ps
    """
    from rainband.runtimes.running.processes import processes_of, running_runs
    from rainband.views.history import read_run
    from rainband.views.running_text import as_record, listed
    from rainband.views.runs_text import to_json

    with report_errors():
        runs = [(run, read_run(run.directory), processes_of(run)) for run in running_runs()]
    if as_json:
        typer.echo(to_json([as_record(*run) for run in runs]))
    elif not runs:
        typer.echo("No run is running on this machine. Past runs: rainband runs")
    else:
        print_lines(listed(runs, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
