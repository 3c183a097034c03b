"""`rainband replay`: repeat a recorded asynchronous run, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rainband.cli import complete
from rainband.cli.mistakes import FAILED, mistakes_told
from rainband.cli.words import count


def register(app: typer.Typer) -> None:
    app.command("replay")(command)


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A directory, a name, the beginning of a name, or last.",
            autocompletion=complete.runs,
        ),
    ] = "last",
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    losses: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the loss of every gradient, as CSV.")
    ] = None,
) -> None:
    """Do a run again, bit for bit: one in virtual time from its seed, a real one if it was started with --record."""
    from rainband.history import find_run
    from rainband.worlds.replay import replay

    noted: list[str] = ["worker,portion,batch,loss"]

    def note(worker: int, portion: int, batch: int, loss: float) -> None:
        noted.append(f"{worker},{portion},{batch},{loss!r}")

    with mistakes_told():
        directory = find_run(runs, run)
        if (directory / "simulation.json").exists():
            raise typer.Exit(_simulate_again(directory))
        result = replay(directory, note if losses is not None else None)
        if losses is not None:
            losses.write_text("\n".join(noted) + "\n", encoding="utf-8")
    typer.echo(f"{directory.name}: {count(result.pushes, 'update')} made again")
    if result.warning:
        typer.echo(f"The bits may differ: {result.warning}.", err=True)
    if result.different:
        typer.echo(f"{result.different} of {count(result.numbers, 'number')} of the model differ from the saved one.")
        raise typer.Exit(FAILED)
    typer.echo(f"The model is the saved one, bit for bit: {count(result.numbers, 'number')}.")


def _simulate_again(directory: Path) -> int:
    import tempfile

    from rainband.worlds.replay import replay_simulated, why_bits_may_differ

    with tempfile.TemporaryDirectory() as folder:
        then, now = replay_simulated(directory, Path(folder))
    if warning := "" if then.time_only else why_bits_may_differ(then):
        typer.echo(f"The bits may differ: {warning}.", err=True)
    if then.trace_hash == now.trace_hash:
        typer.echo(f"{directory.name}: the same run, bit for bit (trace {now.trace_hash}).")
        return 0
    typer.echo(f"{directory.name}: its trace was {then.trace_hash} and is {now.trace_hash}.")
    return FAILED
