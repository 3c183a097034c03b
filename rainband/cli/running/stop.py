"""`rainband stop`: end a run cleanly from another terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import Run, RunsDirectory, print_lines
from rainband.cli.report_errors import FAILED, give_up, report_errors

LOOK_EVERY_S = 0.1


def command(
    run: Run,
    runs: RunsDirectory = Path("runs"),
    now: Annotated[
        bool, typer.Option("--now", help="As Ctrl-C twice: end at once, and save neither model nor checkpoint.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")] = True,
) -> None:
    """Stop a run of this machine, as Ctrl-C does in its terminal.

    Workers finish their batches, the model is saved, and a checkpoint is written.

    \b
    rainband stop last
    rainband stop last --now
    """
    from rainband.runtimes.running.processes import find_running, interrupt, running_runs
    from rainband.views.history import find_run, is_locked, read_run
    from rainband.views.summary import summary

    with report_errors():
        all_running = running_runs()
        found = find_running(run, all_running, runs)
        if found is None:
            past = read_run(find_run(runs, run))
            where = " on this machine" if past.state == "running" else f": it is {past.state}"
            names = [str(one.directory) for one in all_running]
            raise ValueError(f"{past.name} does not run{where}. Running now: {', '.join(names) or 'none'}.")
        interrupt(found)
        if now:
            time.sleep(LOOK_EVERY_S)  # two signals at once may arrive as one
            if is_locked(found.directory / "events.jsonl"):
                interrupt(found)
    if not wait:
        typer.echo(f"{found.name} is stopping; rainband runs show {found.name} shows how it ended")
        return
    typer.echo(f"stopping {found.name}, process {found.pid} ...", err=True)
    sys.stderr.flush()
    while is_locked(found.directory / "events.jsonl"):
        time.sleep(LOOK_EVERY_S)
    ended = read_run(found.directory)
    if ended.so_far.ended is None:
        give_up(f"{found.name} ended without its last event: it saved nothing more.", FAILED)
    print_lines(summary(ended.so_far, ended.directory))
