"""`rainband calibrate`: measure this machine, and write the model that simulations use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rainband.cli.options import completion
from rainband.cli.report_errors import report_errors


def command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="Task to measure.", autocompletion=completion.tasks)
    ] = "digits",
    strategy: Annotated[
        str, typer.Argument(metavar="STRATEGY", help="Strategy to measure.", autocompletion=completion.strategies)
    ] = "downpour",
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as for rainband train.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("machine.toml"),
    steps: Annotated[int, typer.Option(min=5, metavar="N", help="Number of gradients to measure.")] = 40,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of workers in the runs to be simulated.")
    ] = 2,
) -> None:
    """Measure this machine for simulated runs.

    \b
    rainband calibrate digits downpour --out machine.toml
    rainband train digits downpour --runtime sim --network machine.toml
    """
    import msgspec

    from rainband.cli.options.words import configured
    from rainband.record.calibrate import calibrate, describe
    from rainband.runtimes.simulation.models.cluster_model import to_toml

    with report_errors():
        config = configured([task, strategy, *(settings or [])], {"workers": workers, "runtime": "sim"})
        if not config.num_servers:
            raise ValueError(
                f"{strategy} has no servers, and messages between workers and servers are measured: choose a strategy "
                "with servers, such as downpour. Simulations of every strategy can use the file."
            )
        config = msgspec.structs.replace(config, num_servers=1)
        typer.echo(f"measuring {steps} gradients of {task}, alone and while others compute ...", err=True)
        model = calibrate(config, steps)
        about = describe(config, model)
        out.write_text(to_toml(model, about), encoding="utf-8")
    typer.echo(about)
    typer.echo(f"written to {out}")
