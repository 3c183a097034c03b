"""`rainband replay`: repeat a recorded asynchronous run, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.options import completion
from rainband.cli.report_errors import FAILED, report_errors
from rainband.views import formatting as words
from rainband.views.formatting import count

if TYPE_CHECKING:
    from rainband.record.replay import Replayed, ReplayedUpdate


def register(app: typer.Typer) -> None:
    app.command("replay")(command)


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A directory, a name, the beginning of a name, or last.",
            autocompletion=completion.runs,
        ),
    ] = "last",
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs are.")] = Path("runs"),
    until: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Of a recorded run: stop when every block has had N updates."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a recorded run: save the parameters at the end, or at N.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show every update; of a run in virtual time, every message.")
    ] = False,
) -> None:
    """Do a run again, bit for bit: one in virtual time from its seed, a real one if it was started with --record.

    \b
    rainband replay last --until 120 --table --model at_120.safetensors
    """
    from rainband.record.replay import replay
    from rainband.views.history import find_run

    updates: list[ReplayedUpdate] = []
    with report_errors():
        directory = find_run(runs, run)
        if (directory / "simulation.json").exists():
            if until is not None or model is not None:
                raise ValueError("--until and --model are for recorded runs; this one was in virtual time.")
            raise typer.Exit(_simulate_again(directory, table))
        result = replay(directory, updates.append if table else None, until, model)
    if table:
        typer.echo("\n".join(_rows(updates)))
    typer.echo(f"{directory.name}: {count(result.pushes, 'update')} of blocks made again")
    if model is not None:
        typer.echo(f"the parameters are in {model}")
    raise typer.Exit(_compared(result))


def _rows(updates: Sequence[ReplayedUpdate]) -> list[str]:
    """What the first block was given, in its order."""
    head = ("update", "worker", "batches", "read", "staleness", "loss", "norm of the gradient")
    rows = [
        (f"{u.number}", f"{u.worker}", u.batches, f"v{u.read}", f"{u.staleness}", f"{u.loss:.6g}", f"{u.norm:.6g}")
        for u in updates
    ]
    return words.table([head, *rows])


def _compared(result: Replayed) -> int:
    if result.warning:
        typer.echo(f"The bits may differ: {result.warning}.", err=True)
    if not result.saved_hash:
        typer.echo(f"Nothing to compare it with: a model is saved at a run's end. Its bits are {result.repeated_hash}.")
        return 0
    numbers = count(result.numbers, "number")
    if result.different:
        typer.echo(f"{result.different} of {numbers} differ: saved {result.saved_hash}, now {result.repeated_hash}.")
        return FAILED
    typer.echo(f"The model is the saved one, bit for bit: {numbers}, {result.saved_hash} then and now.")
    return 0


def _simulate_again(directory: Path, table: bool) -> int:
    import tempfile

    from rainband.record.replay import replay_simulated, why_bits_may_differ
    from rainband.runtimes.simulation.models.trace import read_lines
    from rainband.runtimes.simulation.models.trace import table as as_table

    with tempfile.TemporaryDirectory() as folder:
        then, now = replay_simulated(directory, Path(folder))
        if table:
            typer.echo(as_table(read_lines(Path(folder))))
    if warning := "" if then.time_only else why_bits_may_differ(then):
        typer.echo(f"The bits may differ: {warning}.", err=True)
    if then.trace_hash == now.trace_hash:
        typer.echo(f"{directory.name}: the same run, bit for bit (trace {now.trace_hash}).")
        return 0
    typer.echo(f"{directory.name}: its trace was {then.trace_hash} and is {now.trace_hash}.")
    return FAILED
