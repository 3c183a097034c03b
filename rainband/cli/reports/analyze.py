"""`rainband analyze`: say before a run what a task computes, what an update costs, and which strategy to use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import PrintJson, completion, print_lines
from rainband.cli.report_errors import report_errors


def command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="Task: built in, or module:name.", autocompletion=completion.tasks)
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the task: task.key=value.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, max=512, metavar="N", help="Number of workers.")] = 4,
    servers: Annotated[
        int, typer.Option("--servers", min=1, metavar="N", help="Number of servers, for strategies that have them.")
    ] = 2,
    network: Annotated[
        str,
        typer.Option(
            "--network",
            metavar="NAME",
            help="Network between machines: lan, 1gbit, wan, datacenter, or a file of rainband calibrate; here: all "
            "processes on this machine, which is measured first.",
        ),
    ] = "lan",
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, metavar="N", help="Samples per gradient, instead of the task's."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, metavar="N", help="Torch threads of each worker.")] = 1,
    as_json: PrintJson = False,
) -> None:
    """Analyze TASK before training it: work and depth of its layers, cost of an update, time of a step, what to use.

    Gradients are measured on this machine, and the strategies are simulated on the network. The task is not trained.

    \b
    rainband analyze digits --workers 8 --network 1gbit
    rainband analyze mylab:mine --workers 4 --network here
    """
    from rainband.analysis.analysis import FILE, analyze, cluster
    from rainband.analysis.predict import AnalyzedCluster
    from rainband.analysis.text import lines_of
    from rainband.plugins import search_current_folder
    from rainband.settings import parse_pairs
    from rainband.tasks.load import load_task
    from rainband.views.runs_text import to_json

    with report_errors():
        pairs = parse_pairs(settings or [])
        for name in pairs:
            if not name.startswith("task."):
                raise ValueError(f"{name}={pairs[name]}: settings are those of the task, task.{name}=...")
        own = {name.removeprefix("task."): value for name, value in pairs.items()}
        search_current_folder()
        made = load_task(task, own)
        model = cluster(network, Path("runs") / FILE, partial(typer.echo, err=True))
        setting = AnalyzedCluster(workers, servers, model, batch_size, threads, network)
        found = analyze(made, task, setting)
    if as_json:
        typer.echo(to_json(found.record()))
        return
    print_lines(lines_of(found))
