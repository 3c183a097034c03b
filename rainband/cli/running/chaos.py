"""`rainband chaos`: kill and pause processes of a run at random, and show that it survives."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import Run, RunsDirectory, print_lines
from rainband.cli.report_errors import FAILED, report_errors

LOOK_EVERY_S = 0.1


def command(
    run: Run,
    runs: RunsDirectory = Path("runs"),
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the faults.")] = 0,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.05, help="Mean time between two faults.")
    ] = 3.0,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of faults.")] = 10,
    fatal: Annotated[
        bool, typer.Option("--fatal", help="Also kill what certainly ends the run, such as a server.")
    ] = False,
) -> None:
    """Kill and pause processes of a running run at random; print what was done, and what happened.

    What certainly ends the run is left alone: servers (they are only paused), and the last worker.

    \b
    rainband chaos last --seed 7
    """
    from random import Random

    from rainband.runtimes.run_directory import read_config
    from rainband.runtimes.running.chaos import ChaosFault, draw, endurance_of, resume, strike
    from rainband.runtimes.running.processes import find_running, processes_of, running_runs
    from rainband.views.dashboard.fold import RunFile
    from rainband.views.history import find_run, read_run
    from rainband.views.summary import summary

    with report_errors():
        found = find_running(run, running_runs(), runs)
        if found is None:
            past = read_run(find_run(runs, run))
            raise ValueError(f"{past.name} does not run on this machine: it is {past.state}. Start a run first.")
        config = read_config(found.directory)
        if config.runtime == "sim":
            raise ValueError("a simulated run has no processes: use --faults, or rainband fuzz.")
    file, random, endurance = RunFile(found.directory), Random(f"chaos {seed}"), endurance_of(config)
    file.read()
    typer.echo(f"faults for {found.directory}, process {found.pid}")
    paused: list[tuple[float, ChaosFault]] = []
    done, shown, started_s = 0, file.folded.num_events, time.monotonic()
    next_s = started_s + random.expovariate(1 / every)
    counts = {"kill": 0, "pause": 0}
    try:
        while not file.is_over and (done < limit or paused):
            now = time.monotonic()
            for until_s, fault in [one for one in paused if one[0] <= now]:
                resume(fault)
                paused.remove((until_s, fault))
                _say(now - started_s, f"continue {fault.node}")
            if done < limit and now >= next_s:
                next_s = now + random.expovariate(1 / every)
                drawn = draw(random, processes_of(found), list(file.folded.so_far.lost), endurance, fatal)
                if isinstance(drawn, str):
                    _say(now - started_s, drawn)
                else:
                    strike(drawn)
                    done, counts[drawn.what] = done + 1, counts[drawn.what] + 1
                    _say(now - started_s, str(drawn))
                    if drawn.for_s:
                        paused.append((now + drawn.for_s, drawn))
            file.read()
            new = min(len(file.folded.log), file.folded.num_events - shown)
            for line in list(file.folded.log)[-new:] if new > 0 else ():
                if line.kind in WORTH_SAYING:
                    _say(now - started_s, f"-> {line.text}")
            shown = file.folded.num_events
            time.sleep(min(LOOK_EVERY_S, max(0.0, next_s - time.monotonic())) or LOOK_EVERY_S / 10)
    except KeyboardInterrupt:
        pass
    finally:
        for _, fault in paused:
            resume(fault)
    typer.echo(f"{counts['kill']} kills and {counts['pause']} pauses; the run is {file.state}")
    if file.is_over:
        print_lines(summary(file.folded.so_far, found.directory))
    if file.state in ("failed", "killed"):
        raise typer.Exit(FAILED)


WORTH_SAYING = ("Lost", "Returned", "ServerReplaced", "Joined", "BatchesReassigned", "Warned", "UserError", "RunEnded")


def _say(at_s: float, text: str) -> None:
    typer.echo(f"{at_s:7.1f} s  {text}")
    sys.stdout.flush()
