"""`rainband top`: show what each process of a run does, live or afterwards."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import PrintJson, Run, RunsDirectory, print_lines
from rainband.cli.report_errors import report_errors


def command(
    run: Run = "last",
    runs: RunsDirectory = Path("runs"),
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between two pictures on a terminal.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
    as_json: PrintJson = False,
) -> None:
    """Show what each process of a run does: which waits for which and why, its share of the work, memory, bytes.

    On a terminal the picture of a running run is drawn again every second, until the run ends or you press Ctrl-C.

    \b
    rainband top last
    rainband top last --once
    """
    from rainband.runtimes.running.processes import NodeProcess, find_running, processes_of, running_runs
    from rainband.views.dashboard.fold import RunFile
    from rainband.views.history import find_run
    from rainband.views.running_text import records, top
    from rainband.views.runs_text import to_json

    with report_errors():
        running = find_running(run, running_runs(), runs)
        file = RunFile(running.directory if running is not None else find_run(runs, run))

    def processes() -> dict[str, NodeProcess]:
        return processes_of(running) if running is not None and not file.is_over else {}

    def picture(height: int = 0) -> list[str]:
        return top(file.read(), file.state, file.directory.name, processes(), height)

    if as_json:
        typer.echo(to_json(records(file.read(), file.state, file.directory.name, processes())))
        return
    if once or not sys.stdout.isatty() or file.is_over:
        print_lines(picture())
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not file.is_over:
                columns, height = shutil.get_terminal_size()
                lines = [line[: columns - 1] for line in picture(height)]
                live.update(Text("\n".join(lines[: height - 1])), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return
    print_lines(picture())
