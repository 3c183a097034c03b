"""`rainband calibrate`: measure this machine, and write the model that virtual time uses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import completion
from rainband.cli.report_errors import report_errors
from rainband.options import RunOptions


def register(app: typer.Typer) -> None:
    app.command("calibrate")(command)


def command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="What is computed.", autocompletion=completion.tasks)
    ] = "digits",
    strategy: Annotated[
        str, typer.Argument(metavar="STRATEGY", help="What servers do with it.", autocompletion=completion.strategies)
    ] = "downpour",
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as of rainband train.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("machine.toml"),
    steps: Annotated[int, typer.Option(min=5, metavar="N", help="Gradients to measure.")] = 40,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Workers of the runs to be simulated.")] = 2,
) -> None:
    """Measure what a run takes on this machine; then  rainband train TASK STRATEGY --runtime sim --network FILE."""
    from rainband.cli.options.words import configured
    from rainband.record.calibrate import calibrate, describe
    from rainband.runtimes.simulation.models.cluster_model import to_toml

    with report_errors():
        options: RunOptions = {"workers": workers, "servers": 1, "runtime": "sim"}
        config = configured([task, strategy, *(settings or [])], options)
        typer.echo(f"measuring {steps} gradients of {task}, alone and beside others ...", err=True)
        model = calibrate(config, steps)
        about = describe(config, model)
        out.write_text(to_toml(model, about), encoding="utf-8")
    typer.echo(about)
    typer.echo(f"written to {out}")
